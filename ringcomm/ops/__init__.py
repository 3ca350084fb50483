"""Collectives as torch operators: torch.compile sees them, new results are differentiable.

`torch.ops.ringcomm.*` take the group's name; the functions here take the group.
"""

from ringcomm.ops.barriers import monitored_barrier
from ringcomm.ops.collectives import (
    all_gather,
    all_reduce,
    all_reduce_,
    broadcast,
    broadcast_,
    reduce,
    reduce_scatter,
    ring_all_reduce_,
)

__all__ = [
    "all_gather",
    "all_reduce",
    "all_reduce_",
    "broadcast",
    "broadcast_",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "ring_all_reduce_",
]
