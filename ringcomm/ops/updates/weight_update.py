"""Updates of weights in place (csrc/bindings/ops/weight_update_ops.cc): wrappers and fakes.

docs/design/optim.md has the formulas. Infinities and NaN in a gradient go into the weight. Results
are the same for any number of threads. A weight may require grad: an update counts as a step of an
optimizer.
"""

from typing import Any

import torch
from torch import Tensor

from ringcomm import _C  # noqa: F401 -- has the operators

_ops: Any = torch.ops.ringcomm


# ---- weights in two parts


def split_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """An fp32 weight as bfloat16 and what that lacks: 32 bits together, and no master copy.

    Args:
        weight: float32, any shape.

    Returns:
        The nearest bfloat16 (halves away from zero), and `low`, int16; both of the weight's shape.

    Raises:
        TypeError: the weight is not float32.
    """
    if weight.dtype != torch.float32:
        raise TypeError(f"a float32 weight is split, got {weight.dtype}")
    canonical = torch.where(weight.isnan(), torch.nan, weight.detach())
    bits = canonical.view(torch.int32)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def join_weight(weight: Tensor, low: Tensor) -> Tensor:
    """The fp32 weight that `split_weight` took apart, or that updates have made of it since.

    Args:
        weight: bfloat16, any shape.
        low: int16, of the same shape.

    Returns:
        float32, of the same shape.

    Raises:
        TypeError: a dtype is another one.
        ValueError: the shapes differ.
    """
    if (weight.dtype, low.dtype) != (torch.bfloat16, torch.int16):
        raise TypeError(f"a bfloat16 weight and an int16 low, got {weight.dtype} and {low.dtype}")
    if weight.shape != low.shape:
        raise ValueError(f"one shape for both, got {tuple(weight.shape)} and {tuple(low.shape)}")
    high = weight.detach().view(torch.int16).to(torch.int32) << 16
    return (high + low).view(torch.float32)


# ---- wrappers


def _seed(rounding_seed: int | None) -> int:
    if rounding_seed is not None and rounding_seed < 0:
        raise ValueError(f"rounding_seed is a number from 0 on or None, got {rounding_seed}")
    return -1 if rounding_seed is None else rounding_seed


def sgd_update_(
    weight: Tensor,
    grad: Tensor,
    *,
    lr: float,
    weight_decay: float = 0.0,
    scale: float = 1.0,
    clip_value: float | None = None,
    rounding_seed: int | None = None,
    low: Tensor | None = None,
    first_elem: int = 0,
) -> Tensor:
    """Updates a weight by its gradient, in place.

    Args:
        weight: any shape, elements side by side in memory.
        grad: of the weight's shape; float32, bfloat16 or float16.
        first_elem: where the weight begins in what it is a shard of, from 0 on: a shard has the
            random bits of the whole.
        lr: the step size.
        weight_decay: decoupled: the weight is first multiplied by 1 - lr * weight_decay.
        scale: multiplies the gradient: the inverse of a loss scale, a factor that clips the norm.
        clip_value: what clamps the scaled gradient from both sides; None for no limit.
        rounding_seed: None rounds to nearest even; a number from 0 on rounds bfloat16 weights
            stochastically, by random bits of this seed and the element's place alone.
        low: what a bfloat16 weight lacks of an fp32 one, as `split_weight` makes it; updated too.

    Returns:
        `weight`.

    Raises:
        ValueError: a shape, a device or a number is not as wanted, tensors share memory, or a
            rounding_seed or low comes with another weight than bfloat16, or both do.
        TypeError: a dtype is another one.
    """
    with torch.no_grad():
        _ops.sgd_update_(
            weight,
            grad,
            lr,
            weight_decay,
            scale,
            _seed(rounding_seed),
            low=low,
            clip_value=clip_value,
            first_elem=first_elem,
        )
    return weight


