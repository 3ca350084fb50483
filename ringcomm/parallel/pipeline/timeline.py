"""Timelines: what was computed when, on all ranks, measured or simulated."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from ringcomm.parallel.pipeline.schedules import Kind

__all__ = ["Action", "Timeline"]

Time = float | Fraction


class Action(NamedTuple):
    """One micro-batch in one stage.

    Attributes:
        kind: F forward, B backward; I and W its halves, for inputs and for weights.
        begin_us, end_us: microseconds; those of a simulation are in the unit it was given, exact.
    """

    rank: int
    kind: Kind
    stage: int
    micro_batch: int
    begin_us: Time
    end_us: Time


@dataclass(frozen=True)
class Timeline:
    """A step.

    Attributes:
        num_ranks: of the pipeline.
        actions: of all ranks, by their begin.
    """

    num_ranks: int
    actions: tuple[Action, ...]

    @property
    def span_us(self) -> Time:
        """From the first begin to the last end."""
        return max(a.end_us for a in self.actions) - min(a.begin_us for a in self.actions)

    def busy_us(self, rank: int) -> Time:
        """How long a rank computed."""
        return sum((a.end_us - a.begin_us for a in self.actions if a.rank == rank), Fraction(0))

    def bubble(self) -> Time:
        """The share of all ranks' time in which they did not compute.

        (p-1) / (m+p-1) for GPipe and 1F1B over p ranks with m micro-batches whose stages are alike,
        and (p-1) / (v m+p-1) for interleaved 1F1B with v stages per rank (Narayanan et al. 2021).
        """
        busy = sum((self.busy_us(rank) for rank in range(self.num_ranks)), Fraction(0))
        return 1 - busy / (self.num_ranks * self.span_us)

    def orders(self) -> list[list[Action]]:
        """By rank."""
        return [[a for a in self.actions if a.rank == rank] for rank in range(self.num_ranks)]

    def max_live(self) -> dict[int, int]:
        """By stage, how many micro-batches were forwarded and not through the backward, at most.

        min(m, p-i) in stage i of 1F1B, m in GPipe: it is their activations that memory is for.
        """
        live: Counter[int] = Counter()
        most: Counter[int] = Counter()
        for action in self.actions:
            live[action.stage] += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            most[action.stage] = max(most[action.stage], live[action.stage])
        return dict(sorted(most.items()))
