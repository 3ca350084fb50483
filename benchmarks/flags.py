"""Measures the latency of a flag between two cores, which shows whether they share a cache."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from ringcomm.measure.ranks import Team
from ringcomm.measure.timing import percentiles

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


def _compile(folder: str) -> str | None:
    """Compiles the probe; returns its path, or None without a C compiler."""
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
        """Loads the code and maps the flags; returns False if impossible, as on another host."""
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

    def latency_us(self, cpus: tuple[int, int]) -> float | None:
        """One-way latency between ranks 0 and 1, in µs. Collective; the others sleep.

        Each is bound to its own CPU during the measurement. The fastest tenth of the batches is
        used, because other programs can only slow them down.

        Returns:
            The same on all ranks; None with one rank or one CPU twice, without a C compiler, on
            different hosts, or when the two ranks hardly ran at the same time in half a second.
        """
        team = self._team
        team.share(None)
        times = self._measure(team.rank, cpus) if team.rank < 2 else []
        enough = len(times) >= MIN_FLAG_BATCHES
        us = percentiles(times, "ns")["p10_ns"] / FLAG_ROUND_TRIPS / 2 / 1000 if enough else None
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
