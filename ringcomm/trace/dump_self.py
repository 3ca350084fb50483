"""Dumps of this process's flight recorder: on request, on an error, and on a signal."""

import contextlib
import faulthandler
import functools
import os
import select
import signal
import sys
import threading
import traceback
from itertools import dropwhile
from pathlib import Path
from typing import Any

from ringcomm import errors
from ringcomm.trace import dumps, flight

# Next to flight.STACK_SIGNAL. A program uses SIGUSR1 and SIGUSR2 itself.
DUMP_SIGNAL = signal.SIGRTMAX - 4
_THREAD = "ringcomm-dump"
_OWN_FILES = (__file__, errors.__file__)


def flight_dump(prefix: str | os.PathLike[str] | None = None) -> Path:
    """Writes a dump of the flight recorder of this process. Not collective.

    The file is PREFIX + the rank in the job + ".json", and replaces an earlier one. It has the last
    1,024 calls of this process and the Python stacks of its threads, and what it knows of the ranks
    of its groups on this host: the last 64 calls of each, and all 1,024 of a process that has
    ended. `ringcomm trace --merge` reads it.

    Args:
        prefix: what the path begins with; "dumps/" makes dumps/0.json. None: RINGCOMM_FLIGHT_DUMP.

    Returns:
        The path of the file.

    Raises:
        ValueError: there is no prefix, or this process has no group of several ranks.
        OSError: the file cannot be written, or the system does not let the process read its memory.
    """
    chosen = os.fspath(prefix) if prefix is not None else _prefix()
    if not chosen:
        raise ValueError("give a prefix, or set the environment variable RINGCOMM_FLIGHT_DUMP")
    return _dump(chosen, "request")


def _prefix() -> str:
    return os.environ.get("RINGCOMM_FLIGHT_DUMP") or ""


def _dump(prefix: str, reason: str) -> Path:
    own, peers = flight.mapped_records()
    if own is None or own.pid != os.getpid() or own.rank < 0:
        raise ValueError("this process has no group of ringcomm of several ranks to dump")
    return dumps.write(prefix, own, peers, reason, _stacks())


def _stacks() -> dict[str, list[str]]:
    """Of this process's threads, innermost first, without what makes the dump."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks: dict[str, list[str]] = {}
    for ident, frame in sys._current_frames().items():
        name = names.get(ident, f"thread {ident}")
        lines = [(at.f_code, line) for at, line in traceback.walk_stack(frame)]
        own = dropwhile(lambda at: at[0].co_filename in _OWN_FILES, lines)
        if name != _THREAD:
            stacks[name] = [f"{code.co_filename}:{line} {code.co_name}" for code, line in own]
    return stacks


def start() -> None:
    """Dumps this process on errors and on DUMP_SIGNAL, if RINGCOMM_FLIGHT_DUMP is set."""
    if _prefix():
        errors.on_error = _on_error
        _offer(os.getpid())


_said: set[str] = set()
_lock = threading.Lock()


def _on_error(message: str) -> None:
    """An error is being raised; later calls of its group raise the same text."""
    with _lock:
        if message in _said:
            return
        _said.add(message)
    _try_to_dump(f"error: {message}")


def _try_to_dump(reason: str) -> None:
    """Writes the path, or why there is none, to stderr: the program goes on as it would."""
    try:
        text = f"its flight recorder is in {_dump(_prefix(), reason)}"
    except ValueError:  # no group: a forked child
        return
    except Exception as error:
        text = f"RINGCOMM_FLIGHT_DUMP: cannot dump its flight recorder: {error}"
    with contextlib.suppress(OSError, ValueError):
        print(f"ringcomm process {os.getpid()}: {text}", file=sys.stderr, flush=True)


@functools.cache
def _offer(pid: int) -> None:
    """Makes DUMP_SIGNAL wake a thread that dumps, unless the program handles that signal.

    faulthandler's handler runs in C, also while Python's main thread is blocked in a call, and
    writes stacks to a pipe. Python's own handlers run when the main thread returns to Python. The
    thread needs the GIL: a process that blocks with it, or is stopped, is dumped from outside, by
    `ringcomm doctor --job PID --dump PREFIX`.
    """
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        if signal.getsignal(DUMP_SIGNAL) is not signal.SIG_DFL:
            return
        reads, writes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        threading.Thread(target=_serve, args=(reads,), name=_THREAD, daemon=True).start()
        file: Any = writes
        faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True)


def _serve(reads: int) -> None:
    while True:
        select.select([reads], [], [])
        # All that one signal has written.
        while select.select([reads], [], [], 0.05)[0]:
            os.read(reads, 1 << 16)
        _try_to_dump(f"signal {DUMP_SIGNAL}")
