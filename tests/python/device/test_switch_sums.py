"""Large float sums of GPUs whose switches add go to NCCL, all other calls to ringcomm's kernels.

On four emulated GPUs; for NCCL stands a backend that behaves as it. Which one took a call is what
ringcomm.stats() says: NCCL's is "direct".
"""

from __future__ import annotations

import datetime
import os
import signal
from typing import Any

import emugpu
import pytest
import torch
import torch.distributed as dist
from emulated_gpu import in_emulated_ranks, needs_emulated_gpu, run_on_gpus, with_kernels
from failures import timed
from gpu_ranks import meet
from test_gpu_collectives import transport

import ringcomm
from ringcomm import MismatchError, Options, PeerDiedError

pytestmark = needs_emulated_gpu

GPU, NUM_RANKS = "emugpu", 4
LARGE = (8 << 20) // 4  # elements of float32 in 8 MiB
SWITCHES = {"RINGCOMM_EMULATOR_MULTICAST": "1"}
with_switches = in_emulated_ranks(NUM_RANKS, env=SWITCHES, num_devices=NUM_RANKS, fresh=True)


def algorithm_of(group: Any = None, op: Any = dist.ReduceOp.SUM, **options: Any) -> str:
    """By what an all_reduce of ones goes, whose result is checked."""
    group = group or dist.new_group()
    size = options.pop("size", LARGE)
    tensor = torch.ones(size, device=GPU, **options)
    dist.all_reduce(tensor, op, group=group)
    expected = NUM_RANKS if op == dist.ReduceOp.SUM else 1
    assert tensor.unique().tolist() == [expected]
    (found,) = (by for name, by in ringcomm.stats(group) if name == "all_reduce")
    dist.destroy_process_group(group)
    return str(found)


@with_switches
def test_which_calls_go_to_nccl(rank: int) -> None:
    name = transport()
    assert name.startswith("cuda_ipc")
    assert "switches that add" in name
    assert algorithm_of() == "direct"
    assert algorithm_of(dtype=torch.int32) == "two_shot"


@pytest.mark.slow
@with_switches
def test_which_other_calls_go_to_nccl(rank: int) -> None:
    assert algorithm_of(size=2 * LARGE, dtype=torch.bfloat16) == "direct"
    assert algorithm_of(size=LARGE - 1) == "two_shot"
    assert algorithm_of(op=dist.ReduceOp.AVG) == "two_shot"
    assert algorithm_of(dist.new_group(pg_options=Options(algorithm="two_shot"))) == "two_shot"
    assert (
        algorithm_of(dist.new_group(pg_options=Options(deterministic="rank_order"))) == "two_shot"
    )


@with_switches
def test_calls_of_a_graph_stay_with_the_kernels(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/115388: the end of NCCL's communicator waits for
    the graphs that have captured its calls.
    """
    tensor = torch.ones(LARGE, device=GPU)
    graph = emugpu.CUDAGraph()
    group = dist.new_group()
    with emugpu.graph(graph):
        dist.all_reduce(tensor, group=group)
    graph.replay()
    assert tensor.unique().tolist() == [NUM_RANKS]
    assert ("all_reduce", "two_shot") in ringcomm.stats(group)


@with_switches
def test_a_rank_without_nccl_leaves_sums_to_all_ranks_kernels(rank: int) -> None:
    """https://github.com/pytorch/pytorch/pull/177472: NCCL may fail on switches that are there."""
    if rank == 1:
        del dist.Backend.default_device_backend_map[GPU]
    assert algorithm_of() == "two_shot"


@pytest.mark.parametrize(
    ("world_size", "num_devices", "env"),
    [
        (4, 4, {}),
        (4, 2, SWITCHES),
        (3, 3, SWITCHES),
        (4, 4, {**SWITCHES, "NCCL_NVLS_ENABLE": "0"}),
    ],
)
def test_where_there_are_no_switches_kernels_add(
    world_size: int, num_devices: int, env: dict[str, str]
) -> None:
    """Nor where users keep NCCL from them: https://github.com/NVIDIA/nccl/issues/1788,
    https://github.com/NVIDIA/nccl-tests/issues/167.
    """
    env = {**with_kernels(), **env}
    for name in run_on_gpus(world_size, name_of_transport, num_devices=num_devices, env=env):
        assert name.startswith("cuda_ipc")
        assert "switches" not in name


def name_of_transport(rank: int) -> str:
    return transport()


@pytest.mark.slow
@with_switches
def test_calls_of_both_on_different_streams_keep_their_order(rank: int) -> None:
    """Each reads what the one before has written. https://github.com/sgl-project/sglang/issues/31117:
    kernels of one group on two streams at a time wait for each other without end.
    """
    tensor = torch.ones(LARGE, device=GPU)
    small = tensor[:1000]
    side = emugpu.Stream()
    for _ in range(3):
        dist.all_reduce(tensor)
        work = dist.all_reduce(small, async_op=True)
        assert work is not None
        work.wait()
        side.wait_stream(emugpu.current_stream())
        with emugpu.stream(side):
            dist.all_reduce(tensor)
        emugpu.current_stream().wait_stream(side)
        dist.all_reduce(small)
        tensor /= NUM_RANKS**2
        small /= NUM_RANKS**2
    emugpu.synchronize()
    assert tensor.unique().tolist() == [1.0]


def until_it_raises(rank: int, others: int) -> dict[str, Any]:
    """Rank 1 sums `others` elements where the rest sum LARGE."""

    def calls() -> None:
        while True:
            dist.all_reduce(torch.ones(others if rank == 1 else LARGE, device=GPU))
            dist.all_reduce(torch.ones(4, device=GPU))
            emugpu.synchronize()

    dist.all_reduce(torch.ones(LARGE, device=GPU))
    emugpu.synchronize()
    meet()
    store = dist.distributed_c10d._get_default_store()
    said = timed(calls)
    store.set(f"told {rank}", "")
    store.wait([f"told {other}" for other in range(NUM_RANKS)], datetime.timedelta(seconds=60))
    return said


@pytest.mark.parametrize("others", [LARGE + 4, 1000])
def test_a_rank_that_sums_another_size_is_named(others: int) -> None:
    env = {**with_kernels(), **SWITCHES}
    results = run_on_gpus(
        NUM_RANKS, until_it_raises, others, num_devices=NUM_RANKS, env=env, fresh=True
    )
    for said in results:
        assert said["type"] == MismatchError.__name__, said
        assert "rank 1" in said["text"], said  # or rank 1 has told of another rank's
        assert said["seconds"] < 20, said


def die_in_a_sum(rank: int) -> dict[str, Any]:
    tensor = torch.ones(LARGE, device=GPU)
    dist.all_reduce(tensor)
    emugpu.synchronize()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def calls() -> None:
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait(datetime.timedelta(seconds=60))

    return timed(calls)


def test_a_rank_that_dies_is_named_and_ends_a_sum_of_nccl() -> None:
    env = {**with_kernels(), **SWITCHES}
    results = run_on_gpus(
        NUM_RANKS, die_in_a_sum, num_devices=NUM_RANKS, env=env, fresh=True, may_die=[1]
    )
    for rank, said in enumerate(results):
        if rank != 1:
            assert (said["type"], said["rank"]) == (PeerDiedError.__name__, 1), said
