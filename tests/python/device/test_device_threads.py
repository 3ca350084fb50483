"""Ranks that are threads of one process, on one emulated GPU: each has a stream of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import emugpu
import emulated_gpu
import pytest
import torch
import torch.distributed as dist
from emulated_gpu import run_on_gpus, with_kernels

from ringcomm import _C

pytestmark = emulated_gpu.needs_emulated_gpu


def make_group(store: dist.Store, rank: int, world_size: int) -> Any:
    options = dist.distributed_c10d._DistributedBackendOptions()
    options.store = store
    options.group_rank = rank
    options.group_size = world_size
    options.timeout = timedelta(seconds=30)
    options.group_id = "threads"
    options.global_ranks_in_group = list(range(world_size))
    return dist.Backend._plugins["RINGCOMM"].creator_fn(options, None)


def run_thread(store: dist.Store, rank: int, world_size: int) -> str:
    group = make_group(store, rank, world_size)
    device = torch.device("emugpu:0")
    stream = torch.Stream(device)
    with emugpu.stream(stream):
        for num_elems in (1, 1000, 200_000):
            tensor = torch.arange(num_elems, device=device) + rank
            group.allreduce([tensor]).wait()
            outputs = [torch.empty_like(tensor) for _ in range(world_size)]
            group.allgather([outputs], [tensor]).wait()
            expected = torch.arange(num_elems) * world_size + sum(range(world_size))
            for output in outputs:
                assert torch.equal(output.cpu(), expected)
    stream.synchronize()
    (name,) = _C.device_transports(group).values()
    group.shutdown()
    return str(name)


def check_threads(rank: int, world_size: int) -> list[str]:
    store = dist.HashStore()
    with ThreadPoolExecutor(world_size) as pool:
        ranks = [pool.submit(run_thread, store, i, world_size) for i in range(world_size)]
        return [future.result(timeout=50) for future in ranks]


@pytest.mark.parametrize("mps", ["1", "0"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_threads(world_size: int, mps: str) -> None:
    """Kernels of one process run side by side whether there is an MPS or not."""
    env = {**with_kernels(), "RINGCOMM_EMULATOR_MPS": mps}
    (names,) = run_on_gpus(1, check_threads, world_size, backend=None, env=env)
    for name in names:
        assert f"{world_size} ranks on a GPU, side by side" in name
