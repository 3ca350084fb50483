"""The machine that measures: its identity, its memory, and what other programs do on it."""

from __future__ import annotations

import datetime
import os
import platform
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

MAPPED = "/memfd:ringcomm"
# Above this share of all cores a measured ratio says more about other programs than about us.
MAX_OTHERS_PERCENT = 10.0


def utc_now() -> datetime.datetime:
    """The time in UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)


def identity() -> dict[str, Any]:
    """What must be equal for figures to be comparable: CPU, usable cores, kernel."""
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
    }


def variables(*prefixes: str) -> dict[str, str]:
    """The environment variables with one of these prefixes, sorted by name."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}


def rounded(value: Any) -> Any:
    """Floats to five digits: more than a measurement holds, and lines stay legible."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(entry) for entry in value]
    return value


def mapped_memory() -> dict[str, int]:
    """Bytes of ringcomm's shared memory in this process: mapped, resident, and its share of those.

    A page that n processes map counts 1/n in the share.
    """
    ours = [m for m in psutil.Process().memory_maps(grouped=False) if MAPPED in m.path]
    return {
        "mapped_bytes": sum(m.size for m in ours),
        "resident_bytes": sum(m.rss for m in ours),
        "share_bytes": sum(m.pss for m in ours),
    }


def _process_seconds(pid: int) -> float:
    """CPU seconds of a process and of its children that it has waited for.

    0 if it is gone: what it has used then counts for the others, and no claim is made in error.
    """
    try:
        return sum(psutil.Process(pid).cpu_times()[:4])
    except psutil.Error:
        return 0.0


class OthersWatch:
    """How busy other programs kept the machine, from when this is made.

    The clocks tick every 10 ms: a period should last a second.
    """

    def __init__(self, own_pids: Sequence[int]) -> None:
        """``own_pids``: the ranks and their parent, all alive until ``percent`` is called.

        Children that these start have to be waited for until then.
        """
        self._pids = own_pids
        self._start = self._read()

    def _read(self) -> tuple[float, float]:
        # Interrupts are left out: loopback traffic of our own is charged to no process.
        times = psutil.cpu_times()
        busy_s = times.user + times.nice + times.system + times.steal
        return time.monotonic(), busy_s - sum(map(_process_seconds, self._pids))

    def percent(self) -> float:
        """Percent of all cores that others used since the start, in [0, 100]."""
        now, busy_s = self._read()
        elapsed_s = max(now - self._start[0], 1e-9) * (os.cpu_count() or 1)
        return 100 * min(1.0, max(0.0, (busy_s - self._start[1]) / elapsed_s))
