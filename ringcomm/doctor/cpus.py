"""CPUs and caches, as the kernel lists them under /sys/devices/system/cpu."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys/devices/system/cpu")
UNIT_BYTES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
LAST_LEVEL = 3


@dataclass(frozen=True)
class Cache:
    """One cache; an `instruction` cache holds no data and is left out."""

    level: int
    num_bytes: int
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class Cpus:
    """The CPUs that this process may use.

    Attributes:
        usable: numbers of the CPUs, ascending.
        num_online: CPUs of the machine.
        cores: usable CPUs by physical core: hardware threads of a core stand together.
        caches: those that a usable CPU has, by level and CPUs; empty where the kernel tells none.
    """

    usable: tuple[int, ...]
    num_online: int
    cores: tuple[tuple[int, ...], ...]
    caches: tuple[Cache, ...]

    def shares_l3(self, cpus: Collection[int]) -> bool | None:
        """Whether one L3 serves all these CPUs, as the kernel has it; None if it is silent."""
        found = [cache for cache in self.caches if cache.level == LAST_LEVEL]
        if not found:
            return None
        return any(set(cpus) <= set(cache.cpus) for cache in found)


def parse_list(text: str) -> tuple[int, ...]:
    """`0-2,5` as (0, 1, 2, 5). Raises ValueError."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)


def _parse_size(text: str) -> int:
    text = text.strip()
    unit = UNIT_BYTES.get(text[-1:])
    return int(text[:-1]) * unit if unit else int(text)


def _cache(folder: Path) -> Cache | None:
    """A cache with data in it, or None."""
    try:
        if (folder / "type").read_text().strip() == "Instruction":
            return None
        return Cache(
            level=int((folder / "level").read_text()),
            num_bytes=_parse_size((folder / "size").read_text()),
            cpus=parse_list((folder / "shared_cpu_list").read_text()),
        )
    except (OSError, ValueError):  # containers and some hypervisors show a part of it
        return None


def _siblings(cpu: int, sysfs: Path) -> tuple[int, ...]:
    try:
        return parse_list((sysfs / f"cpu{cpu}" / "topology" / "core_cpus_list").read_text())
    except (OSError, ValueError):
        return (cpu,)


def read_cpus(usable: Collection[int] | None = None, sysfs: Path = SYSFS) -> Cpus:
    """The CPUs in `usable`, or those that this process may run on."""
    cpus = tuple(sorted(os.sched_getaffinity(0) if usable is None else usable))
    siblings = {tuple(c for c in _siblings(cpu, sysfs) if c in cpus) for cpu in cpus}
    folders = [folder for cpu in cpus for folder in (sysfs / f"cpu{cpu}" / "cache").glob("index*")]
    caches = {cache for cache in map(_cache, folders) if cache is not None}
    try:
        num_online = len(parse_list((sysfs / "online").read_text()))
    except (OSError, ValueError):
        num_online = os.cpu_count() or len(cpus)
    ordered = sorted(caches, key=lambda cache: (cache.level, cache.cpus))
    return Cpus(cpus, num_online, tuple(sorted(siblings)), tuple(ordered))


def telling_pairs(cpus: Cpus, most: int = 8) -> list[tuple[int, int]]:
    """Pairs of CPUs whose hand-over says how the caches lie: within the first L3, and across.

    Hardware threads of one core tell nothing: they share everything.
    """
    firsts = [core[0] for core in cpus.cores]
    if len(firsts) < 2:
        return []
    start = firsts[0]
    near = [cpu for cpu in firsts[1:] if cpus.shares_l3((start, cpu))]
    far = [cpu for cpu in firsts[1:] if not cpus.shares_l3((start, cpu))]
    seen: set[tuple[int, ...]] = set()
    chosen = near[:1]
    for cpu in far:  # one CPU of each other L3
        domain = next((c.cpus for c in cpus.caches if c.level == LAST_LEVEL and cpu in c.cpus), ())
        if domain not in seen:
            seen.add(domain)
            chosen.append(cpu)
    return [(start, cpu) for cpu in chosen[:most]]
