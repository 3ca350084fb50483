"""The state of the machine during a measurement: what other programs use of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from _ringcomm.values import MAX_OTHERS_PERCENT
from ringcomm.measure.machine import OthersWatch
from ringcomm.measure.ranks import Team

Found = TypeVar("Found")


@dataclass(frozen=True)
class Weather:
    """External conditions during a measurement."""

    others_percent: float  # share of all cores that other programs used
    num_attempts: int = 1  # the calmest one counts

    @property
    def is_quiet(self) -> bool:
        """Whether the machine was otherwise idle."""
        return self.others_percent <= MAX_OTHERS_PERCENT

    def record(self) -> dict[str, Any]:
        """The fields of a record."""
        return {
            "others_busy_percent": self.others_percent,
            "quiet": self.is_quiet,
            "num_attempts": self.num_attempts,
        }


class WeatherWatch:
    """Examines the machine before and after a measurement. Construction and use are collective."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._own_pids = [os.getppid(), *team.share(os.getpid())]

    def _attempt(self, measure: Callable[[], Found]) -> tuple[Found, Weather]:
        others = OthersWatch(self._own_pids) if self._team.rank == 0 else None
        self._team.share(None)
        found = measure()
        percent = self._team.agree(None if others is None else others.percent())
        return found, Weather(percent)

    def calmest(self, measure: Callable[[], Found], max_repeats: int) -> tuple[Found, Weather]:
        """``measure()`` again while the machine is disturbed; what it returned the calmest time.

        The conditions, and so the choice, are the same on all ranks.
        """
        best, num_attempts = self._attempt(measure), 1
        while not best[1].is_quiet and num_attempts <= max_repeats:
            best = min(best, self._attempt(measure), key=lambda attempt: attempt[1].others_percent)
            num_attempts += 1
        return best[0], replace(best[1], num_attempts=num_attempts)
