"""One race: contenders take turns on all ranks, and each of them becomes a record."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from cells import Record
from report import records_of

from _ringcomm.values import MAX_OTHERS_PERCENT
from ringcomm.measure.machine import OthersWatch
from ringcomm.measure.ranks import Team
from ringcomm.measure.timing import Contender, Timings, measure


def of_blocks(timings: Timings) -> Timings:
    """The same with each call's time as its block's over its calls, as nccl-tests has it."""
    calls = zip(timings.elapsed, timings.blocks, strict=True)
    return Timings([[seconds] * len(block) for seconds, block in calls], timings.elapsed)


Found = TypeVar("Found")


def weather(others_percent: float, num_attempts: int = 1) -> Record:
    """The fields of a record that tell what share of all cores other programs used.

    Of several attempts the calmest one counts.
    """
    return {
        "others_busy_percent": others_percent,
        "quiet": others_percent <= MAX_OTHERS_PERCENT,
        "num_attempts": num_attempts,
    }


class WeatherWatch:
    """Examines the machine before and after a measurement. Construction and use are collective."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._own_pids = [os.getppid(), *team.share(os.getpid())]

    def _attempt(self, measure: Callable[[], Found]) -> tuple[float, Found]:
        others = OthersWatch(self._own_pids) if self._team.rank == 0 else None
        self._team.share(None)
        found = measure()
        return self._team.agree(None if others is None else others.percent()), found

    def calmest(self, measure: Callable[[], Found], max_repeats: int) -> tuple[Found, Record]:
        """``measure()`` again while the machine is disturbed; what it returned the calmest time.

        The conditions, which are fields of a record, and so the choice are the same on all ranks.
        """
        attempts = [self._attempt(measure)]
        while len(attempts) <= max_repeats and attempts[-1][0] > MAX_OTHERS_PERCENT:
            attempts.append(self._attempt(measure))
        percent, found = min(attempts, key=itemgetter(0))
        return found, weather(percent, len(attempts))


@dataclass
class EventContender(Contender):
    """One backend's calls on a device; the time from an event after some to that after the next.

    The host does not wait between calls. If the device is faster than the host, this is the host's
    time per call.

    Attributes:
        device: the device whose current stream has the events.
        num_calls: the calls in one ``call``.
    """

    device: torch.device | str = "cuda"
    num_calls: int = 1

    def first_call_s(self) -> float:
        """Seconds of a call until the device has completed it."""
        begin = time.perf_counter()
        self.call()
        torch.get_device_module(self.device).synchronize(self.device)
        return time.perf_counter() - begin

    def block(self) -> list[float]:
        """Seconds of each call of a block, on this rank's device. Collective."""
        module: Any = torch.get_device_module(self.device)
        events = [module.Event(enable_timing=True) for _ in range(self.calls_per_block + 1)]
        self.align()
        self.call()
        call = self.call
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        module.synchronize(self.device)
        return [
            begin.elapsed_time(end) / 1e3 / self.num_calls
            for begin, end in itertools.pairwise(events)
        ]


@dataclass
class OwnClock(Contender):
    """A call that measures itself: it returns its seconds."""

    call: Callable[[], float]

    def first_call_s(self) -> float:
        """Seconds of one call, by its own clock."""
        return self.call()

    def block(self) -> list[float]:
        """Seconds of each call of a block."""
        self.align()
        return [self.call() for _ in range(self.calls_per_block)]


@dataclass(frozen=True)
class Bench:
    """A rank's instruments.

    Attributes:
        groups: by label: c10d's, or a communicator of mpi4py.
        seconds: of a race, for all contenders together.
        repeats: of a race, at most, while other programs disturb the machine.
    """

    team: Team
    groups: dict[str, Any]
    watch: WeatherWatch
    device: torch.device
    seconds: float = 0.0
    repeats: int = 0

    def align(self) -> None:
        """Ranks wait for their devices, then for each other."""
        torch.get_device_module(self.device).synchronize(self.device)
        self.team.share(None)

    def contender(self, call: Callable[[], object], group: Any = None) -> Contender:
        """A call that a group's barrier, or on devices ``align``, precedes; timed there by events.

        Without a group it is the default group's barrier; one rank needs none.
        """
        if self.device.type != "cpu":
            return EventContender(call, self.align, device=self.device)
        alone = self.team.world_size == 1
        return Contender(call, (lambda: None) if alone else partial(dist.barrier, group))

    def race(
        self,
        contenders: Mapping[str, Callable[[], object] | Contender],
        subject: str,
        wrong: dict[str, int] | None = None,
        *,
        name: str = "way",
        seconds: float | None = None,
        by_block: bool = False,
        **facts: Any,
    ) -> list[Record]:
        """Times contenders in turn. Collective.

        Args:
            contenders: by label.
            subject: the label of the one with which the others are compared.
            wrong: elements by label, over all ranks.
            name: the field that holds the label.
            seconds: other than those of this bench.
            by_block: a call's time is that of its block over the calls.
            facts: fields of all records.

        Returns:
            On rank 0 a record per contender; else nothing.
        """
        ready = {
            label: one if isinstance(one, Contender) else self.contender(one)
            for label, one in contenders.items()
        }
        time_all = partial(measure, self.team, ready, self.seconds if seconds is None else seconds)
        timings, conditions = self.watch.calmest(time_all, self.repeats)
        if timings is None:
            return []
        if by_block:
            timings = {label: of_blocks(found) for label, found in timings.items()}
        found = records_of(timings, subject, wrong or dict.fromkeys(timings, 0), name)
        return [record | facts | conditions for record in found]

    def report(self, records: list[Record]) -> None:
        """Passes records on to the process that writes them; only rank 0 has some."""
        if records:
            self.team.report(records)


def make_bench(team: Team, options: Any) -> Bench:
    """Makes a rank's instruments for a command line with a placement. Collective."""
    device = options.placement.take(team.rank)
    limits = getattr(options, "seconds", 0.0), getattr(options, "repeats", 0)
    return Bench(team, {}, WeatherWatch(team), device, *limits)
