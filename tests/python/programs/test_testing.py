"""ringcomm.testing: what users' tests get of ranks that return, raise, die or hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import quick

from ringcomm.testing import RanksFailedError, run_ranks

# Each starts processes that import torch, for which a busy machine takes long.
LIMIT_S = 300.0
slow = pytest.mark.slow


def total(rank: int, factor: float) -> float:
    x = torch.tensor([factor * (rank + 1)])
    dist.all_reduce(x)
    return float(x)


def raise_on_rank_1(rank: int) -> None:
    if rank == 1:
        raise KeyError("the cause")
    dist.barrier()


def die_on_rank_1(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleep(rank: int) -> None:
    time.sleep(30)


def hang_on_rank_1(rank: int) -> None:
    if rank == 1:
        time.sleep(600)
    dist.barrier()


@pytest.mark.parametrize("backend", quick(["ringcomm", "gloo"], "ringcomm"))
def test_results_by_rank(backend: str) -> None:
    assert run_ranks(2, total, 2.0, backend=backend, timeout_s=LIMIT_S) == [6.0] * 2


def test_an_exception_has_its_traceback_and_comes_first() -> None:
    with pytest.raises(RanksFailedError, match="a rank failed") as error:
        run_ranks(2, raise_on_rank_1, timeout_s=LIMIT_S)
    assert next(iter(error.value.errors)) == 1
    assert "KeyError: 'the cause'" in error.value.errors[1]
    assert "died: KeyError: 'the cause'" in error.value.errors[0]
    assert "raise_on_rank_1" in str(error.value)


@slow
def test_a_death_is_the_cause() -> None:
    with pytest.raises(RanksFailedError) as error:
        run_ranks(2, die_on_rank_1, timeout_s=LIMIT_S)
    assert error.value.errors[1].startswith("its process ended with signal SIGKILL and no result")
    assert next(iter(error.value.errors)) == 1


@slow
def test_a_hang_has_the_error_of_its_peer_and_the_doctors_verdict() -> None:
    with pytest.raises(RanksFailedError, match="a rank failed") as error:
        run_ranks(2, hang_on_rank_1, timeout_s=60.0)
    assert list(error.value.errors) == [0]
    assert "CollectiveTimeoutError" in error.value.errors[0]
    assert "rank 1" in str(error.value).splitlines()[0]


def leave_on_rank_1(rank: int) -> None:
    if rank == 1:
        os._exit(0)


@slow
def test_a_rank_that_leaves_has_no_result() -> None:
    with pytest.raises(RanksFailedError, match="a rank failed") as error:
        run_ranks(2, leave_on_rank_1, timeout_s=LIMIT_S)
    assert error.value.errors[1].startswith("its process ended with exit status 0 and no result")


def test_ranks_that_are_late_are_ended() -> None:
    with pytest.raises(RanksFailedError, match=r"the ranks did not end in 1\.5 s"):
        run_ranks(1, sleep, timeout_s=1.5)


@slow
def test_the_fixture(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["ringcomm.testing.plugin"]\n')
    (tmp_path / "test_ranks.py").write_text(
        "import pytest\n"
        "def same(rank, value): return rank, value\n"
        "def wrong(rank): assert rank == 0\n"
        "def test_two(ranks): assert ranks(same, 'x') == [(0, 'x'), (1, 'x')]\n"
        "@pytest.mark.ranks(1, 3)\n"
        "def test_others(ranks): assert len(ranks(same, 1)) == ranks.world_size\n"
        "def test_fails(ranks): ranks(wrong)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(
        command, timeout=300, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "1 failed, 3 passed" in done.stdout, done.stdout
    assert "test_fails[2 ranks]" in done.stdout
    assert "rank 1: Traceback" in done.stdout
