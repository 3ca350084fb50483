"""Timelines: what was computed when, on all ranks; measured, or simulated in exact fractions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from ringcomm.parallel.pipeline.schedules import Kind, Plan, Work, make_plan

__all__ = ["Action", "Timeline", "simulate"]

Time = float | Fraction
Times = Time | Sequence[Time]


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

    def export_chrome_trace(self, path: str | Path) -> None:
        """Writes Chrome's trace format, which Perfetto and chrome://tracing show: a row a rank."""
        begin = min(action.begin_us for action in self.actions)
        events = [
            {
                "name": f"{action.kind}{action.micro_batch}",
                "cat": action.kind,
                "ph": "X",
                "pid": 0,
                "tid": action.rank,
                "ts": float(action.begin_us - begin),
                "dur": float(action.end_us - action.begin_us),
                "args": {"stage": action.stage, "micro_batch": action.micro_batch},
            }
            for action in self.actions
        ]
        Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


def simulate(
    schedule: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    num_stages_per_rank: int | None = None,
    forward_us: Times = 1,
    backward_us: Times = 2,
    weight_us: Times | None = None,
) -> Timeline:
    """Runs a schedule's order in no time but that of its stages; messages cost nothing.

        pipeline.simulate("1f1b", num_ranks=4, num_microbatches=8).bubble()  # Fraction(3, 11)

    Args:
        schedule: as of a Pipeline.
        num_ranks: of its group.
        num_microbatches: as of a Pipeline.
        num_stages_per_rank: as of a Pipeline.
        forward_us: of one micro-batch in one stage, or a list by stage; in any unit.
        backward_us: the same of its backward, both halves.
        weight_us: of the half for weights, where the schedule has halves; default: half of it. The
            first stage has nobody to give gradients of inputs to, and does all of its backward
            then.

    Returns:
        The timeline, in exact fractions.

    Raises:
        ValueError: the schedule does not come with these numbers, or a list of times has not one
            for each stage.
    """
    plan = make_plan(schedule, num_ranks, num_microbatches, num_stages_per_rank)
    forward = _by_stage("forward_us", forward_us, plan.num_stages)
    backward = _by_stage("backward_us", backward_us, plan.num_stages)
    halves = [time / 2 for time in backward] if weight_us is None else weight_us
    weight = _by_stage("weight_us", halves, plan.num_stages)
    weight[0] = backward[0]
    times = {
        "F": forward,
        "B": backward,
        "I": [both - own for both, own in zip(backward, weight, strict=True)],
        "W": weight,
    }
    return _run(plan, times)


def _by_stage(name: str, times: Times, num_stages: int) -> list[Fraction]:
    if not isinstance(times, Sequence):
        return [Fraction(times)] * num_stages
    if len(times) != num_stages:
        raise ValueError(f"{name} has {len(times)} times for {num_stages} stages")
    return [Fraction(time) for time in times]


def _run(plan: Plan, times: dict[str, list[Fraction]]) -> Timeline:
    """Every action begins when its rank is free and what it needs is there."""
    ends: dict[tuple[str, int, int], Fraction] = {}
    actions: list[Action] = []
    free = [Fraction(0)] * plan.num_ranks
    positions = [0] * plan.num_ranks
    while any(positions[rank] < len(plan.orders[rank]) for rank in range(plan.num_ranks)):
        num_before = len(actions)
        for rank, order in enumerate(plan.orders):
            while positions[rank] < len(order):
                work = order[positions[rank]]
                needs = [ends.get(need) for need in _needs(work, plan.num_stages)]
                ready = [need for need in needs if need is not None]
                if len(ready) < len(needs):
                    break
                begin = max([free[rank], *ready])
                end = begin + times[work.kind][work.stage]
                # What waits for either kind of backward looks in one place.
                kind = "B" if work.kind == "I" else work.kind
                ends[kind, work.stage, work.micro_batch] = free[rank] = end
                actions.append(Action(rank, *work, begin, end))
                positions[rank] += 1
        if len(actions) == num_before:
            raise RuntimeError(f"{plan.schedule} waits for itself: a bug of the schedule")
    return Timeline(plan.num_ranks, tuple(sorted(actions, key=lambda a: (a.begin_us, a.end_us))))


def _needs(work: Work, num_stages: int) -> list[tuple[str, int, int]]:
    stage, micro_batch = work.stage, work.micro_batch
    if work.kind == "F":
        return [("F", stage - 1, micro_batch)] if stage else []
    if work.kind == "W":
        return [("B", stage, micro_batch)]
    needs = [("F", stage, micro_batch)]
    return needs if stage == num_stages - 1 else [*needs, ("B", stage + 1, micro_batch)]
