"""The state of the machine during a measurement: other programs, and caches that cores share."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ringcomm.measure.machine import MAX_OTHERS_PERCENT, OthersWatch
from ringcomm.measure.ranks import Team
from ringcomm.measure.timing import quantile

Found = TypeVar("Found")
# The two cores of some virtual machines share a cache at one moment and not at the next; then
# hand-over latency changes by 5 to 10 times, and nothing else by twice within a run.
MAX_FLAG_CHANGE = 2.0
# Between what was measured on either side of that: 0.04-0.1 µs where two cores share an L3, 0.4-0.5
# where not.
SHARED_CACHE_MAX_US = 0.2

FLAG_SOURCE = Path(__file__).with_name("flag_latency.c")
FLAG_LINE_BYTES = 256  # two adjacent lines are fetched together: one flag per pair of lines
FLAG_OFFSETS_BYTES = (0, FLAG_LINE_BYTES)
# Short batches, so that most are whole even where another program takes a core now and then.
FLAG_ROUND_TRIPS = 20
FLAG_BATCHES = 200
MIN_FLAG_BATCHES = 20
FLAG_TIMEOUT_NS = 5 * 10**8
# Longest wait for the compiler.
COMPILER_TIMEOUT_S = 60.0


def two_cores() -> tuple[int, int]:
    """Two of this process's CPUs, on different cores where it has them."""
    cpus = sorted(os.sched_getaffinity(0))
    path = Path(f"/sys/devices/system/cpu/cpu{cpus[0]}/topology/core_cpus_list")
    try:
        siblings = {int(v) for v in path.read_text().replace("-", ",").strip().split(",")}
    except (OSError, ValueError):
        siblings = {cpus[0]}
    others = [cpu for cpu in cpus[1:] if cpu not in siblings] or cpus
    return cpus[0], others[0]


def _compile(folder: str) -> str | None:
    """Compiles the probe; its path, or None without a C compiler."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        return None
    library = str(Path(folder, "flag_latency.so"))
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", library, str(FLAG_SOURCE)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILER_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return library


class FlagProbe:
    """Ranks 0 and 1 pass a flag to and fro. Collective to make."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._base = 0
        with tempfile.TemporaryDirectory(prefix="ringcomm-flags-") as folder:
            library = _compile(folder) if team.rank == 0 and team.world_size > 1 else None
            if library is not None:
                Path(folder, "flags").write_bytes(bytes(mmap.PAGESIZE))
            library = team.agree(library)
            could = team.share(team.rank > 1 or self._map(library))  # then rank 0 may clean up
        self.is_there: bool = all(could)

    def _map(self, library: str | None) -> bool:
        """Loads the code and maps the flags; False where that cannot be, as on another host."""
        if library is None:
            return False
        try:
            self._round_trips = ctypes.CDLL(library).ringcomm_flag_round_trips
            with Path(library).with_name("flags").open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        except (OSError, ValueError):
            return False
        self._round_trips.restype = ctypes.c_int64
        self._round_trips.argtypes = [
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int),
            *(ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
        ]
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._flags = [first + offset for offset in FLAG_OFFSETS_BYTES]
        return True

    def latency_us(self, cpus: tuple[int, int] | None = None) -> float | None:
        """One-way hand-over between ranks 0 and 1, in µs. Collective; the others sleep.

        Both are bound to a CPU of their own meanwhile: the given ones, or ``two_cores()``. The
        fastest tenth of the batches counts: another program can only slow them down.

        Returns:
            The same on all ranks; None with one rank or CPU, without a C compiler, on different
            hosts, or when the two ranks hardly ran at the same time in half a second.
        """
        team = self._team
        team.share(None)
        times = self._measure(team.rank, cpus or two_cores()) if team.rank < 2 else []
        enough = len(times) >= MIN_FLAG_BATCHES
        us = quantile(sorted(times), 0.1) / FLAG_ROUND_TRIPS / 2 / 1000 if enough else None
        latency: float | None = team.share(us)[0]
        return latency

    def _measure(self, side: int, cpus: tuple[int, int]) -> list[int]:
        """Nanoseconds of each batch; the batch that waits for the other side to come is dropped."""
        first, self._base = self._base, self._base + FLAG_ROUND_TRIPS * (FLAG_BATCHES + 1)
        if not self.is_there or len(set(cpus)) < 2:
            return []
        own, other = self._flags[side], self._flags[1 - side]
        deadline = time.monotonic_ns() + FLAG_TIMEOUT_NS
        times = []
        free = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {cpus[side]})
        try:
            for base in range(first, self._base, FLAG_ROUND_TRIPS):
                ns = self._round_trips(own, other, side, base, FLAG_ROUND_TRIPS, deadline)
                if ns < 0:
                    break
                times.append(ns)
        finally:
            os.sched_setaffinity(0, free)
        return times[1:]


@dataclass(frozen=True)
class Weather:
    """What a measurement could do nothing about."""

    others_percent: float  # of all cores, what other programs used
    flag_us: tuple[float | None, float | None] = (None, None)  # of a hand-over, before and after
    num_attempts: int = 1  # of which the calmest counts

    @property
    def is_quiet(self) -> bool:
        """Whether other programs left the machine alone."""
        return self.others_percent <= MAX_OTHERS_PERCENT

    @property
    def is_steady(self) -> bool:
        """Whether the cores shared a cache at the end if and only if they did at the start."""
        known = [us for us in self.flag_us if us is not None]
        return len(known) < 2 or max(known) <= MAX_FLAG_CHANGE * min(known)

    @property
    def disturbance(self) -> tuple[bool, bool, float]:
        """Less is calmer."""
        return not self.is_quiet, not self.is_steady, self.others_percent

    def record(self) -> dict[str, Any]:
        """The fields of a record."""
        return {
            "flag_us": dict(zip(("before", "after"), self.flag_us, strict=True)),
            "others_busy_percent": self.others_percent,
            "quiet": self.is_quiet,
            "steady": self.is_steady,
            "num_attempts": self.num_attempts,
        }


def worst(parts: Sequence[Weather]) -> Weather:
    """That of a figure which several measurements, in order, have made."""
    return Weather(
        max(part.others_percent for part in parts),
        (parts[0].flag_us[0], parts[-1].flag_us[1]),
        max(part.num_attempts for part in parts),
    )


class WeatherWatch:
    """Looks at the machine before and after a measurement. Collective to make and to use."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._probe = FlagProbe(team)
        self._own_pids = [os.getppid(), *team.share(os.getpid())]

    def _attempt(self, measure: Callable[[], Found]) -> tuple[Found, Weather]:
        others = OthersWatch(self._own_pids) if self._team.rank == 0 else None
        before_us = self._probe.latency_us()
        found = measure()
        after_us = self._probe.latency_us()
        percent = self._team.agree(None if others is None else others.percent())
        return found, Weather(percent, (before_us, after_us))

    def calmest(self, measure: Callable[[], Found], max_repeats: int) -> tuple[Found, Weather]:
        """``measure()`` again while the machine is disturbed; what it returned the calmest time.

        The weather, and so the choice, is the same on all ranks.
        """
        best, num_attempts = self._attempt(measure), 1
        while not (best[1].is_quiet and best[1].is_steady) and num_attempts <= max_repeats:
            best = min(best, self._attempt(measure), key=lambda attempt: attempt[1].disturbance)
            num_attempts += 1
        return best[0], replace(best[1], num_attempts=num_attempts)
