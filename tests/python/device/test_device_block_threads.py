"""Blocks of many threads on emulated GPUs, where a block has one elsewhere: what they do together.

A block's threads share what one of them finds out: who is missing, and whether to go on.
"""

from __future__ import annotations

import time
from typing import Any

import emulated_gpu
import pytest
import test_gpu_collectives
import torch.distributed as dist
from gpu_ranks import EMULATED, Gpus, module
from test_gpu_faults import ones, outcome

pytestmark = emulated_gpu.needs_emulated_gpu

# Room for messages of all three pairs of ranks, beside the blocks of collectives.
THREADS = {"RINGCOMM_EMULATOR_THREADS": "64", "RINGCOMM_EMULATOR_SMS": "24"}
TIMEOUT_S, LATE_S = 1.5, 0.5


def check_collectives(rank: int) -> None:
    for num_elems in (1, 1003, 30_011):
        for check in test_gpu_collectives.OTHERS:
            check(rank, num_elems)


def test_collectives() -> None:
    gpus = Gpus(EMULATED, 3)
    gpus.run(test_gpu_collectives.check_types, "sum", env=THREADS)
    gpus.run(check_collectives, env=THREADS)


def miss(rank: int, num_elems: int) -> dict[str, Any]:
    """Rank 1 never comes, and rank 0 late: some threads of a block have waited for both."""
    dist.all_reduce(ones())
    module().synchronize()
    if rank == 1:
        time.sleep(2 * TIMEOUT_S)
        return {}
    if rank == 0:
        time.sleep(LATE_S)
    return outcome(lambda: dist.all_reduce(ones(num_elems), async_op=True))


@pytest.mark.parametrize(("world_size", "num_elems"), [(2, 100), (3, 100), (3, 300_007)])
def test_the_rank_that_never_comes_is_named(world_size: int, num_elems: int) -> None:
    gpus = Gpus(EMULATED, world_size)
    results = gpus.run(miss, num_elems, group_timeout_s=TIMEOUT_S, env=THREADS, fresh=True)
    for rank, said in enumerate(results):
        if rank != 1:
            assert said["type"] == "CollectiveTimeoutError", said
            assert said["op"] == "all_reduce", said
            assert "waited for rank 1 " in said["text"], said
