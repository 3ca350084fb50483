"""Starts the ranks of a test and, at its end, ends every process that they have started.

    python guard.py TEST REPORTS NUM COMMAND...

A program of its own, without torch: orphans of ranks, also those with another session, become its
children, and not those of the process TEST, which has others. It runs COMMAND RANK for each rank
and writes "RANK STATUS" to the descriptor REPORTS for each that ends. It ends after the last one,
or on SIGTERM, which it gets at the death of the test.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# What has no parent any more may clean up after that, as resource trackers do, and then end.
_GRACE_S = 1.0
_LIMIT_S = 10.0  # for processes that cannot be ended

_ranks: dict[int, int] = {}  # by process id


def _handle_ends(handler: Any) -> None:
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, handler)


def _stop(*_: object) -> NoReturn:
    _handle_ends(signal.SIG_IGN)  # the next one would interrupt _end_children()
    raise SystemExit


def _run(reports: int, world_size: int, command: Sequence[str]) -> None:
    for rank in range(world_size):
        process = subprocess.Popen([*command, str(rank)], stdin=subprocess.DEVNULL)
        _ranks[process.pid] = rank
    while _ranks:
        pid, status = os.waitpid(-1, 0)
        if pid in _ranks:
            line = f"{_ranks.pop(pid)} {os.waitstatus_to_exitcode(status)}\n"
            os.write(reports, line.encode())


def _end_children() -> None:
    """Kills the ranks, and later all that are or become children of this process."""
    for pid in _ranks:
        os.kill(pid, signal.SIGKILL)
    path, began = Path(f"/proc/self/task/{os.getpid()}/children"), time.monotonic()
    with contextlib.suppress(ChildProcessError):
        while (waited_s := time.monotonic() - began) < _LIMIT_S:
            for pid in map(int, path.read_text().split()) if waited_s > _GRACE_S else ():
                with contextlib.suppress(PermissionError):  # of another user
                    os.kill(pid, signal.SIGKILL)
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)


def main() -> None:
    """Runs as a program; returns once no child is left."""
    test, reports, world_size, *command = sys.argv[1:]
    signal.signal(signal.SIGINT, lambda *_: None)  # the test handles Ctrl-C
    _handle_ends(_stop)
    try:
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() == int(test):
            _run(int(reports), int(world_size), command)
        _handle_ends(signal.SIG_IGN)
    finally:
        _end_children()


if __name__ == "__main__":
    main()
