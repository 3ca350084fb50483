"""ringcomm.on_death(): a function that is called when a rank has died."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks
from test_shrink import die, fail

import ringcomm

SOON_S = 20.0  # a call takes milliseconds, and the group's time-out is 30 s


def compute_until(is_over: Any) -> float:
    """Pure Python, which keeps its lock; the seconds that it took."""
    begin = time.monotonic()
    while not is_over():
        sum(range(1000))
        assert time.monotonic() < begin + 20
    return time.monotonic() - begin


def note_deaths(rank: int) -> dict[str, Any]:
    """Functions on the world, one of which raises, and on other groups; one is removed."""
    group = dist.new_group([0, 1, 2])
    other = dist.new_group([0, 2])
    gone = dist.new_group([0, 1, 2])
    calls: list[tuple[str, int]] = []
    threads = set()

    def note(name: str) -> Any:
        def called(victim: int) -> None:
            threads.add(threading.current_thread().name)
            calls.append((name, victim))

        return called

    def fail_once(victim: int) -> None:
        calls.append(("fails", victim))
        raise KeyError("of the test")

    if rank in (0, 2):
        removed = ringcomm.on_death(note("removed"))
        ringcomm.on_death(fail_once)
        ringcomm.on_death(note("world"))
        ringcomm.on_death(note("group"), group)
        ringcomm.on_death(note("other"), other)
        ringcomm.on_death(note("destroyed"), gone)
        removed.remove()
    dist.barrier()
    dist.destroy_process_group(gone)
    assert not calls
    if rank in (1, 3):
        time.sleep(0.2 * rank)
        die()
    seconds = compute_until(lambda: len(calls) >= 5)
    time.sleep(0.3)
    ringcomm.on_death(note("late"))
    compute_until(lambda: len(calls) >= 7)
    new = ringcomm.shrink()  # whose ranks live
    ringcomm.on_death(note("new"), new)
    dist.barrier()
    time.sleep(0.3)
    return {"calls": sorted(calls), "seconds": seconds, "threads": threads}


@pytest.mark.parametrize("env", ["shm", "hosts"])
def test_it_is_called_while_a_rank_computes(env: str) -> None:
    places = [{"RINGCOMM_HOST_ID": host} for host in "abab"] if env == "hosts" else None
    results = run_ranks(4, note_deaths, fresh=True, may_die=[1, 3], env=places)
    for result in (results[0], results[2]):
        world = [(name, rank) for name in ("fails", "late", "world") for rank in (1, 3)]
        assert result["calls"] == sorted([*world, ("group", 1)])
        assert result["seconds"] < 0.6 + SOON_S
        assert result["threads"] == {"ringcomm-death"}


def leave_while_it_watches(rank: int) -> list[int]:
    """A rank that destroys its group and lives is not dead."""
    calls: list[int] = []
    ringcomm.on_death(calls.append)
    dist.barrier()
    if rank == 1:
        dist.destroy_process_group()
        time.sleep(1)
        return calls
    fail()
    time.sleep(0.3)
    return calls


def test_a_rank_that_leaves_is_not_dead() -> None:
    assert run_ranks(2, leave_while_it_watches, fresh=True) == [[], []]


HOW = ("exit", "slow", "end")

# Forks the ranks of each job once torch is imported; what each prints goes to a file of its own.
PROGRAM = """
import os, signal, sys, time
import torch.distributed as dist
import ringcomm
folder = sys.argv[1]
pids = []
for how, rank in [(how, rank) for how in sys.argv[2:] for rank in (0, 1)]:
    pid = os.fork()
    if pid == 0:
        break
    pids.append(pid)
else:
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    print(*codes, flush=True)
    os._exit(0)
os.dup2(os.open(f"{folder}/{how}-{rank}", os.O_WRONLY | os.O_CREAT), 1)
store = dist.FileStore(f"{folder}/store-{how}", 2)
dist.init_process_group("ringcomm", store=store, rank=rank, world_size=2)
def called(victim):
    print("called", victim, flush=True)
    if how == "slow":
        time.sleep(30)
    if how == "end":
        os._exit(7)
ringcomm.on_death(called)
dist.barrier()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if how != "exit":
    time.sleep(1 if how == "slow" else 20)
"""


def test_it_does_not_keep_the_interpreter(tmp_path: Path) -> None:
    """The process exits at once, while the function runs, or is ended by it."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), *HOW]
    begin = time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as program:
        try:
            codes, _ = program.communicate(timeout=90)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
    killed = -signal.SIGKILL
    assert codes.split() == [str(code) for code in (0, killed, 0, killed, 7, killed)]
    for how in HOW[1:]:
        assert (tmp_path / f"{how}-0").read_text() == "called 1\n"
    assert time.monotonic() < begin + 80


def test_it_needs_a_group() -> None:
    with pytest.raises(ValueError, match="no default group"):
        ringcomm.on_death(print)
