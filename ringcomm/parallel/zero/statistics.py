"""What the ranks know of a step's gradients and weights together, from their shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Statistics(NamedTuple):
    """Of all weights of all ranks, gradients as reduced and before clipping.

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
    shards: Iterable[tuple[Tensor, Tensor]], device: torch.device, group: dist.ProcessGroup
) -> Statistics:
    """From this rank's pairs (weights, gradient). Collective: one SUM and one MAX all_reduce."""
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    largest = torch.zeros(1, dtype=torch.float32, device=device)
    for shard, grad in shards:
        if shard.numel() == 0:
            continue
        sums[0] += _square_sum(grad)
        sums[1] += grad.numel() - torch.isfinite(grad).sum()
        sums[2] += _square_sum(shard)
        largest = torch.maximum(largest, grad.abs().max().float())
    # A MAX may pass over NaN.
    largest = torch.where(largest.isnan(), torch.full_like(largest, torch.inf), largest)
    dist.all_reduce(sums, group=group)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    squares, num_not_finite, param_squares = sums.tolist()
    return Statistics(
        grad_norm=squares**0.5,
        grad_max=float(largest),
        num_not_finite=round(num_not_finite),
        param_norm=param_squares**0.5,
    )


def _square_sum(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, dtype=torch.float32).double().square()
