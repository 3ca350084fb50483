"""Ranks that die or become another program while a group is made.

All share a machine and so watch each other's processes. At every step, without torch and Gloo:
tests/cpp/test_deaths.cc; in calls: test_failures.py.
"""

from __future__ import annotations

import os
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from failures import ENVS, SOON_S, end_process, kill_named, timed
from ranks import in_ranks, init_group, run_ranks
from stores import EndsBehind, WatchedStore, make_group


def make_group_and_die(rank: int, path: str, victim: int, end_behind: int, how: str) -> Any:
    """What the first group and its first barrier come to, and this rank's operations."""
    watcher = EndsBehind(path, end_behind if rank == victim else 0, how)

    def make_and_use() -> None:
        make_group(WatchedStore(dist.FileStore(path, 3), watcher), rank, 3)
        dist.barrier()

    error, num_operations = timed(make_and_use), watcher.num_operations
    if how == "exec":
        kill_named(error, path + " seen", rank, victim)
    return error, num_operations


def assert_death(error: dict[str, Any], victim: int, *place: Any) -> None:
    """Seen soon, from a rank's own start on: also the waits for the others' imports."""
    assert (error.get("type"), error.get("rank")) == ("PeerDiedError", victim), (error, place)
    assert error["seconds"] < 1 + SOON_S, (error, place)


@pytest.mark.parametrize(
    ("env", "victim", "how"),
    [("shm", 0, "kill"), ("shm", 2, "kill"), ("messages", 1, "exec"), ("hosts", 2, "kill")],
)
def test_end_behind_operations_of_the_store(
    tmp_path: Path, env: str, victim: int, how: str
) -> None:
    """Behind some operations, or every one where RINGCOMM_DEATHS asks for all."""
    kind: dict[str, Any] = {"backend": None, "fresh": True, "env": ENVS[env]}
    results = run_ranks(3, make_group_and_die, str(tmp_path / "0"), victim, 0, how, **kind)
    num_operations = results[victim][1]
    assert num_operations >= 5
    stride = 1 if os.environ.get("RINGCOMM_DEATHS") == "all" else 9 if num_operations > 20 else 3
    for end_behind in range(1, num_operations + 1, stride):
        args = (str(tmp_path / str(end_behind)), victim, end_behind, how)
        results = run_ranks(3, make_group_and_die, *args, may_die=[victim], **kind)
        if results[victim] is not None:  # this time it came with fewer operations, and lives
            assert end_behind > num_operations // 2
            continue
        for rank in {0, 1, 2} - {victim}:
            assert_death(results[rank][0], victim, end_behind, rank)


# Rank 1 is the first of the group, where torch can have it so: from 2.13 on.
UNSORTED: dict[str, Any] = (
    {"sort_ranks": False} if "sort_ranks" in signature(dist.new_group).parameters else {}
)


@in_ranks(3, backend=None, fresh=True, may_die=[1])
@pytest.mark.parametrize(
    ("env", "how", "when"),
    [("---", "kill", "before"), ("---", "kill", "after"), ("aba", "exec", "before")],
)
def test_end_while_gloo_connects(rank: int, env: str, how: str, when: str, tmp_path: Path) -> None:
    """Rank 1 ends before Gloo connects, or when only its own end is made."""
    make = dist.ProcessGroupGloo

    def make_own(*args: Any, **kwargs: Any) -> Any:
        if when == "after":
            make(*args, **kwargs)
        end_process(how)

    if rank == 1:
        dist.ProcessGroupGloo = make_own  # type: ignore[assignment,misc]
    error = timed(lambda: init_group(rank, 3, tmp_path / "store", 60))
    kill_named(error, str(tmp_path / "seen"), rank, 1)
    assert_death(error, 1)


@in_ranks(3, ENVS, fresh=True, may_die=[1])
def test_death_before_a_new_group(rank: int) -> None:
    """Known from the group of all ranks: nothing of rank 1 is in the store."""
    dist.barrier()
    if rank == 1:
        end_process("kill")
    assert_death(timed(lambda: dist.new_group([1, 0, 2], **UNSORTED)), 0 if UNSORTED else 1)
