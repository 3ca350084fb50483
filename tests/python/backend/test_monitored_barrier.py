"""The barrier that names the ranks that are missing. That no rank leaves it early: sequences."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks, run_ranks
from test_errors import caught

import ringcomm

SHORT = timedelta(milliseconds=300)


def check_missing(rank: int, missing: list[int], waits_for_all: bool, is_late: bool) -> Any:
    """The error of the ranks that come, after which the group does all it did before."""
    group: Any = dist.group.WORLD
    error: dict[str, Any] = {}
    if rank not in missing:
        error = caught(lambda: ringcomm.monitored_barrier(group, SHORT, waits_for_all))
    dist.barrier()
    if rank in missing and is_late:
        error = caught(lambda: group.monitored_barrier(SHORT, waits_for_all))
    tensor = torch.ones(5)
    dist.all_reduce(tensor)
    assert (tensor == dist.get_world_size()).all()
    if is_late:  # all have come to that one, and come to the next
        ringcomm.monitored_barrier(group, timedelta(seconds=20))
    received = torch.zeros(2)
    if rank == 0:
        dist.send(torch.ones(2), 1)
    elif rank == 1:
        dist.recv(received, 0)
        assert (received == 1).all()
    return error


@pytest.mark.parametrize(
    ("missing", "waits_for_all", "is_late", "words"),
    [
        ([1, 3], False, False, "Rank 1 failed to pass"),
        ([1, 3], True, True, "Ranks 1, 3 failed to pass monitoredBarrier in 300 ms"),
        ([1], False, True, "Rank 1 failed to pass monitoredBarrier in 300 ms"),
    ],
)
def test_missing_ranks(missing: list[int], waits_for_all: bool, is_late: bool, words: str) -> None:
    results = run_ranks(4, check_missing, missing, waits_for_all, is_late, fresh=True)
    for rank, error in enumerate(results):
        if rank in missing and not is_late:
            continue
        assert error["type"] == "CollectiveTimeoutError"
        assert words in error["text"]
        assert error["rank"] == missing[0]
        reached = f"Rank {rank} successfully reached monitoredBarrier, but received errors"
        assert (reached in error["text"]) == (rank != 0)


@in_ranks(2, fresh=True, group_timeout_s=0.5)
def test_rank_0_missing(rank: int) -> None:
    """The others wait as long as the group's time-out says: it is rank 0 who knows."""
    if rank == 1:
        error = caught(lambda: ringcomm.monitored_barrier(None, timedelta(milliseconds=100)))
        assert (error["type"], error["rank"]) == ("CollectiveTimeoutError", 0)
        assert "errors while waiting for send/recv from rank 0: it did not answer" in error["text"]


@in_ranks((1, 2))
def test_arguments(rank: int) -> None:
    group: Any = dist.group.WORLD
    with pytest.raises(TypeError, match="timedelta"):
        ringcomm.monitored_barrier(timeout=1.0)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=f"Rank {rank} timed out in monitoredBarrier"):
        group.monitored_barrier(timedelta(0))
    with pytest.raises(ValueError, match="GLOO"):
        dist.monitored_barrier()
    group.monitored_barrier()
    ringcomm.monitored_barrier(wait_all_ranks=True)


@in_ranks(2, fresh=True, may_die=[1])
def test_a_dead_rank_ends_the_group(rank: int) -> None:
    if rank == 1:
        os._exit(0)
    error = caught(lambda: ringcomm.monitored_barrier(None, timedelta(seconds=20)))
    assert (error["type"], error["rank"]) == ("PeerDiedError", 1)
