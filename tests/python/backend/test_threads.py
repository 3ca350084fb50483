"""Collectives whose copies and sums run on several threads of each rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import slow
from oracle import num_threads
from ranks import in_ranks

import ringcomm

NUM_THREADS = 3
SIZES = (70_001, 1_000_003)
Call = Callable[[dist.ProcessGroup, torch.Tensor, int], torch.Tensor]


def all_reduce(group: dist.ProcessGroup, data: torch.Tensor, _world_size: int) -> torch.Tensor:
    dist.all_reduce(data, group=group)
    return data


def average_later(group: dist.ProcessGroup, data: torch.Tensor, _world_size: int) -> torch.Tensor:
    work = dist.all_reduce(data, op=dist.ReduceOp.AVG, group=group, async_op=True)
    assert work is not None
    work.wait()
    return data


def all_reduce_shared(group: dist.ProcessGroup, data: torch.Tensor, _size: int) -> torch.Tensor:
    shared = ringcomm.empty_shared(data.shape, dtype=data.dtype)
    shared.copy_(data)
    dist.all_reduce(shared, group=group)
    return shared


def reduce(group: dist.ProcessGroup, data: torch.Tensor, _world_size: int) -> torch.Tensor:
    dist.reduce(data, group_dst=1, group=group)
    return data if dist.get_rank(group) == 1 else data[:0]


def broadcast(group: dist.ProcessGroup, data: torch.Tensor, _world_size: int) -> torch.Tensor:
    dist.broadcast(data, group_src=1, group=group)
    return data


def all_gather(group: dist.ProcessGroup, data: torch.Tensor, world_size: int) -> torch.Tensor:
    gathered = data.new_empty(world_size * data.numel())
    dist.all_gather_into_tensor(gathered, data, group=group)
    return gathered


def reduce_scatter(group: dist.ProcessGroup, data: torch.Tensor, world_size: int) -> torch.Tensor:
    scattered = torch.empty_like(data)
    dist.reduce_scatter_tensor(scattered, data.repeat(world_size), group=group)
    return scattered


def all_to_all(group: dist.ProcessGroup, data: torch.Tensor, world_size: int) -> torch.Tensor:
    """Of different sizes: rank r has r + 1 parts for each."""
    rank, part = dist.get_rank(group), data.numel() // world_size
    received = data.new_empty(sum(part * (r + 1) // world_size for r in range(world_size)))
    sent = part * (rank + 1) // world_size
    dist.all_to_all_single(
        received,
        data[: sent * world_size].clone(),
        [part * (r + 1) // world_size for r in range(world_size)],
        [sent] * world_size,
        group=group,
    )
    return received


def update(group: dist.ProcessGroup, data: torch.Tensor, _world_size: int) -> torch.Tensor:
    param = torch.linspace(-1, 1, data.numel()).bfloat16()
    optimizer = ringcomm.ops.AdamWStep(lr=0.1)
    begin, end = ringcomm.ops.shard_range(param.numel(), group.size(), group.rank())
    state = {name: torch.zeros(end - begin) for name in optimizer.state_names}
    for step in (1, 2):
        ringcomm.ops.reduce_scatter_update_all_gather_(
            param, data, state, optimizer=optimizer, step=step, group=group
        )
    return torch.cat([param.view(torch.int16), *(s.view(torch.int16) for s in state.values())])


CALLS: tuple[Call, ...] = (
    all_reduce,
    average_later,
    all_reduce_shared,
    reduce,
    broadcast,
    all_gather,
    reduce_scatter,
    all_to_all,
    update,
)
CALLS_BY_ALGORITHM: dict[Any, tuple[Call, ...]] = {
    "auto": CALLS,
    "ring": (all_reduce, average_later, update),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@in_ranks((2, 3))
def test_results_have_the_same_bits_with_any_number_of_threads(
    rank: int, world_size: int, dtype: torch.dtype
) -> None:
    ranks = list(range(world_size))
    for algorithm, calls in CALLS_BY_ALGORITHM.items():
        groups = [
            dist.new_group(ranks, pg_options=ringcomm.Options(max_threads=num, algorithm=algorithm))
            for num in (1, 2, 3)
        ]
        with num_threads(NUM_THREADS):
            for num_elems in SIZES:
                generator = torch.Generator().manual_seed(rank)
                data = torch.randn(num_elems, generator=generator).to(dtype)
                for call in calls:
                    alone, *others = (call(group, data.clone(), world_size) for group in groups)
                    for result in others:
                        assert torch.equal(alone.view(torch.uint8), result.view(torch.uint8)), (
                            call.__name__,
                            algorithm,
                            num_elems,
                        )
        for group in groups:
            dist.destroy_process_group(group)


def reduce_until_it_fails(group: dist.ProcessGroup, data: torch.Tensor) -> None:
    while True:
        dist.all_reduce(data, group=group)


@pytest.mark.parametrize("algorithm", ["auto", "ring"])
@in_ranks(3, fresh=True, may_die=[2])
def test_a_death_ends_the_call_of_every_thread(rank: int, algorithm: Any) -> None:
    options = ringcomm.Options(max_threads=NUM_THREADS, algorithm=algorithm)
    group = dist.new_group([0, 1, 2], pg_options=options)
    data = torch.ones(4 << 20)
    with num_threads(NUM_THREADS):
        dist.all_reduce(data, group=group)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(ringcomm.PeerDiedError, match="rank 2"):
            reduce_until_it_fails(group, data)


@in_ranks(2)
def test_a_rank_that_pins_itself_later_is_right(rank: int) -> None:
    """The threads of its team keep their cores; its own are one."""
    allowed = os.sched_getaffinity(0)
    group = dist.new_group([0, 1])
    try:
        with num_threads(NUM_THREADS):
            os.sched_setaffinity(0, {min(allowed)})
            data = torch.full((1 << 20,), rank + 1.0)
            dist.all_reduce(data, group=group)
            assert data.eq(3).all()
    finally:
        os.sched_setaffinity(0, allowed)
        dist.destroy_process_group(group)


FORKED = """
import datetime, os, sys
import numpy as np, torch, torch.distributed as dist

torch.set_num_threads(2)
torch.ones(10_000_000).add_(1)  # torch has its threads now
rank = int(os.fork() == 0)
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("ringcomm", store=store, rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=20))
for n in (1000, 100_000, 1_000_000):
    x = np.full(n, rank + 1.0, dtype=np.float32)
    dist.all_reduce(torch.from_numpy(x))
    assert x.min() == x.max() == 3
dist.destroy_process_group()
if rank == 0:
    assert os.wait()[1] == 0
"""


@pytest.mark.parametrize("max_threads", ["2", slow("")])
def test_a_rank_that_was_forked_when_torch_had_its_threads(
    max_threads: str, tmp_path: Path
) -> None:
    """As in a notebook: https://github.com/pytorch/pytorch/issues/17199."""
    env = {**os.environ, "RINGCOMM_MAX_THREADS": max_threads, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", FORKED, str(tmp_path / "store")]
    subprocess.run(command, env=env, timeout=100, check=True)


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2"])
def test_a_wrong_number_of_threads_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"max_threads .* from 1 on, got"):
        ringcomm.Options(max_threads=value)  # type: ignore[arg-type]


def test_the_environment_sets_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGCOMM_MAX_THREADS", "4")
    assert ringcomm.Options().with_environment().max_threads == 4
    monkeypatch.setenv("RINGCOMM_MAX_THREADS", "four")
    with pytest.raises(ValueError, match="RINGCOMM_MAX_THREADS"):
        ringcomm.Options().with_environment()
