"""Blocks of many threads on emulated GPUs, where a block has one elsewhere: what they do together.

A block's threads share what one of them finds out: who is missing, and whether to go on.
"""

from __future__ import annotations

import emulated_gpu
import pytest
import test_gpu_collectives
import test_gpu_faults
from gpu_ranks import EMULATED, Gpus

pytestmark = emulated_gpu.needs_emulated_gpu

THREADS = {"RINGCOMM_EMULATOR_THREADS": "64"}
TIMEOUT_S = 1.5


def check_collectives(rank: int) -> None:
    for num_elems in (1, 1003, 30_011):
        for check in test_gpu_collectives.OTHERS:
            check(rank, num_elems)


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives(world_size: int) -> None:
    gpus = Gpus(EMULATED, world_size)
    gpus.run(test_gpu_collectives.check_types, "sum", env=THREADS)
    gpus.run(check_collectives, env=THREADS)


@pytest.mark.parametrize("num_elems", [1000, 300_007])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_never_comes_is_named(world_size: int, num_elems: int) -> None:
    """By each thread that waits for it, and by no thread that had what it waited for."""
    gpus = Gpus(EMULATED, world_size)
    miss, args = test_gpu_faults.miss, (num_elems, TIMEOUT_S)
    for rank, said in enumerate(
        gpus.run(miss, *args, group_timeout_s=TIMEOUT_S, env=THREADS, fresh=True)
    ):
        assert said["usable"]
        if rank != 1:
            assert said["type"] == "CollectiveTimeoutError", said
            assert said["op"] == "all_reduce", said
            assert "waited for rank 1 " in said["text"]
