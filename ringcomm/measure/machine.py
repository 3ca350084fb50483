"""The machine: its identity, CPUs and versions, what limits a process, and what others do on it."""

from __future__ import annotations

import ctypes
import datetime
import mmap
import os
import platform
import re
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.utils import collect_env

import ringcomm
from ringcomm import _C
from ringcomm.measure.ranks import Team
from ringcomm.measure.timing import quantile

SYSFS = Path("/sys/devices/system/cpu")
CGROUPS = Path("/sys/fs/cgroup")
MAPPED = "/memfd:ringcomm"
# Above this share of all cores a measured ratio says more about other programs than about us.
MAX_OTHERS_PERCENT = 10.0
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


@dataclass(frozen=True)
class Cpus:
    """The CPUs that this process may use.

    Attributes:
        usable: numbers of the CPUs, ascending.
        num_online: CPUs of the machine.
        cores: usable CPUs by physical core; hardware threads of a core are together.
        l3: all CPUs by L3 cache; empty where the kernel does not say.
    """

    usable: tuple[int, ...]
    num_online: int
    cores: tuple[tuple[int, ...], ...]
    l3: tuple[tuple[int, ...], ...]

    def shares_l3(self, cpus: Collection[int]) -> bool | None:
        """Whether one L3 serves all these CPUs, as the kernel has it; None if it is silent."""
        return any(set(cpus) <= set(cache) for cache in self.l3) if self.l3 else None


def _list_in(path: Path) -> tuple[int, ...]:
    """The CPUs in a file of the kernel, such as `0-2,5`; none where there is no such file."""
    numbers: list[int] = []
    try:
        for part in path.read_text().strip().split(","):
            first, _, last = part.partition("-")
            numbers += range(int(first), int(last or first) + 1)
    except (OSError, ValueError):  # containers and some hypervisors show a part of it
        return ()
    return tuple(numbers)


def read_cpus(usable: Collection[int] | None = None, sysfs: Path = SYSFS) -> Cpus:
    """The CPUs in `usable`, or those that this process may run on."""
    cpus = tuple(sorted(os.sched_getaffinity(0) if usable is None else usable))
    siblings = {cpu: _list_in(sysfs / f"cpu{cpu}/topology/core_cpus_list") for cpu in cpus}
    cores = {tuple(c for c in siblings[cpu] or (cpu,) if c in cpus) for cpu in cpus}
    l3 = {_list_in(sysfs / f"cpu{cpu}/cache/index3/shared_cpu_list") for cpu in cpus} - {()}
    return Cpus(cpus, psutil.cpu_count() or len(cpus), tuple(sorted(cores)), tuple(sorted(l3)))


def telling_pairs(cpus: Cpus, most: int = 8) -> list[tuple[int, int]]:
    """Pairs of CPUs whose hand-over shows the caches: within the first L3, and across.

    Hardware threads of one core are left out: they share everything.
    """
    start, *others = [core[0] for core in cpus.cores]
    chosen: dict[Any, int] = {}  # the first other CPU of each L3
    for cpu in sorted(others, key=lambda cpu: not cpus.shares_l3((start, cpu))):
        chosen.setdefault(next((cache for cache in cpus.l3 if cpu in cache), ()), cpu)
    return [(start, cpu) for cpu in chosen.values()][:most]


def read_limits(proc: Path = Path("/proc/self"), cgroups: Path = CGROUPS) -> dict[str, Any]:
    """The least limits of this process's cgroup (v2) and its ancestors.

    Returns:
        `cpu_cores`, CPU time per time, and `memory_bytes`, of all processes in the cgroup together,
        each as (value, file), or None without a limit; `max_fds`, open files of a process.
    """
    cpu, memory = [], []
    try:
        path = (proc / "cgroup").read_text().partition("0::/")[2].strip()
    except OSError:
        path = ""
    for folder in (cgroups / path, *(cgroups / path).parents):
        if not folder.is_relative_to(cgroups):
            break
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if quota.isdigit():
            cpu.append((int(quota) / int(period), str(folder / "cpu.max")))
        if _read(folder / "memory.max").isdigit():
            memory.append((int(_read(folder / "memory.max")), str(folder / "memory.max")))
    return {
        "cpu_cores": min(cpu, default=None),
        "memory_bytes": min(memory, default=None),
        "max_fds": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the root of the hierarchy has no limits
        return ""


def missing_features() -> list[str]:
    """System calls that ringcomm needs and the kernel or a seccomp filter refuses, and why."""
    missing = []
    for name, probe in (
        ("memfd_create", lambda: os.memfd_create("ringcomm-doctor")),
        ("pidfd_open", lambda: os.pidfd_open(os.getpid())),
    ):
        try:
            os.close(probe())
        except (OSError, AttributeError) as error:
            missing.append(f"{name}: {error}")
    return missing


def memory_and_load() -> dict[str, Any]:
    """Of the whole machine, whatever the container is allowed: bytes, and runnable tasks."""
    memory = psutil.virtual_memory()
    return {
        "total_bytes": memory.total,
        "available_bytes": memory.available,
        "load": list(psutil.getloadavg()),
    }


def versions() -> dict[str, Any]:
    """ringcomm's, and those of torch's collect_env. It runs tools such as lscpu for a second."""
    found = collect_env.get_env_info()
    return {
        "ringcomm": ringcomm.__version__,
        "torch": torch.__version__,
        "python": str(found.python_version).partition(" ")[0],
        "os": found.os,
        "kernel": os.uname().release,
        "libc": found.libc_version,
        "compiler": found.gcc_version or found.clang_version,
        "simd": _C.simd_level(),
        "gloo": dist.is_gloo_available(),
        "cuda": torch.version.cuda if found.is_cuda_available else None,
        "driver": found.nvidia_driver_version,
        "gpus": found.nvidia_gpu_models,
        "caches": [
            " ".join(line.split()) for line in str(found.cpu_info).splitlines() if " cache:" in line
        ],
    }


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

    def latency_us(self, cpus: tuple[int, int]) -> float | None:
        """One-way hand-over between ranks 0 and 1, in µs. Collective; the others sleep.

        Both are bound to a CPU of their own meanwhile. The fastest tenth of the batches counts:
        another program can only slow them down.

        Returns:
            The same on all ranks; None with one rank or one CPU twice, without a C compiler, on
            different hosts, or when the two ranks hardly ran at the same time in half a second.
        """
        team = self._team
        team.share(None)
        times = self._measure(team.rank, cpus) if team.rank < 2 else []
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
