"""What ranks do alike with the square of a norm that they have summed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["clip_by_norm", "norm_of_square"]


def norm_of_square(square: Tensor, *, error_if_nonfinite: bool) -> Tensor:
    """The norm.

    Raises:
        RuntimeError: it is not finite, and that is an error; on all ranks.
    """
    norm = square.sqrt()
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"the norm of the gradients is {float(norm)}")
    return norm


def clip_by_norm(
    params: Iterable[Tensor], square: Tensor, max_norm: float, *, error_if_nonfinite: bool
) -> Tensor:
    """Multiplies gradients by min(1, max_norm / norm); the norm."""
    norm = norm_of_square(square, error_if_nonfinite=error_if_nonfinite)
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return norm
