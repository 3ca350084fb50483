"""Facts about the machine, what other programs do on it, and the speed of its memory and flags."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, ROOT, Team, utc_now
from training.machine import MAX_OTHERS_SHARE, OtherPrograms
from training.quantiles import median, quantile

import ringcomm

# Longest wait for git or the compiler.
TOOL_TIMEOUT_S = 60.0
MAX_OTHERS_PERCENT = 100 * MAX_OTHERS_SHARE
# The two cores of some virtual machines share a cache at one moment and not at the next; then
# hand-over latency changes by 5 to 10 times, and nothing else by twice within a run.
MAX_FLAG_CHANGE = 2.0

FLAG_SOURCE = Path(__file__).with_name("flag_latency.c")
FLAG_LINE_BYTES = 256  # two adjacent lines are fetched together: one flag per pair of lines
# Short batches, so that most are whole even where another program takes a core now and then.
FLAG_ROUND_TRIPS = 20
FLAG_BATCHES = 200
MIN_FLAG_BATCHES = 20
FLAG_TIMEOUT_NS = 5 * 10**8
FLOOR_SECONDS = 0.05
NUM_FLOOR_CALLS = (5, 2000)  # at least, at most


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=TOOL_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def facts() -> dict[str, Any]:
    """What every record begins with. `date` is the run's, `dirty` leaves the records out."""
    changes = _git("status", "--porcelain", "--", ".", f":!{RESULTS.relative_to(ROOT)}")
    tuning = {k: v for k, v in sorted(os.environ.items()) if k.startswith(("RINGCOMM_", "GLOO_"))}
    return {
        "date": utc_now().isoformat(),
        "commit": _git("rev-parse", "HEAD"),
        "dirty": None if changes is None else changes != "",
        "machine": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
        },
        "torch": torch.__version__,
        "ringcomm": ringcomm.__version__,
        "python": platform.python_version(),
        "threads_per_rank": 1,
        "environment": tuning,
    }


class OthersWatch(OtherPrograms):
    """The main job's clocks, in percent."""

    def percent(self) -> float:
        """Percent of all cores that others used; 100 where that is not known."""
        share = self.share()
        return 100.0 if share is None else 100 * share


def _two_cores() -> list[int]:
    """Two of this process's CPUs on different cores where it has them."""
    cpus = sorted(os.sched_getaffinity(0))
    path = Path(f"/sys/devices/system/cpu/cpu{cpus[0]}/topology/core_cpus_list")
    try:
        siblings = {int(v) for v in path.read_text().replace("-", ",").strip().split(",")}
    except (OSError, ValueError):
        siblings = {cpus[0]}
    others = [cpu for cpu in cpus[1:] if cpu not in siblings] or cpus
    return [cpus[0], others[0]]


def _compile_flag_probe() -> ctypes.CDLL | None:
    """Compiles the probe once per version of its source; None without a C compiler."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        return None
    digest = hashlib.sha256(FLAG_SOURCE.read_bytes() + platform.machine().encode()).hexdigest()
    library = ROOT / "build" / "benchmarks" / f"flag_latency-{digest[:12]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        partial = library.with_suffix(f".{os.getpid()}")
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(partial), str(FLAG_SOURCE)]
        subprocess.run(command, check=True, timeout=TOOL_TIMEOUT_S)
        partial.rename(library)
    return ctypes.CDLL(str(library))


class FlagProbe:
    """Measures how long one core takes to see what another wrote. Make it before the fork."""

    def __init__(self) -> None:
        library = _compile_flag_probe()
        self._round_trips = library.ringcomm_flag_round_trips if library is not None else None
        if self._round_trips is not None:
            self._round_trips.restype = ctypes.c_int64
            self._round_trips.argtypes = [
                *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int),
                *(ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
            ]
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)  # shared and anonymous: ranks inherit it
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._flags = [first, first + FLAG_LINE_BYTES]
        self._base = 0

    def latency_us(self, team: Team) -> float | None:
        """One-way hand-over between ranks 0 and 1, in µs. Collective; the others sleep.

        Both are bound to a core of their own meanwhile. The fastest tenth of the batches counts:
        another program can only slow them down.

        Returns:
            The same on all ranks; None with one rank or core, without a C compiler, or when the
            two ranks hardly ran at the same time in half a second.
        """
        team.share(None)
        times = self._measure(team.rank) if team.rank < min(2, team.world_size) else []
        enough = len(times) >= MIN_FLAG_BATCHES
        us = quantile(sorted(times), 0.1) / FLAG_ROUND_TRIPS / 2 / 1000 if enough else None
        latency: float | None = team.share(us)[0]
        return latency

    def _measure(self, side: int) -> list[int]:
        """Nanoseconds of each batch; the batch that waits for the other side to come is dropped."""
        first, self._base = self._base, self._base + FLAG_ROUND_TRIPS * (FLAG_BATCHES + 1)
        if self._round_trips is None or len(os.sched_getaffinity(0)) < 2:
            return []
        own, other = self._flags[side], self._flags[1 - side]
        deadline = time.monotonic_ns() + FLAG_TIMEOUT_NS
        times = []
        free = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {_two_cores()[side]})
        try:
            for base in range(first, self._base, FLAG_ROUND_TRIPS):
                ns = self._round_trips(own, other, side, base, FLAG_ROUND_TRIPS, deadline)
                if ns < 0:
                    break
                times.append(ns)
        finally:
            os.sched_setaffinity(0, free)
        return times[1:]


def did_flags_change(before_us: float | None, after_us: float | None) -> bool:
    """Whether the cores came to share a cache, or ceased to, between two measurements."""
    if before_us is None or after_us is None:
        return False
    return max(before_us, after_us) > MAX_FLAG_CHANGE * min(before_us, after_us)


def memory_floor_us(team: Team, tensor: torch.Tensor) -> float:
    """Median µs of scaling ``tensor`` in place by one, on all ranks at once. Collective.

    Each byte is read once and written once, which no all_reduce can avoid. The slowest rank
    counts. For small tensors it is what calling torch costs.
    """

    def scale() -> float:
        begin = time.perf_counter()
        tensor.mul_(1)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        return time.perf_counter() - begin

    scale()
    estimate_s = max(team.share(scale()))
    least, most = NUM_FLOOR_CALLS
    num_calls = min(most, max(least, int(FLOOR_SECONDS / max(estimate_s, 1e-9))))
    by_rank = team.share([scale() for _ in range(num_calls)])
    return 1e6 * median(max(calls) for calls in zip(*by_rank, strict=True))
