"""Updates of float64 weights, in torch's operations: for models that are checked, not for speed.

The functions are those of torch.ops.ringcomm with the same names, without the options of 16-bit
weights.
"""

from typing import Any

from torch import Tensor


def _clamped(grad: Tensor, factor: float, clip_value: float | None) -> Tensor:
    grad = grad * factor
    return grad if clip_value is None else grad.clamp(-clip_value, clip_value)


def sgd_update_(
    weight: Tensor,
    grad: Tensor,
    lr: float,
    weight_decay: float,
    factor: float,
    _: int,
    *,
    clip_value: float | None = None,
    **__: Any,
) -> None:
    """W <- (1 - lr * weight_decay) * W - lr * clamp(factor * G)."""
    weight.mul_(1 - lr * weight_decay).sub_(_clamped(grad, factor, clip_value), alpha=lr)


def square_sums(
    grad: Tensor, factor: float, *, clip_value: float | None = None
) -> tuple[Tensor, Tensor]:
    """The sums of squares by row, and by column."""
    squares = _clamped(grad, factor, clip_value).square()
    return squares.sum(1), squares.sum(0)


def _update(grad: Tensor, rows: Tensor, columns: Tensor, factor: float, clip: Any) -> Tensor:
    return _clamped(grad, factor, clip) * rows[:, None] * columns


def adalomo_squares(
    weight: Tensor,
    grad: Tensor,
    rows: Tensor,
    columns: Tensor,
    factor: float,
    *,
    clip_value: float | None = None,
    **_: Any,
) -> Tensor:
    """The sums of squares of the update and of the weight."""
    update = _update(grad, rows, columns, factor, clip_value)
    return update.new_tensor([float(update.square().sum()), float(weight.square().sum())])


def adalomo_update_(
    weight: Tensor,
    grad: Tensor,
    rows: Tensor,
    columns: Tensor,
    scalars: Tensor,
    factor: float,
    _: int,
    *,
    clip_value: float | None = None,
    **__: Any,
) -> None:
    """W <- scalars[1] * W - scalars[0] * the update."""
    size, decay = scalars.unbind()
    weight.mul_(decay).sub_(_update(grad, rows, columns, factor, clip_value) * size)
