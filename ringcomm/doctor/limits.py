"""What a container or the administrator allows: cgroup limits (v1 and v2), kernel features.

Limits of every ancestor count, so the least one on the way up is told.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC_SELF = Path("/proc/self")
# v1 has no word for "no limit" of memory: it gives the largest page-aligned number instead.
V1_NO_LIMIT_BYTES = 1 << 60


@dataclass(frozen=True)
class Limit:
    """A limit and the file that sets it."""

    value: float
    file: str


@dataclass(frozen=True)
class Limits:
    """None where nothing limits.

    Attributes:
        cpu_cores: CPU time per time: 1.5 is one and a half CPU.
        memory_bytes: of all processes in the cgroup together; ringcomm's memory is charged there.
        max_fds: open files of a process.
    """

    cpu_cores: Limit | None
    memory_bytes: Limit | None
    max_fds: int


@dataclass(frozen=True)
class _Mount:
    """One cgroup hierarchy: where it is mounted, which part of it, and its v1 controllers."""

    point: Path
    root: str
    controllers: frozenset[str]  # empty for v2


def _mounts(proc: Path) -> list[_Mount]:
    """See proc(5), mountinfo: 36 35 98:0 /root /mountpoint options ... - type source options."""
    found = []
    for line in (proc / "mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        fields, (kind, _, options) = left.split(), right.split()[:3]
        if kind == "cgroup2":
            found.append(_Mount(Path(fields[4]), fields[3], frozenset()))
        elif kind == "cgroup":
            found.append(_Mount(Path(fields[4]), fields[3], frozenset(options.split(","))))
    return found


def _folders(proc: Path, controller: str) -> Iterator[Path]:
    """This process's folders in the hierarchies that may limit, each with its ancestors."""
    mounts = _mounts(proc)
    for line in (proc / "cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        for mount in mounts:
            is_v2 = names == "" and not mount.controllers
            if not (is_v2 or controller in mount.controllers & set(names.split(","))):
                continue
            inside = path.removeprefix(mount.root) if mount.root != "/" else path
            # A path outside what is mounted (another cgroup namespace): its top is all we see.
            below = [part for part in inside.split("/") if part not in ("", "..")]
            for depth in range(len(below), -1, -1):
                yield mount.point.joinpath(*below[:depth])


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:  # the root of a hierarchy has no limits
        return None


def _cpu_limit(folder: Path) -> Limit | None:
    both = _read(folder / "cpu.max")
    if both is not None:
        quota, _, period = both.partition(" ")
        return None if quota == "max" else Limit(int(quota) / int(period), str(folder / "cpu.max"))
    quota_us, period_us = (_read(folder / f"cpu.cfs_{what}_us") for what in ("quota", "period"))
    if quota_us is None or period_us is None or int(quota_us) < 0:
        return None
    return Limit(int(quota_us) / int(period_us), str(folder / "cpu.cfs_quota_us"))


def _memory_limit(folder: Path) -> Limit | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        text = _read(folder / name)
        if text is not None and text != "max" and int(text) < V1_NO_LIMIT_BYTES:
            return Limit(int(text), str(folder / name))
    return None


def _least(limits: Iterator[Limit | None]) -> Limit | None:
    return min(filter(None, limits), key=lambda limit: limit.value, default=None)


def read_limits(proc: Path = PROC_SELF) -> Limits:
    """The limits of this process; nothing limits where no cgroup can be read."""
    cpu = memory = None
    try:
        cpu = _least(map(_cpu_limit, _folders(proc, "cpu")))
        memory = _least(map(_memory_limit, _folders(proc, "memory")))
    except (OSError, ValueError, ZeroDivisionError):  # no cgroups, or of a form that we do not know
        pass
    return Limits(cpu, memory, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def missing_features() -> list[str]:
    """What ringcomm asks of the kernel and does not get, with the reason: a seccomp filter may."""
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
