"""run_ranks() itself: what its report says when ranks fail, die or hang, and that it ends them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from ranks import RankFailure, run_ranks


def pid_of(rank: int) -> int:
    return os.getpid()


def wait_on_0(rank: int, path: str) -> None:
    Path(f"{path}/{rank}").write_text(str(os.getpid()))
    if rank == 0:
        time.sleep(100)


def die_on_1(rank: int) -> int:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def test_stuck_rank_is_named_and_ended(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=r"(?s)rank\(s\) \[0\] did not finish.*in wait_on_0"):
        run_ranks(2, wait_on_0, str(tmp_path), timeout_s=1.0)
    for rank in range(2):
        assert not Path("/proc", (tmp_path / str(rank)).read_text()).exists()


def test_dead_rank_is_named_and_its_pool_is_gone() -> None:
    first = run_ranks(2, pid_of)
    assert run_ranks(2, pid_of) == first
    with pytest.raises(RankFailure, match="rank 1: the process ended: SIGKILL"):
        run_ranks(2, die_on_1)
    assert not set(run_ranks(2, pid_of)) & set(first)
    assert run_ranks(2, die_on_1, fresh=True, may_die=[1])[1] is None
