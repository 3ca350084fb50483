"""Starts the ranks of this machine, watches them, and leaves none behind.

Ranks are forked. That is safe because the parent has no threads: all that it computes with torch
are the first weights, with one thread (see ``cli.main``).
Every rank dies with the parent (PR_SET_PDEATHSIG), whatever kills that.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from types import FrameType

from ringcomm.measure.ranks import fork

HANDLED = (signal.SIGINT, signal.SIGTERM)
POLL_S = 0.02
# From Ctrl-C to the SIGKILL of ranks that have not ended themselves: time for the step that is
# running and a checkpoint, with room to spare in the promised 2 s.
INTERRUPT_GRACE_S = 1.0
# From the death of one rank to the SIGKILL of the others, which may wait for it in a collective.
FAILURE_GRACE_S = 1.0

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_CHECK_FAILED = 3
EXIT_INTERRUPTED = 130

_stop_requested = False


class Interrupted(Exception):
    """The ranks agreed to end early, because they were asked to."""


def stop_requested() -> bool:
    """Whether this rank was asked (SIGTERM) to end after the current step."""
    return _stop_requested


def _request_stop(_signum: int, _frame: FrameType | None) -> None:
    global _stop_requested  # noqa: PLW0603  a signal handler has no other place
    _stop_requested = True


def prepare_rank_signals(launched: bool) -> None:
    """Makes signals ask this rank to end after its step.

    Ctrl-C reaches every process of the terminal. Our own ranks leave it to their parent, who then
    sends SIGTERM; ranks of another launcher obey it, since torchrun passes on what it got.
    """
    signal.signal(signal.SIGINT, _request_stop if launched else signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _request_stop)


def _be_rank(rank: int, main: Callable[[int], int]) -> int:
    prepare_rank_signals(launched=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
    try:
        return main(rank)
    except BaseException:
        print(f"rank {rank} (pid {os.getpid()}) failed:", file=sys.stderr)
        raise


def _describe_end(rank: int, pid: int, status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"rank {rank} (pid {pid}) was killed by {signal.Signals(number).name}"
    return f"rank {rank} (pid {pid}) ended with exit code {os.waitstatus_to_exitcode(status)}"


class _Watch:
    """The parent's view of its ranks, until all have ended."""

    def __init__(self, pids: dict[int, int]) -> None:
        self.alive = pids  # pid -> rank
        self.exit_code = EXIT_OK
        self.interrupted = False
        self.kill_at = float("inf")

    def interrupt(self, signum: int, _frame: FrameType | None) -> None:
        """Handler of the parent: the first signal asks the ranks to end, the second ends them."""
        grace_s = 0.0 if self.interrupted else INTERRUPT_GRACE_S
        self.interrupted = True
        self._end_all(grace_s)

    def _end_all(self, grace_s: float) -> None:
        self.kill_at = min(self.kill_at, time.monotonic() + grace_s)
        for pid in self.alive:
            os.kill(pid, signal.SIGTERM)

    def poll(self) -> None:
        """Reaps what has ended, and stops the rest once something went wrong."""
        ended = []
        for pid, rank in list(self.alive.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self.alive[pid]
                ended.append((rank, pid, status))
        if time.monotonic() >= self.kill_at:
            for pid in self.alive:
                os.kill(pid, signal.SIGKILL)
        # A rank that was killed comes first: the others' errors are its consequence.
        ended.sort(key=lambda end: not os.WIFSIGNALED(end[2]))
        for rank, pid, status in ended:
            self._judge(rank, pid, status)

    def _judge(self, rank: int, pid: int, status: int) -> None:
        code = EXIT_FAILED if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)
        if code == EXIT_OK or self.interrupted or self.exit_code != EXIT_OK:
            return
        self.exit_code = code
        if code not in (EXIT_CHECK_FAILED, EXIT_BAD_INPUT):  # those have said why themselves
            left = len(self.alive)
            rest = f"; stopping the other {left} rank(s)" if left else ""
            print(f"train: {_describe_end(rank, pid, status)}{rest}", file=sys.stderr, flush=True)
        if code != EXIT_CHECK_FAILED:
            self._end_all(FAILURE_GRACE_S)


def run_ranks(world_size: int, main: Callable[[int], int]) -> int:
    """Forks ``world_size`` ranks, each of which exits with what ``main(rank)`` returns.

    Blocks until all have ended. A rank that dies is named on stderr and makes the others stop
    within a second; Ctrl-C or SIGTERM makes all stop within 2 s.

    Returns:
        0, the exit code of the first rank that failed (1 if it was killed), or 130 if interrupted.
    """
    pids: dict[int, int] = {}
    watch = _Watch(pids)
    sys.stdout.flush()
    sys.stderr.flush()
    # Blocked until the watch stands, so that no rank can be missed by an early Ctrl-C.
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    for rank in range(world_size):
        pids[fork(partial(_be_rank, rank, main))] = rank
    before = [(number, signal.signal(number, watch.interrupt)) for number in HANDLED]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
    try:
        while watch.alive:
            watch.poll()
            time.sleep(POLL_S)
    finally:
        for pid in watch.alive:
            os.kill(pid, signal.SIGKILL)
        for number, handler in before:
            signal.signal(number, handler)
    return EXIT_INTERRUPTED if watch.interrupted else watch.exit_code
