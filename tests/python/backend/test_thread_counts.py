"""What users reported of threads and cores of a process, as programs with collectives of 8 MB.

Calls of several threads at once: test_collectives.py.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import num_threads
from rank_programs import run_program
from ranks import in_ranks
from sequence_side import Call
from sequences import run_calls
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import ringcomm

NUM_ELEMS = 1_000_003
LIMIT_S = 60


def check_sum(group: dist.ProcessGroup | None = None) -> None:
    assert run_calls([Call("all_reduce", dtype="int64", size=NUM_ELEMS)], group=group) == []


@in_ranks(2)
def test_the_number_of_threads_changes_between_calls(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/19213: a new number of threads was ignored.

    https://github.com/tenstorrent/tt-metal/pull/37673: a library set one thread in some ranks.
    """
    for most in (None, 4):
        group = dist.new_group([0, 1], pg_options=ringcomm.Options(max_threads=most))
        for numbers in ((1, 3), (3, 1), (2, 2), (1, 4), (4, 1), (1, 1)):
            with num_threads(numbers[rank]):
                for _ in range(3):
                    check_sum(group)
                assert torch.get_num_threads() == numbers[rank]
        dist.destroy_process_group(group)


ENVIRONMENTS: dict[str, Any] = {
    "unset": {"OMP_NUM_THREADS": ""},
    "zero": {"OMP_NUM_THREADS": "0"},
    "wrong": {"OMP_NUM_THREADS": "all"},
    "more than cores": {"OMP_NUM_THREADS": "24", "OMP_WAIT_POLICY": "ACTIVE"},
}


@in_ranks(2, ENVIRONMENTS, fresh=True)
def test_any_number_in_the_environment(rank: int) -> None:
    """https://github.com/FlashML-org/FreeToken/issues/371: ranks with too many threads spun."""
    for _ in range(4):
        check_sum()
        (torch.ones(300, 300) @ torch.ones(300, 300)).sum().item()  # the threads begin, and spin


@in_ranks(3)
def test_ranks_with_fewer_cores_than_threads(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/125547: 30 times slower on bound cores.

    All ranks move to one core and back, between calls of one group and of groups made meanwhile.
    """
    allowed = os.sched_getaffinity(0)
    wide = dist.new_group(list(range(3)))
    try:
        with num_threads(3):
            for cores in ({min(allowed)}, allowed, {max(allowed)}, allowed):
                os.sched_setaffinity(0, cores)
                narrow = dist.new_group(list(range(3)))
                check_sum(wide)
                check_sum(narrow)
                dist.destroy_process_group(narrow)
    finally:
        os.sched_setaffinity(0, allowed)
        dist.destroy_process_group(wide)


COUNTED = """
import os, sys
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist, ringcomm
torch.set_num_threads((os.cpu_count() or 1) + 3)
def begun(store):
    before = {*os.listdir("/proc/self/task")}
    dist.init_process_group("ringcomm", store=dist.FileStore(store, 2), rank=int(sys.argv[1]),
                            world_size=2, timeout=timedelta(seconds=60))
    dist.barrier()
    tasks = {*os.listdir("/proc/self/task")} - before
    names = [Path(f"/proc/self/task/{task}/comm").read_text() for task in tasks]
    dist.destroy_process_group()
    return [name for name in names if not name.startswith("ringcomm-")]
assert begun(sys.argv[2]) == []
os.environ["OMP_PROC_BIND"] = "close"  # now only the threads know their cores
assert begun(sys.argv[2] + "-pinned") != []
"""


def test_making_a_group_begins_no_threads_of_openmp(tmp_path: Path) -> None:
    """https://github.com/pytorch/pytorch/issues/193859: libgomp got none and ended a process."""
    for ended in run_program(COUNTED, tmp_path / "store"):
        assert ended.returncode == 0, ended.err


PINNED = """
import os, sys
from datetime import timedelta
import torch, torch.distributed as dist, ringcomm
rank, store = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(4)
for most in (None, 4):
    dist.init_process_group("ringcomm", store=dist.FileStore(f"{store}{most}", 2), rank=rank,
                            world_size=2, timeout=timedelta(seconds=60),
                            pg_options=ringcomm.Options(max_threads=most))
    ramp = torch.arange(1_000_003)
    for salt in range(8):
        data = ramp * (rank + 1) + salt
        dist.all_reduce(data)
        assert torch.equal(data, 3 * ramp + 2 * salt)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "env",
    [
        {"OMP_DYNAMIC": "true", "OMP_THREAD_LIMIT": "2"},
        {"OMP_PROC_BIND": "close", "OMP_WAIT_POLICY": "active"},
    ],
    ids="-".join,
)
def test_fewer_threads_than_asked_for_and_pinned_ones(env: dict[str, str], tmp_path: Path) -> None:
    """https://github.com/DIPlib/diplib/issues/191: parts of the work had no thread.

    https://github.com/pytorch/pytorch/issues/49971: all processes are moved to the first core.
    """
    for ended in run_program(PINNED, tmp_path / "store", env=env):
        assert ended.returncode == 0, ended.err


class Squares(Dataset[Tensor]):
    """Computed by kernels that use a process's threads."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((400_000,), index, dtype=torch.int64).square()


@in_ranks(2, fresh=True)
def test_forked_workers_load_data_between_calls(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/17199: a child hung in threads of its parent.

    https://github.com/pytorch/pytorch/issues/75147: workers of a DataLoader hung.
    """
    group = dist.new_group([0, 1], pg_options=ringcomm.Options(max_threads=3))
    with num_threads(3):
        check_sum(group)  # the parent's threads have begun
        loader = DataLoader(
            Squares(), batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=LIMIT_S
        )
        found = []
        for batch in loader:
            check_sum(group)
            found += batch[:, -1].tolist()
        assert found == [0, 1, 4, 9, 16, 25]
    dist.destroy_process_group(group)
