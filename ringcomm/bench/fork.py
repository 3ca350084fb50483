"""Processes that are forked and die with their parent.

Forked, since a fork costs 0.4 s and a fresh interpreter with torch 3 to 14 s. That is safe where
the parent computes nothing with more than one thread before: numpy's BLAS ends its own at a fork.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable

from ringcomm.bench.exit_codes import EXIT_FAILED

PR_SET_PDEATHSIG = 1


def _die_with_parent(parent_pid: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the call above
        os._exit(EXIT_FAILED)


def fork(main: Callable[[], int]) -> int:
    """Forks a process that exits with what ``main`` returns and dies with this one; its pid."""
    parent_pid = os.getpid()
    pid = os.fork()
    if pid != 0:
        return pid
    code = EXIT_FAILED
    try:
        _die_with_parent(parent_pid)
        code = main()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # no clean-up that belongs to the parent, no wait for foreign threads
