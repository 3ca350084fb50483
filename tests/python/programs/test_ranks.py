"""run_ranks() itself: what its report says when ranks fail, die or hang, and that it ends them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import RankFailure, run_ranks


def raise_on_1(rank: int) -> int:
    if rank == 1:
        raise ZeroDivisionError("of rank one")
    return os.getpid()


def wait_on_0(rank: int, path: str) -> None:
    Path(f"{path}/{rank}").write_text(str(os.getpid()))
    if rank == 0:
        time.sleep(100)


def die_on_1(rank: int) -> int:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def wait_for_1(rank: int) -> None:
    if rank == 1:
        raise ZeroDivisionError("while the others wait")
    dist.barrier()


def pids(rank: int) -> Any:
    return os.getpid()


def test_results_and_pools() -> None:
    first = run_ranks(2, pids)
    assert len(set(first)) == 2
    assert run_ranks(2, pids) == first
    assert not set(run_ranks(2, pids, fresh=True)) & set(first)


def test_traceback_of_the_rank() -> None:
    before = run_ranks(2, pids)
    with pytest.raises(RankFailure, match=r"(?s)rank 1: Traceback.*in raise_on_1.*of rank one"):
        run_ranks(2, raise_on_1)
    assert not set(run_ranks(2, pids)) & set(before)  # others than those of the failure


def test_stuck_rank_is_named_and_ended(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=r"(?s)rank\(s\) \[0\] did not finish.*in wait_on_0"):
        run_ranks(2, wait_on_0, str(tmp_path), timeout_s=1.0)
    for rank in range(2):
        assert not Path("/proc", (tmp_path / str(rank)).read_text()).exists()


def test_dead_rank_is_named() -> None:
    with pytest.raises(RankFailure, match="rank 1: the process ended: SIGKILL"):
        run_ranks(2, die_on_1)
    assert run_ranks(2, die_on_1, fresh=True, may_die=[1]) == [0, None]


def test_first_error_ends_the_wait() -> None:
    begin = time.monotonic()
    with pytest.raises(RankFailure, match=r"(?s)while the others wait.*\[0\] did not finish"):
        run_ranks(2, wait_for_1)
    assert time.monotonic() - begin < 20
