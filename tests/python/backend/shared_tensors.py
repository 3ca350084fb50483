"""What the tests of shared tensors have in common."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from torch import Tensor

import ringcomm
from ringcomm import _C


def reduce_op(name: str) -> dist.ReduceOp:
    return getattr(dist.ReduceOp, name.upper())


def shared_copy(values: Tensor) -> Tensor:
    """The same values in shared memory."""
    return ringcomm.empty_shared(values.shape, dtype=values.dtype).copy_(values)


def placed(values: Tensor, rank: int, sharing: int) -> Tensor:
    """A copy of the values, shared if bit `rank` of `sharing` is set."""
    return shared_copy(values) if sharing >> rank & 1 else values.clone()


def num_direct(op: str = "all_reduce") -> int:
    """How often this process has run it directly."""
    return ringcomm.stats().get((op, "direct"), {"num_calls": 0})["num_calls"]


def num_peer_regions() -> int:
    """How many regions of peers' shared memory this process has mapped."""
    maps = Path("/proc/self/maps").read_text()
    return maps.count("memfd:ringcomm-shared") - _C.shared_memory_usage()["num_regions"]
