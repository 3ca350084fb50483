"""Updates of weights in place: fakes of csrc/bindings/ops/weight_update_ops.cc, and AdaLomo's.

linear_adalomo_update_ is made of the other operators here. AdaLomo (Lv et al. 2023, arXiv
2310.10195) needs two sums over the whole gradient before the first weight can change, so that the
gradient is materialized, in fp32. docs/design/optim.md has the formulas.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ringcomm.ops.arguments import (
    check_weight,
    check_writable,
    numbers_of,
    step_of,
    tokens_of,
    want,
)

_ops: Any = torch.ops.ringcomm


# ---- fakes


def _check_devices(*tensors: Any) -> None:
    devices = {str(tensor.device) for tensor in tensors if isinstance(tensor, Tensor)}
    want(len(devices) <= 1, "an update", "tensors on one device", " and ".join(sorted(devices)))


def _fake_update(weight: Tensor, *args: Any, low: Tensor | None = None, **options: Any) -> None:
    _check_devices(weight, low, *args)


for _name in ("sgd", "linear_sgd", "embedding_sgd", "adalomo", "linear_adalomo"):
    torch.library.register_fake(f"ringcomm::{_name}_update_", _fake_update)


@torch.library.register_fake("ringcomm::square_sums")
def _(grad: Tensor, *options: Any, **more: Any) -> tuple[Tensor, Tensor]:
    rows, cols = grad.shape
    return grad.new_empty([rows], dtype=torch.float32), grad.new_empty([cols], dtype=torch.float32)


@torch.library.register_fake("ringcomm::adalomo_squares")
def _(weight: Tensor, *args: Any, low: Tensor | None = None, **options: Any) -> Tensor:
    _check_devices(weight, low, *args)
    return weight.new_empty([2], dtype=torch.float32)


# ---- AdaLomo


def matrix_factors(row: Tensor, col: Tensor) -> tuple[Tensor, Tensor]:
    """What a gradient's rows and columns are multiplied by, of the running means of its squares."""
    return (row / row.mean()).rsqrt(), col.rsqrt()


def step_and_decay(
    mean_squares: Tensor, lr: float, weight_decay: float, clip_threshold: float, eps_weight: float
) -> Tensor:
    """What adalomo_update_ multiplies updates and weights by, of their mean squares.

    lr is relative to the weights' RMS, which is at least eps_weight.
    """
    update_rms, weight_rms = mean_squares.sqrt().unbind()
    step = lr * weight_rms.clamp(min=eps_weight)
    shrunk = step / (update_rms / clip_threshold).clamp(min=1.0)
    return torch.stack([shrunk, 1 - step * weight_decay])


def _product(tokens: Tensor, grads: Tensor) -> Tensor:
    """grads^T tokens in float32, never rounded to less."""
    if tokens.dtype != torch.float32 and tokens.is_cuda:
        return torch.mm(grads.t(), tokens, out_dtype=torch.float32)
    return torch.mm(grads.t().float(), tokens.float())


def _linear_adalomo_update_(
    weight: Tensor,
    x: Tensor,
    grad_out: Tensor,
    exp_avg_sq_row: Tensor,
    exp_avg_sq_col: Tensor,
    lr: float,
    weight_decay: float,
    scale: float,
    rounding_seed: int = -1,
    *,
    beta2: float,
    clip_threshold: float = 1.0,
    eps_grad: float = 1e-30,
    eps_weight: float = 1e-3,
    low: Tensor | None = None,
    clip_value: float | None = None,
) -> None:
    op = "linear_adalomo_update_"
    check_weight(op, weight, low, rounding_seed, is_matrix=True)
    step_of(op, scale, clip_value, rounding_seed, lr, weight_decay)
    want(0 <= beta2 < 1, op, "beta2 in [0, 1)", beta2)
    want(0 < clip_threshold < math.inf, op, "a finite clip_threshold above 0", clip_threshold)
    want(0 <= eps_grad < math.inf, op, "a finite eps_grad from 0 on", eps_grad)
    want(0 <= eps_weight < math.inf, op, "a finite eps_weight from 0 on", eps_weight)
    rows, cols = weight.shape
    old_row = numbers_of(op, "exp_avg_sq_row", exp_avg_sq_row, rows, weight)
    old_col = numbers_of(op, "exp_avg_sq_col", exp_avg_sq_col, cols, weight)
    tokens, grads = tokens_of(op, weight, x, grad_out)
    check_writable(op, weight, low, x, grad_out, exp_avg_sq_row, exp_avg_sq_col)
    if not weight.numel():
        return
    # Under autocast the product would be one of 16 bits.
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        grad = _product(tokens, grads)
        row_sums, col_sums = _ops.square_sums(grad, scale, clip_value=clip_value)
        row = torch.lerp(row_sums / cols + eps_grad, old_row, beta2)
        col = torch.lerp(col_sums / rows + eps_grad, old_col, beta2)
        given = (weight, grad, *matrix_factors(row, col))
        options = {"low": low, "clip_value": clip_value}
        means = _ops.adalomo_squares(*given, scale, **options) / weight.numel()
        numbers = step_and_decay(means, lr, weight_decay, clip_threshold, eps_weight)
        _ops.adalomo_update_(*given, numbers, scale, rounding_seed, **options)
        exp_avg_sq_row.copy_(row)
        exp_avg_sq_col.copy_(col)


_LIBRARY = torch.library.Library("ringcomm", "IMPL")
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("linear_adalomo_update_", _linear_adalomo_update_, _key)