def linear_sgd_update_(
    weight: Tensor,
    x: Tensor,
    grad_out: Tensor,
    *,
    lr: float,
    weight_decay: float = 0.0,
    scale: float = 1.0,
    clip_value: float | None = None,
    rounding_seed: int | None = None,
    low: Tensor | None = None,
) -> Tensor:
    """Updates a linear layer's weight by grad_out^T x, which is never whole in memory.

    Args:
        weight: (out, in), contiguous.
        x: (..., in), the layer's input; float32, bfloat16 or float16.
        grad_out: (..., out), the gradient of its output, of x's dtype. The sum over tokens is in
            fp32 and not rounded before the update.
        lr: the step size; this and what follows as in `sgd_update_`.
        weight_decay: decoupled decay.
        scale: multiplies the gradient.
        clip_value: clamps it; None for no limit.
        rounding_seed: for stochastic rounding, or None.
        low: what a bfloat16 weight lacks of an fp32 one.

    Returns:
        `weight`.

    Raises:
        ValueError, TypeError: as `sgd_update_`.
    """
    with torch.no_grad():
        _ops.linear_sgd_update_(
            weight,
            x,
            grad_out,
            lr,
            weight_decay,
            scale,
            _seed(rounding_seed),
            low=low,
            clip_value=clip_value,
        )
    return weight


def embedding_sgd_update_(
    weight: Tensor,
    indices: Tensor,
    grad_out: Tensor,
    *,
    lr: float,
    weight_decay: float = 0.0,
    scale: float = 1.0,
    clip_value: float | None = None,
    rounding_seed: int | None = None,
    low: Tensor | None = None,
    padding_idx: int | None = None,
) -> Tensor:
    """Updates the rows of an embedding by the gradients of its output, with no dense gradient.

    Without weight decay only rows that some index names are read or written. With it the result is
    that of SGD with the dense gradient: all rows decay.

    Args:
        weight: (rows, dim), contiguous.
        indices: any shape; int64 or int32.
        grad_out: (*indices.shape, dim); float32, bfloat16 or float16. Gradients of one row are
            added up in fp32 before they are scaled and clamped.
        padding_idx: a row that gets no gradient, or None.
        lr: the step size; this and what follows as in `sgd_update_`.
        weight_decay: decoupled decay.
        scale: multiplies the gradient.
        clip_value: clamps it; None for no limit.
        rounding_seed: for stochastic rounding, or None.
        low: what a bfloat16 weight lacks of an fp32 one.

    Returns:
        `weight`.

    Raises:
        ValueError, TypeError: as `sgd_update_`.
        IndexError: an index names no row; nothing has been written. On CUDA the device asserts.
    """
    if padding_idx is not None and padding_idx < 0:
        raise ValueError(f"padding_idx is a row or None, got {padding_idx}")
    with torch.no_grad():
        _ops.embedding_sgd_update_(
            weight,
            indices,
            grad_out,
            lr,
            weight_decay,
            scale,
            _seed(rounding_seed),
            low=low,
            clip_value=clip_value,
            padding_idx=-1 if padding_idx is None else padding_idx,
        )
    return weight


# ---- fakes, in the order of the operators


def check_devices(*tensors: Tensor | None) -> None:
    """Raises ValueError unless all are on one device."""
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) > 1:
        raise ValueError(
            "ringcomm: an update's tensors are on one device, got"
            f" {' and '.join(sorted(map(str, devices)))}"
        )


def _fake_update(weight: Tensor, *args: Any, low: Tensor | None = None, **options: Any) -> None:
    check_devices(weight, low, *(arg for arg in args if isinstance(arg, Tensor)))


for _name in (
    "sgd_update_",
    "linear_sgd_update_",
    "embedding_sgd_update_",
    "adalomo_update_",
    "linear_adalomo_update_",
):
    torch.library.register_fake(f"ringcomm::{_name}", _fake_update)


@torch.library.register_fake("ringcomm::square_sums")
def _(grad: Tensor, *options: Any, **more: Any) -> tuple[Tensor, Tensor]:
    rows, cols = grad.shape
    return grad.new_empty([rows], dtype=torch.float32), grad.new_empty([cols], dtype=torch.float32)


@torch.library.register_fake("ringcomm::adalomo_squares")
def _(
    weight: Tensor,
    grad: Tensor,
    row_factor: Tensor,
    col_factor: Tensor,
    scale: float,
    *,
    low: Tensor | None = None,
    clip_value: float | None = None,
) -> Tensor:
    check_devices(weight, grad, row_factor, col_factor, low)
    return weight.new_empty([2], dtype=torch.float32)
