"""Process groups of ringcomm: subgroups, meshes, many at once, again and again."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks
from test_errors import TRANSPORTS


def sum_of(group: Any, value: float) -> float:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def resources() -> tuple[int, int, int]:
    """Descriptors, threads, and mappings of shared memory."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return (
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        sum("memfd:" in line for line in maps),
    )


def assert_back_to(expected: tuple[int, int, int]) -> None:
    """A joined thread may still be listed for a moment."""
    deadline = time.monotonic() + 10
    while resources() != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    assert resources() == expected


# ---- one backend for each device


@in_ranks(2, backend=None, fresh=True)
@pytest.mark.parametrize("backend", ["cpu:ringcomm,cuda:ringcomm", "cpu:ringcomm,cuda:gloo"])
def test_form_with_devices(rank: int, backend: str, tmp_path: Path) -> None:
    """One object serves several devices; beside another backend it serves its own."""
    store = dist.FileStore(str(tmp_path / "store"), 2)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2)
    group: Any = dist.group.WORLD
    assert group._get_backend(torch.device("cpu")).name() == "ringcomm"
    assert sum_of(None, rank) == 1
    assert sum_of(dist.new_group([0, 1]), 2) == 4


# ---- subgroups; in use all at once: test_random_sequences.py


@in_ranks(4, TRANSPORTS)
def test_ways_to_make_groups(rank: int) -> None:
    pair, _ = dist.new_subgroups(2)
    assert sum_of(pair, rank) == (1 if rank < 2 else 5)
    crossed, _ = dist.new_subgroups_by_enumeration([[3, 0], [1, 2]])
    assert sum_of(crossed, 10**rank) == (1001 if rank in (0, 3) else 110)
    if rank in (1, 3):  # the other ranks do not even call
        local = dist.new_group([1, 3], use_local_synchronization=True)
        assert sum_of(local, rank) == 4
        dist.destroy_process_group(local)
    assert sum_of(None, rank) == 6


# ---- groups come and go


@in_ranks(2, backend=None, fresh=True)
def test_thirty_times_in_one_process(rank: int, tmp_path: Path) -> None:
    """After some turns, in which allocators and tables find their size, nothing grows."""
    seen, resident = [], []
    for turn in range(30):
        store = dist.FileStore(str(tmp_path / f"store{turn}"), 2)
        dist.init_process_group("ringcomm", store=store, rank=rank, world_size=2)
        tensor = torch.ones(10)
        dist.all_reduce(tensor, async_op=True).wait()
        receive = dist.P2POp(dist.irecv, torch.empty(10), 1 - rank)
        # One work of each call, or one of all of them, as torch likes.
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, 1 - rank), receive]):
            work.wait()
        for group in [dist.new_group() for _ in range(64 if turn == 1 else 1)]:  # all at once
            assert sum_of(group, 1) == 2
        dist.destroy_process_group()
        del store, group
        seen.append(resources())
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        resident.append(pages * os.sysconf("SC_PAGE_SIZE"))
    assert_back_to(seen[3])
    assert seen[3][2] == 0
    assert resident[-1] - resident[10] < 2 << 20, resident
