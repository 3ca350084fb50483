"""The machine: its CPUs, memory and versions, and what a container or the kernel refuses."""

from __future__ import annotations

import os
import resource
from collections.abc import Collection
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
