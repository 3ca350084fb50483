"""What the ranks know of a step's gradients and weights together, from their shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ringcomm.parallel.clip import bytes_over_all_ranks, over_all_ranks
from ringcomm.parallel.model_axes import Axes, Held, axes_of


class Statistics(NamedTuple):
    """Of all weights of all ranks, gradients as reduced and before clipping.

    On a mesh these are the whole model's: every element counts once, over data, tensor and pipeline
    parallelism.

    Attributes:
        grad_norm: the 2-norm of all gradients; NaN or inf where one is.
        grad_max: the largest absolute value of a gradient; inf where one is NaN.
        num_not_finite: elements of gradients that are Inf or NaN.
        param_norm: the 2-norm of all weights.
    """

    grad_norm: float
    grad_max: float
    num_not_finite: int
    param_norm: float


def reduce_statistics(
    parts: Iterable[tuple[nn.Parameter, Tensor, Tensor]], axes: Axes, device: torch.device
) -> Statistics:
    """The statistics of this rank's parts of weights, and of their gradients.

    Args:
        parts: a parameter, and this rank's elements of it and of its gradient.
        axes: who has the other elements.
        device: of the parts.

    Collective: an all_gather of 32 bytes a rank over each group of the axes.
    """
    zeros = torch.zeros(4, dtype=torch.float64, device=device)
    own: dict[Held, Tensor] = {}
    for param, weights, grad in parts:
        held = axes.held.get(param)
        if held is None or grad.numel() == 0:  # a tied weight that an earlier stage counts
            continue
        row = _row_of(weights, grad)
        before = own.get(held, zeros)
        own[held] = torch.cat([before[:3] + row[:3], torch.maximum(before[3:], row[3:])])
    found = over_all_ranks(axes, own, zeros, num_sums=3)
    squares, num_not_finite, param_squares, grad_max = found.tolist()
    return Statistics(
        grad_norm=squares**0.5,
        grad_max=grad_max,
        num_not_finite=round(num_not_finite),
        param_norm=param_squares**0.5,
    )


def statistics_bytes(model: nn.Module, world_size: int) -> int:
    """What a rank sends in reduce_statistics().

    Args:
        model: before it is sharded.
        world_size: of the data-parallel group to be.
    """
    return bytes_over_all_ranks(axes_of(model), 4 * torch.float64.itemsize, world_size)


def _row_of(weights: Tensor, grad: Tensor) -> Tensor:
    """Squares of a gradient, how many elements are not finite, squares of weights, the maximum."""
    largest = grad.abs().max().double()
    return torch.stack(
        [
            _square_sum(grad),
            (grad.numel() - torch.isfinite(grad).sum()).double(),
            _square_sum(weights),
            torch.where(largest.isnan(), torch.full_like(largest, torch.inf), largest),
        ]
    )


def _square_sum(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, dtype=torch.float32).double().square()
