"""Ranks that do not come: to the making of a group, or to a barrier that names them."""

from __future__ import annotations

import json
import os
import re
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from failures import TRANSPORTS, caught
from ranks import in_ranks, init_group, run_ranks

import ringcomm
from ringcomm import message_backend
from ringcomm.torch_names import TORCH_VERSION

# ---- to the making of a group


def assert_missing(error: dict[str, Any], rank: int, words: str) -> None:
    assert (error["type"], error["rank"]) == ("CollectiveTimeoutError", rank), error
    assert words in error["text"], error


@in_ranks(2, backend=None, fresh=True)
def test_ranks_that_were_not_started_are_named(rank: int, tmp_path: Path) -> None:
    """Rank 1 comes later, and so is still waiting when rank 0 has given up and ended."""
    pid = os.fork()
    if pid == 0:
        time.sleep(0.6 * rank)
        error = caught(init_group, rank, 4, tmp_path / "store", 1.5)
        (tmp_path / f"error-{rank}").write_text(json.dumps(error))
        os._exit(1)
    os.waitpid(pid, 0)
    error = json.loads((tmp_path / f"error-{rank}").read_text())
    assert_missing(error, 2, "ranks 2 and 3 did not join the group")


@in_ranks(1, backend=None, fresh=True)
def test_many_missing_ranks_are_counted(rank: int, tmp_path: Path) -> None:
    words = "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 3 more did not join the group"
    assert_missing(caught(init_group, 0, 12, tmp_path / "store", 0.5), 1, words)


@in_ranks(4, fresh=True)
def test_new_group_names_missing_ranks_with_their_global_ranks(rank: int) -> None:
    """Rank 3 of the group's ranks 1 and 3 does not call it."""
    if rank == 3:
        return
    error = caught(dist.new_group, [1, 3], timedelta(seconds=1))
    if rank == 1:
        said = "ringcomm rank 0/2 (global rank 1): rank 1 of the group (global rank 3)"
        assert_missing(error, 1, said)
        assert "did not join the group" in error["text"]


def make_nothing(*args: Any) -> None:
    time.sleep(3)
    raise RuntimeError("too late")


@pytest.mark.slow
@in_ranks(4, backend=None, fresh=True, env=TRANSPORTS["messages"])
def test_only_ranks_that_do_not_connect_are_named(rank: int, tmp_path: Path) -> None:
    """Ranks 1 and 2 are in the group, and never make their Gloo, so no other rank can."""
    if rank in (1, 2):
        message_backend.make = make_nothing  # type: ignore[assignment]
    error = caught(init_group, rank, 4, tmp_path / "store", 1.0)
    if rank in (0, 3):
        assert_missing(error, 1, "ranks 1 and 2 did not connect to the others in 1000 ms")


def wait_for_a_missing_rank(rank: int, folder: Path) -> None:
    log = os.open(folder / f"log-{rank}", os.O_RDWR | os.O_CREAT)
    os.dup2(log, 2)
    if rank < 2:
        error = caught(lambda: init_group(rank, 3, folder / "store", 12))
        assert error["type"] == "CollectiveTimeoutError", error


@pytest.mark.slow
def test_one_rank_says_who_is_missing(tmp_path: Path) -> None:
    run_ranks(3, wait_for_a_missing_rank, tmp_path, backend=None, fresh=True)
    logs = [(tmp_path / f"log-{rank}").read_text() for rank in range(3)]
    line = re.compile(r"rank 2 did not join the group in 1\d s; the group is still being made")
    assert [len(line.findall(log)) for log in logs] == [1, 0, 0], logs


# ---- to the barrier that names missing ranks (that no rank leaves it early: sequences)

SHORT = timedelta(milliseconds=300)


@in_ranks(fresh=True)
@pytest.mark.parametrize(
    ("env", "missing", "waits_for_all", "is_late"),
    [
        ("aaaa", [1, 3], False, False),
        ("aaaa", [1], False, True),
        *((env, [1, 3], True, True) for env in ("aaaa", "----", "abab")),
    ],
)
def test_missing_ranks(
    rank: int, env: str, missing: list[int], waits_for_all: bool, is_late: bool
) -> None:
    """The error of the ranks that come, after which the group does all it did before.

    One timeout for all ranks: https://github.com/pytorch/pytorch/pull/55010
    """
    group: Any = dist.group.WORLD
    error: dict[str, Any] = {}
    begin = time.monotonic()
    if rank not in missing:
        error = caught(lambda: ringcomm.monitored_barrier(group, SHORT, waits_for_all))
    assert time.monotonic() - begin < 10  # the group's timeout is 30 s
    dist.barrier()
    if rank in missing and is_late:
        error = caught(lambda: group.monitored_barrier(SHORT, waits_for_all))
    if rank not in missing or is_late:
        names = "ranks 1 and 3" if waits_for_all and rank == 0 else "rank 1"
        words = f"monitored_barrier: {names} did not come within 300 ms"
        assert (error["type"], error["rank"]) == ("CollectiveTimeoutError", 1), error
        assert words in error["text"], error
    tensor = torch.ones(5)
    dist.all_reduce(tensor)
    assert (tensor == 4).all()
    if is_late:  # all have come to that one, and come to the next
        ringcomm.monitored_barrier(group, timedelta(seconds=20))
    received = torch.zeros(2)
    if rank == 0:
        dist.send(torch.ones(2), 1)
    elif rank == 1:
        dist.recv(received, 0)
        assert (received == 1).all()


@in_ranks(2, fresh=True, group_timeout_s=0.5)
def test_rank_0_missing(rank: int) -> None:
    """The others wait as long as the group's time-out says: it is rank 0 who knows."""
    if rank == 1:
        error = caught(lambda: ringcomm.monitored_barrier(None, timedelta(milliseconds=100)))
        assert (error["type"], error["rank"]) == ("CollectiveTimeoutError", 0)
        assert "monitored_barrier: rank 0 did not come within 500 ms" in error["text"]


@in_ranks((1, 2))
def test_arguments(rank: int) -> None:
    group: Any = dist.group.WORLD
    with pytest.raises(TypeError, match="timedelta"):
        ringcomm.monitored_barrier(timeout=1.0)  # type: ignore[arg-type]
    if TORCH_VERSION < (2, 14):
        with pytest.raises(ValueError, match="GLOO"):
            dist.monitored_barrier()
    else:
        dist.monitored_barrier()
    group.monitored_barrier()
    ringcomm.monitored_barrier(wait_all_ranks=True)
