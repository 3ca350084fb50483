"""The machine: identity, CPUs, versions, limits of a process, and load by other programs."""

import contextlib
import datetime
import os
import platform
import re
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import collect_env

import ringcomm
from ringcomm import _C

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def utc_now() -> datetime.datetime:
    """The time in UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)


def _text_of(path: Path | str) -> str:
    """Of a file of the kernel; "" where it is hidden."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def identity() -> dict[str, Any]:
    """The properties that must be equal for comparable figures: CPU, usable cores, kernel."""
    names = re.findall(r"^model name\s*: (.*)$", _text_of("/proc/cpuinfo"), re.M)
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
    }


def variables(*prefixes: str) -> dict[str, str]:
    """The environment variables with one of these prefixes, sorted by name."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}


def rounded(value: Any) -> Any:
    """Rounds floats to five digits: more than the accuracy of a measurement, and still legible."""
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
    totals = {"Size": 0, "Rss": 0, "Pss": 0}
    is_ours = False
    for line in _text_of("/proc/self/smaps").splitlines():
        name, _, rest = line.partition(":")
        if " " in name:  # the first line of a mapping: addresses, permissions, ..., file
            is_ours = "/memfd:ringcomm" in line
        elif is_ours and name in totals:
            totals[name] += int(rest.split()[0]) << 10
    return {
        "mapped_bytes": totals["Size"],
        "resident_bytes": totals["Rss"],
        "share_bytes": totals["Pss"],
    }


def memory(path: Path = Path("/proc/meminfo")) -> dict[str, int]:
    """`total_bytes` of the machine, and the `available_bytes` that need no swapping."""
    found = dict(re.findall(r"^(\w+): +(\d+) kB$", _text_of(path), re.M))

    def bytes_of(name: str, pages: str) -> int:
        if name in found:
            return int(found[name]) << 10
        return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")

    return {
        "total_bytes": bytes_of("MemTotal", "SC_PHYS_PAGES"),
        "available_bytes": bytes_of("MemAvailable", "SC_AVPHYS_PAGES"),
    }


def load() -> tuple[float, float, float] | None:
    """The averages over 1, 5 and 15 minutes; None where the kernel does not tell."""
    with contextlib.suppress(OSError):
        return os.getloadavg()
    return None


def huge_pages(
    root: Path = Path("/sys/kernel/mm/transparent_hugepage"),
) -> dict[str, str] | None:
    """When shared memory has huge pages ("never", "advise", ...), and the file that says so.

    None if not known. The setting of pages of 2 MiB is newer than that of all sizes, to which it
    may refer.
    """
    for name in ("hugepages-2048kB/shmem_enabled", "shmem_enabled"):
        with contextlib.suppress(OSError):
            path = root / name
            chosen = re.findall(r"\[(\w+)\]", path.read_text())
            if chosen and chosen != ["inherit"]:
                return {"setting": chosen[0], "file": str(path)}
    return None


def num_cores(cpus: Path = Path("/sys/devices/system/cpu")) -> int | None:
    """The physical cores that this process may use; None where the kernel does not tell."""
    usable = os.sched_getaffinity(0)
    siblings = {i: _text_of(cpus / f"cpu{i}/topology/thread_siblings_list") for i in usable}
    return len({text or i for i, text in siblings.items()}) if any(siblings.values()) else None


def num_nodes(folder: Path = Path("/sys/devices/system/node")) -> int:
    """NUMA nodes with cores that this process may use; 1 where the kernel does not tell."""
    usable = os.sched_getaffinity(0)
    found = 0
    for path in folder.glob("node[0-9]*/cpulist"):
        ranges = re.findall(r"(\d+)(?:-(\d+))?", path.read_text())
        found += any(usable & {*range(int(a), int(b or a) + 1)} for a, b in ranges)
    return max(1, found)


def usable_cores() -> int:
    """Those that this process may use, at least 1: by its affinity and its cgroup's limit."""
    allowed, _ = read_limits()["cpu_cores"] or (float("inf"), "")
    logical = len(os.sched_getaffinity(0))
    return max(1, int(min(num_cores() or logical, allowed)))


def _cpu_s(pid: int) -> float:
    """Seconds of CPU time of a process and of the children that it has waited for."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    return sum(map(int, after_name.split()[11:15])) / TICKS_PER_S


class OthersWatch:
    """Measures how busy other programs keep the machine, from construction on.

    The clocks tick every 10 ms: a period should last a second.
    """

    def __init__(self, own_pids: Sequence[int]) -> None:
        """``own_pids``: the ranks and their parent, all alive until ``percent`` is called.

        Children that these start have to be waited for until then.
        """
        self._pids = own_pids
        self._start = self._read()

    def _read(self) -> tuple[float, float]:
        # Interrupts are left out, because our own loopback traffic is not charged to a process.
        ticks = [int(text) for text in _text_of("/proc/stat").split(maxsplit=9)[1:9]]
        user, nice, system, *_, steal = ticks or [0] * 4
        busy_s = (user + nice + system + steal) / TICKS_PER_S
        for pid in self._pids:
            # The time of a process that has ended counts as that of others: the safe side.
            with contextlib.suppress(OSError):
                busy_s -= _cpu_s(pid)
        return time.monotonic(), busy_s

    def percent(self) -> float:
        """Percent of all cores that others used since the start, in [0, 100]; 0 if not known."""
        now, busy_s = self._read()
        elapsed_s = max(now - self._start[0], 1e-9) * (os.cpu_count() or 1)
        return 100 * min(1.0, max(0.0, (busy_s - self._start[1]) / elapsed_s))


def read_limits(
    proc: Path = Path("/proc/self"), cgroups: Path = Path("/sys/fs/cgroup")
) -> dict[str, Any]:
    """The smallest limits of this process's cgroup, of version 2, and its ancestors.

    `cpu_cores`, CPU time per time, and `memory_bytes`, of all processes in the cgroup together,
    each as (value, file), or None without a limit; `max_fds`, open files of a process.
    """
    max_fds, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {**_C.cgroup_limits(str(proc), str(cgroups)), "max_fds": max_fds}


def versions() -> dict[str, Any]:
    """ringcomm's, and those of torch's collect_env. It runs tools such as lscpu for a second."""
    found = collect_env.get_env_info()
    names = ["os", "libc_version", "gcc_version", "clang_version", "cuda_runtime_version"]
    names += ["nvidia_driver_version", "nvidia_gpu_models"]
    return {
        "ringcomm": ringcomm.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "simd": _C.simd_level(),
        "gloo": dist.is_gloo_available(),
        **{name: getattr(found, name) for name in names},
    }
