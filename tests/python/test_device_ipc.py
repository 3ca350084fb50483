"""Collectives of device tensors by kernels in memory that all ranks map, on emulated GPUs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from emulated_gpu import needs_emulated_gpu, run_on_gpus, with_kernels

from ringcomm import _C

pytestmark = needs_emulated_gpu


def check_all_reduce(rank: int, world_size: int) -> str:
    for num_elems in (0, 1, 1000, 300_000):
        x = torch.arange(num_elems, dtype=torch.float32) + rank
        y = x.to("emugpu")
        dist.all_reduce(y)
        expected = world_size * torch.arange(num_elems) + world_size * (world_size - 1) / 2
        assert torch.equal(y.cpu(), expected.float())
    group = dist.group.WORLD
    assert group is not None
    backend = group._get_backend(torch.device("emugpu"))
    return str(_C.device_transports(backend))


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_reduce(world_size: int) -> None:
    for said in run_on_gpus(world_size, check_all_reduce, world_size, env=with_kernels()):
        assert "cuda_ipc" in said
