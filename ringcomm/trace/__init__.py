"""Records this process: with RINGCOMM_TRACE=FOLDER every rank writes a recording.

A process records to three files: NAME.events, a ring that csrc/collectives/trace.cc maps,
NAME.program, a ring of the program's phases (program.py), and NAME.log, lines of JSON for rare
events. They can be read at any time, also after a SIGKILL.
recordings.py reads them, merge.py writes one trace of all and prints the steps of a ring in it.
"""

import contextlib
import fcntl
import functools
import json
import os
import socket
import time
from multiprocessing import util
from pathlib import Path
from typing import Any

from ringcomm import _C
from ringcomm.process import open_above
from ringcomm.trace import program
from ringcomm.trace.layout import EVENT_BYTES, TRACE_HEADER


def start() -> None:
    """Records this process from now on, if RINGCOMM_TRACE is set. A second call does nothing.

    Raises ValueError for a wrong RINGCOMM_TRACE_EVENTS, OSError for a folder that is not writable.
    """
    if os.environ.get("RINGCOMM_TRACE"):
        _start(os.getpid())


@functools.cache
def _start(pid: int) -> None:
    folder = Path(os.environ["RINGCOMM_TRACE"])
    text = os.environ.get("RINGCOMM_TRACE_EVENTS") or "65536"
    if not text.isdecimal() or not 64 <= int(text) <= 1 << 24:
        raise ValueError(
            "the environment variable RINGCOMM_TRACE_EVENTS must be a whole number from 64 to"
            f" {1 << 24}, got {text!r}"
        )
    num_events, host = int(text), socket.gethostname()
    name = folder / f"{host}-{pid}-{time.monotonic_ns()}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        folder.mkdir(parents=True, exist_ok=True)
        events = open_above(f"{name}.events", flags, 0o644)
        log = open_above(f"{name}.log", flags | os.O_APPEND, 0o644)
        phases = open_above(f"{name}.program", flags, 0o644)
        # A write to a mapped hole of a full disk would kill the process.
        os.posix_fallocate(events, 0, TRACE_HEADER.size + EVENT_BYTES * num_events)
        fcntl.lockf(log, fcntl.LOCK_EX)  # locked while the process is alive
        program.start(phases, num_events // 8)  # a step has few, and many events
    except OSError as error:
        reason = f"RINGCOMM_TRACE: cannot record to the folder {folder}: {error.strerror}"
        raise OSError(error.errno, reason) from None
    info = {"pid": pid, "host": host, "clock": clock_name(), "names": _C.recorder_names()}
    _write(log, info)
    _C.start_trace(events, log, num_events)
    util.Finalize(None, _end, (log,), exitpriority=-1)  # also in children of multiprocessing


def _write(log: int, line: dict[str, Any]) -> None:
    os.write(log, f"{json.dumps(line | {'anchor': _C.recorder_clock()})}\n".encode())


def _end(log: int) -> None:
    """Records that this process ends normally."""
    with contextlib.suppress(OSError):  # a full disk
        _write(log, {"end": True})


def clock_name() -> str:
    """An id that is equal for processes with the same CLOCK_MONOTONIC."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # a sandbox: take the machine's name
        boot = socket.gethostname()
    try:
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:  # kernels before 5.6 have one clock
        return boot
