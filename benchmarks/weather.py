"""The state of the machine during a measurement: other programs, and caches that cores share."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from flags import FlagProbe

from _ringcomm.values import MAX_OTHERS_PERCENT
from ringcomm.measure.machine import OthersWatch
from ringcomm.measure.ranks import Team

Found = TypeVar("Found")
# The two cores of some virtual machines share a cache at one moment and not at the next; then
# the flag's latency changes by 5 to 10 times; nothing else changes by 2 times within a run.
MAX_FLAG_CHANGE = 2.0


@dataclass(frozen=True)
class Weather:
    """External conditions during a measurement."""

    others_percent: float  # share of all cores that other programs used
    flag_us: tuple[float | None, float | None] = (None, None)  # latency of a flag, before and after
    num_attempts: int = 1  # the calmest one counts

    @property
    def is_quiet(self) -> bool:
        """Whether the machine was otherwise idle."""
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


def one_cpu_of_each_core() -> list[int]:
    """Of the CPUs that this process may use; all where the kernel does not tell their cores."""
    found: dict[str, int] = {}
    for cpu in os.sched_getaffinity(0):
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list")
        found.setdefault(path.read_text() if path.exists() else str(cpu), cpu)
    return sorted(found.values())


class WeatherWatch:
    """Examines the machine before and after a measurement. Construction and use are collective."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._probe = FlagProbe(team)
        cpus = one_cpu_of_each_core()
        self._cpus = cpus[0], cpus[min(1, len(cpus) - 1)]
        self._own_pids = [os.getppid(), *team.share(os.getpid())]

    def _attempt(self, measure: Callable[[], Found]) -> tuple[Found, Weather]:
        others = OthersWatch(self._own_pids) if self._team.rank == 0 else None
        before_us = self._probe.latency_us(self._cpus)
        found = measure()
        after_us = self._probe.latency_us(self._cpus)
        percent = self._team.agree(None if others is None else others.percent())
        return found, Weather(percent, (before_us, after_us))

    def calmest(self, measure: Callable[[], Found], max_repeats: int) -> tuple[Found, Weather]:
        """``measure()`` again while the machine is disturbed; what it returned the calmest time.

        The conditions, and so the choice, are the same on all ranks.
        """
        best, num_attempts = self._attempt(measure), 1
        while not (best[1].is_quiet and best[1].is_steady) and num_attempts <= max_repeats:
            best = min(best, self._attempt(measure), key=lambda attempt: attempt[1].disturbance)
            num_attempts += 1
        return best[0], replace(best[1], num_attempts=num_attempts)
