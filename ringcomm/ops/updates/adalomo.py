"""linear_adalomo_update_ of csrc/bindings/ops/weight_update_ops.cc, made of the other operators.

AdaLomo (Lv et al. 2023, arXiv 2310.10195) needs two sums over the whole gradient before the first
weight can change, so that here the gradient is whole, in fp32. The formulas stand in
docs/design/optim.md.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ringcomm.ops.updates.weight_update import check_devices

_ops: Any = torch.ops.ringcomm


def _check_numbers(
    lr: float,
    weight_decay: float,
    beta2: float,
    clip_threshold: float,
    eps_grad: float,
    eps_weight: float,
) -> None:
    wanted = {
        "lr": (lr, lr >= 0, "from 0 on"),
        "weight_decay": (weight_decay, weight_decay >= 0, "from 0 on"),
        "beta2": (beta2, 0 <= beta2 < 1, "in [0, 1)"),
        "clip_threshold": (clip_threshold, clip_threshold > 0, "above 0"),
        "eps_grad": (eps_grad, eps_grad >= 0, "from 0 on"),
        "eps_weight": (eps_weight, eps_weight >= 0, "from 0 on"),
    }
    for name, (value, is_right, where) in wanted.items():
        if not (is_right and math.isfinite(value)):
            raise ValueError(f"ringcomm: {name} is a finite number {where}, got {value!r}")


def _check_linear(weight: Tensor, x: Tensor, grad_out: Tensor, *means: Tensor) -> None:
    check_devices(weight, x, grad_out, *means)
    if weight.dim() != 2:
        raise ValueError(f"ringcomm: a linear weight is a matrix, got shape {tuple(weight.shape)}")
    rows, cols = weight.shape
    if (x.shape[-1:], grad_out.shape[-1:]) != ((cols,), (rows,)):
        raise ValueError(
            f"ringcomm: x and grad_out are of shape (..., {cols}) and (..., {rows}), as the weight"
            f" is; got {tuple(x.shape)} and {tuple(grad_out.shape)}"
        )
    if x.shape[:-1].numel() != grad_out.shape[:-1].numel():
        raise ValueError(
            f"ringcomm: x and grad_out are of as many tokens, got shapes {tuple(x.shape)} and"
            f" {tuple(grad_out.shape)}"
        )
    if x.dtype != grad_out.dtype or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(
            "ringcomm: x and grad_out are both float32, bfloat16 or float16, got"
            f" {x.dtype} and {grad_out.dtype}"
        )
    for mean, size in zip(means, (rows, cols), strict=True):
        if mean.shape != (size,):
            raise ValueError(
                f"ringcomm: a weight of shape {(rows, cols)} has a running mean for each row and"
                f" for each column; got shape {tuple(mean.shape)} where {size} are wanted"
            )
        if mean.dtype != torch.float32:
            raise TypeError(f"ringcomm: running means are float32, got {mean.dtype}")


def _product(x: Tensor, grad_out: Tensor) -> Tensor:
    """grad_out^T x of all tokens in float32, never rounded to less."""
    tokens = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    grads = grad_out.reshape(tokens.shape[0], grad_out.shape[-1]).t()
    if tokens.dtype != torch.float32 and tokens.is_cuda:
        return torch.mm(grads, tokens, out_dtype=torch.float32)
    return torch.mm(grads.float(), tokens.float())


def matrix_factors(row: Tensor, col: Tensor) -> tuple[Tensor, Tensor]:
    """What a gradient's rows and columns are multiplied by, of the running means of its squares."""
    return (row / row.mean()).rsqrt(), col.rsqrt()


def step_and_decay(
    mean_squares: Tensor,
    lr: float,
    weight_decay: float,
    clip_threshold: float,
    eps_weight: float,
) -> Tensor:
    """What adalomo_update_ multiplies updates and weights by.

    Args:
        mean_squares: float32 [2], of the updates and of the weights.
        lr: relative to the weights' RMS, and this at least eps_weight.
        weight_decay: decoupled.
        clip_threshold: the largest RMS of the updates.
        eps_weight: see lr.

    Returns:
        float32 [2], on the same device.
    """
    update_rms, weight_rms = mean_squares.sqrt().unbind()
    step = lr * weight_rms.clamp(min=eps_weight)
    shrunk = step / (update_rms / clip_threshold).clamp(min=1.0)
    return torch.stack([shrunk, 1 - step * weight_decay])


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
    _check_numbers(lr, weight_decay, beta2, clip_threshold, eps_grad, eps_weight)
    _check_linear(weight, x, grad_out, exp_avg_sq_row, exp_avg_sq_col)
    if weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "ringcomm: linear_adalomo_update_ writes into its input, which requires grad; use"
            " torch.no_grad()"
        )
    if not weight.numel():
        return
    # Under autocast the product would be one of 16 bits.
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        grad = _product(x, grad_out)
        row_sums, col_sums = _ops.square_sums(grad, scale, clip_value=clip_value)
        rows, cols = weight.shape
        row = torch.lerp(row_sums / cols + eps_grad, exp_avg_sq_row, beta2)
        col = torch.lerp(col_sums / rows + eps_grad, exp_avg_sq_col, beta2)
        factors = matrix_factors(row, col)
        squares = _ops.adalomo_squares(
            weight, grad, *factors, scale, low=low, clip_value=clip_value
        )
        _ops.adalomo_update_(
            weight,
            grad,
            *factors,
            step_and_decay(squares / weight.numel(), lr, weight_decay, clip_threshold, eps_weight),
            scale,
            rounding_seed,
            low=low,
            clip_value=clip_value,
        )
        exp_avg_sq_row.copy_(row)
        exp_avg_sq_col.copy_(col)


_LIBRARY = torch.library.Library("ringcomm", "IMPL")
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("linear_adalomo_update_", _linear_adalomo_update_, _key)
