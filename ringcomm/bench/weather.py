"""The machine around a measurement: what other programs took of it, and how its caches lay."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ringcomm.bench.flags import FlagProbe, did_flags_change
from ringcomm.bench.machine import MAX_OTHERS_PERCENT, OthersWatch
from ringcomm.bench.ranks import Team

Found = TypeVar("Found")


@dataclass(frozen=True)
class Weather:
    """What a measurement could do nothing about.

    Attributes:
        others_percent: of all cores, what other programs used.
        flag_us: hand-over between two cores, before and after; None where that is not known.
        num_attempts: how often it was measured, of which the calmest time counts.
    """

    others_percent: float
    flag_us: tuple[float | None, float | None] = (None, None)
    num_attempts: int = 1

    @property
    def is_quiet(self) -> bool:
        """Whether other programs left the machine alone."""
        return self.others_percent <= MAX_OTHERS_PERCENT

    @property
    def is_steady(self) -> bool:
        """Whether the cores shared a cache at the end if and only if they did at the start."""
        return not did_flags_change(*self.flag_us)

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
            best = min(best, self._attempt(measure), key=_disturbance)
            num_attempts += 1
        return best[0], replace(best[1], num_attempts=num_attempts)


def _disturbance(attempt: tuple[Any, Weather]) -> tuple[bool, bool, float]:
    weather = attempt[1]
    return not weather.is_quiet, not weather.is_steady, weather.others_percent
