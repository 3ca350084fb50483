"""The machine: its CPUs, memory and versions, and what a container or the kernel refuses."""

from __future__ import annotations

import os
import resource
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.utils import collect_env

import ringcomm
from ringcomm import _C

SYSFS = Path("/sys/devices/system/cpu")
CGROUPS = Path("/sys/fs/cgroup")
PROC_SELF = Path("/proc/self")
# cgroup v1 writes the largest page-aligned number where memory has no limit.
V1_NO_LIMIT_BYTES = 1 << 60


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


def parse_list(text: str) -> tuple[int, ...]:
    """`0-2,5` as (0, 1, 2, 5). Raises ValueError."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)


def _list_in(path: Path) -> tuple[int, ...]:
    """The CPUs that a file of the kernel lists; none where there is no such file."""
    try:
        return parse_list(path.read_text())
    except (OSError, ValueError):  # containers and some hypervisors show a part of it
        return ()


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
    firsts = [core[0] for core in cpus.cores]
    if len(firsts) < 2:
        return []
    start = firsts[0]
    chosen: dict[Any, int] = {}  # the first other CPU of each L3
    for cpu in sorted(firsts[1:], key=lambda cpu: not cpus.shares_l3((start, cpu))):
        chosen.setdefault(next((cache for cache in cpus.l3 if cpu in cache), ()), cpu)
    return [(start, cpu) for cpu in chosen.values()][:most]


@dataclass(frozen=True)
class Limit:
    """A limit and the file that sets it."""

    value: float
    file: str


@dataclass(frozen=True)
class Limits:
    """None where there is no limit.

    Attributes:
        cpu_cores: CPU time per time: 1.5 is one and a half CPU.
        memory_bytes: of all processes in the cgroup together; ringcomm's memory is charged there.
        max_fds: open files of a process.
    """

    cpu_cores: Limit | None
    memory_bytes: Limit | None
    max_fds: int


def _folders(proc: Path, cgroups: Path, controller: str) -> Iterator[Path]:
    """This process's folders that may hold a limit (cgroup v2, then v1), and their ancestors.

    In a container a path of v1 may lie outside of what is mounted; its ancestors do not.
    """
    for line in (proc / "cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        top = cgroups / controller if names else cgroups
        below = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(below), -1, -1):
            yield top.joinpath(*below[:depth])


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:  # the root of a hierarchy has no limits
        return None


def _cpu_limit(folder: Path) -> Limit | None:
    both, file = _read(folder / "cpu.max"), folder / "cpu.max"
    if both is None:
        file = folder / "cpu.cfs_quota_us"
        both = f"{_read(file) or 'max'} {_read(folder / 'cpu.cfs_period_us') or 1}"
    quota, _, period = both.partition(" ")
    return None if quota in ("max", "-1") else Limit(int(quota) / int(period), str(file))


def _memory_limit(folder: Path) -> Limit | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        text = _read(folder / name)
        if text not in (None, "max") and int(text or 0) < V1_NO_LIMIT_BYTES:
            return Limit(int(text or 0), str(folder / name))
    return None


def _least(limits: Iterator[Limit | None]) -> Limit | None:
    return min(filter(None, limits), key=lambda limit: limit.value, default=None)


def read_limits(proc: Path = PROC_SELF, cgroups: Path = CGROUPS) -> Limits:
    """The least limit of this process and its ancestors; None where no cgroup can be read."""
    cpu = memory = None
    try:
        cpu = _least(map(_cpu_limit, _folders(proc, cgroups, "cpu")))
        memory = _least(map(_memory_limit, _folders(proc, cgroups, "memory")))
    except (OSError, ValueError, ZeroDivisionError):  # no cgroups, or of an unknown form
        pass
    return Limits(cpu, memory, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


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
        "memory": {"total_bytes": memory.total, "available_bytes": memory.available},
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
