"""Schedules: the order of each rank's computations, and simulated times."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules

Kind = Literal["F", "B", "I", "W"]
Time = float | Fraction
Times = Time | Sequence[Time]
# (kind, stage, micro-batch, begin, end), times in microseconds of the host's monotonic clock.
Log = list[tuple[Kind, int, int, float, float]]


class Work(NamedTuple):
    """One unit of computation: one micro-batch in one stage.

    F is the forward, B the backward, I and W its halves: the gradients of the inputs, which the
    previous stage needs, and of the weights.
    """

    kind: Kind
    stage: int
    micro_batch: int


@dataclass(frozen=True)
class _Schedule:
    torch_name: str
    default_stages: int  # per rank
    has_several: bool  # stages per rank, and torch's runtime for them
    is_v: bool = False


SCHEDULES = {
    "gpipe": _Schedule("ScheduleGPipe", 1, False),
    "1f1b": _Schedule("Schedule1F1B", 1, False),
    "interleaved": _Schedule("ScheduleInterleaved1F1B", 2, True),
    "zero-bubble": _Schedule("ScheduleInterleavedZeroBubble", 1, True),
    "zbv": _Schedule("ScheduleZBVZeroBubble", 2, True, is_v=True),
}


@dataclass(frozen=True)
class Plan:
    """A schedule for a number of ranks and micro-batches: each rank's computations in order."""

    schedule: str
    num_ranks: int
    stages_per_rank: int
    num_microbatches: int
    orders: tuple[tuple[Work, ...], ...] = ()

    @property
    def num_stages(self) -> int:
        """Of the whole model."""
        return self.num_ranks * self.stages_per_rank

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank: round-robin (0, p, 2p, ... on rank 0), or in V form."""
        p, is_v = self.num_ranks, SCHEDULES[self.schedule].is_v
        rows = range(self.stages_per_rank)
        return [row * p + (p - 1 - rank if is_v and row % 2 else rank) for row in rows]

    def rank_of(self, stage: int) -> int:
        """The rank of a stage; -1 is the last."""
        stage %= self.num_stages
        return next(r for r in range(self.num_ranks) if stage in self.stages_of(r))

    def start(self, stages: Sequence[Any], loss_fn: Any = None) -> Any:
        """torch's schedule over a rank's stages. It does not scale gradients."""
        own = SCHEDULES[self.schedule]
        make = getattr(torch_schedules, own.torch_name)
        first = list(stages) if own.has_several else stages[0]
        return make(first, self.num_microbatches, loss_fn=loss_fn, scale_grads=False)


def make_plan(
    schedule: str, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None
) -> Plan:
    """Makes a plan; raises ValueError for an unknown schedule or unsupported numbers."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}; got {schedule!r}")
    own = SCHEDULES[schedule]
    per_rank = own.default_stages if stages_per_rank is None else stages_per_rank
    plan = Plan(schedule, num_ranks, per_rank, num_microbatches)
    _check_numbers(plan)
    if own.has_several:
        orders = _orders_of_torch(plan)
    else:
        orders = [_one_stage(plan, rank) for rank in range(num_ranks)]
    return replace(plan, orders=tuple(map(tuple, orders)))


def _check_numbers(plan: Plan) -> None:
    schedule, num, num_ranks = plan.schedule, plan.num_microbatches, plan.num_ranks
    for name, value in (
        ("num_ranks", num_ranks),
        ("num_microbatches", num),
        ("num_stages_per_rank", plan.stages_per_rank),
    ):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number, 1 or more; got {value!r}")
    wanted = {"gpipe": 1, "1f1b": 1, "zbv": 2}.get(schedule, plan.stages_per_rank)
    if plan.stages_per_rank != wanted:
        raise ValueError(
            f"{schedule} needs num_stages_per_rank={wanted}, got {plan.stages_per_rank}: leave it"
            ' out, or use schedule="interleaved"'
        )
    if schedule == "1f1b" and num < num_ranks:
        raise ValueError(
            f"1f1b needs at least as many micro-batches as ranks, {num_ranks}; got "
            f'num_microbatches={num}: use more, or schedule="gpipe", which is no slower here'
        )
    if schedule in ("interleaved", "zero-bubble") and num % max(1, num // num_ranks):
        raise ValueError(
            f"{schedule} over {num_ranks} ranks needs num_microbatches to be a multiple of "
            f"{num_ranks}, got {num}"
        )


def _one_stage(plan: Plan, rank: int) -> list[Work]:
    """Warm-up forwards first; then a forward after each backward while forwards remain."""
    num = plan.num_microbatches
    num_first = num if plan.schedule == "gpipe" else min(num, plan.num_ranks - rank)
    order = [Work("F", rank, i) for i in range(num_first)]
    for i in range(num):
        order.append(Work("B", rank, i))
        if num_first + i < num:
            order.append(Work("F", rank, num_first + i))
    return order


def _orders_of_torch(plan: Plan) -> list[list[Work]]:
    """The order of torch's schedule for all ranks, taken from stages that compute nothing."""
    stages = [
        SimpleNamespace(
            stage_index=idx,
            num_stages=plan.num_stages,
            group_size=plan.num_ranks,
            group_rank=0,
            is_first=idx == 0,
            is_last=idx == plan.num_stages - 1,
            submod=nn.Identity(),
        )
        for idx in plan.stages_of(0)
    ]
    planned = plan.start(stages).pipeline_order
    return [
        [
            Work(action.computation_type.value, action.stage_index, action.microbatch_index)
            for action in planned[rank]
            if action is not None
        ]
        for rank in range(plan.num_ranks)
    ]


# ---- timelines


class Action(NamedTuple):
    """Work on a rank, in microseconds; in a simulation exact and in the given unit."""

    rank: int
    kind: Kind
    stage: int
    micro_batch: int
    begin_us: Time
    end_us: Time


@dataclass(frozen=True)
class Timeline:
    """The computations of a step on all ranks, with their times.

    Attributes:
        num_ranks: of the pipeline.
        actions: of all ranks, sorted by begin: rank, kind ("F" forward, "B" backward, "I" and "W"
            its halves, for inputs and for weights), stage, micro_batch, begin_us, end_us.
    """

    num_ranks: int
    actions: tuple[Action, ...]

    @property
    def span_us(self) -> Time:
        """From the first begin to the last end."""
        return max(a.end_us for a in self.actions) - min(a.begin_us for a in self.actions)

    def of_rank(self, rank: int) -> list[Action]:
        """A rank's actions, in order."""
        return [a for a in self.actions if a.rank == rank]

    def busy_us(self, rank: int) -> Time:
        """The computing time of a rank."""
        return sum((a.end_us - a.begin_us for a in self.of_rank(rank)), Fraction(0))

    def bubble(self) -> Time:
        """The fraction of all ranks' time in which they were idle.

        (p-1) / (m+p-1) for GPipe and 1F1B over p ranks with m micro-batches whose stages are alike,
        and (p-1) / (v m+p-1) for interleaved 1F1B with v stages per rank (Narayanan et al. 2021).
        """
        busy = sum((self.busy_us(rank) for rank in range(self.num_ranks)), Fraction(0))
        return 1 - busy / (self.num_ranks * self.span_us)

    def max_live(self) -> dict[int, int]:
        """The maximum number of micro-batches between forward and backward, by stage.

        min(m, p-i) in stage i of 1F1B, m in GPipe: memory holds the activations of these.
        """
        live: Counter[int] = Counter()
        most: Counter[int] = Counter()
        for action in self.actions:
            live[action.stage] += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            most[action.stage] = max(most[action.stage], live[action.stage])
        return dict(sorted(most.items()))

    def export_chrome_trace(self, path: str | Path) -> None:
        """Writes Chrome's trace format, for Perfetto and chrome://tracing; one row per rank."""
        begin = min(action.begin_us for action in self.actions)
        events = [
            {
                "name": f"{action.kind}{action.micro_batch}",
                "ph": "X",
                "pid": 0,
                "tid": action.rank,
                "ts": float(action.begin_us - begin),
                "dur": float(action.end_us - action.begin_us),
                "args": {"stage": action.stage},
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
    """Simulates a schedule with given stage times and free messages.

        pipeline.simulate("1f1b", num_ranks=4, num_microbatches=8).bubble()  # Fraction(3, 11)

    Args:
        schedule: as for a Pipeline.
        num_ranks: the number of pipeline ranks.
        num_microbatches: as for a Pipeline.
        num_stages_per_rank: as for a Pipeline.
        forward_us: the forward time of one micro-batch in one stage, or a list by stage; any unit.
        backward_us: the same for the whole backward.
        weight_us: the time of the weight half, if the schedule splits the backward; default: half
            of backward_us. The first stage needs no gradients of inputs and does its whole backward
            in this half.

    Returns:
        The timeline, in exact fractions.

    Raises:
        ValueError: the schedule does not support these numbers, or a list does not have one time
            per stage.
    """
    plan = make_plan(schedule, num_ranks, num_microbatches, num_stages_per_rank)
    forward = _by_stage("forward_us", forward_us, plan.num_stages)
    backward = _by_stage("backward_us", backward_us, plan.num_stages)
    halves = [time / 2 for time in backward] if weight_us is None else weight_us
    weight = _by_stage("weight_us", halves, plan.num_stages)
    weight[0] = backward[0]
    inputs = [both - own for both, own in zip(backward, weight, strict=True)]
    times = {"F": forward, "B": backward, "I": inputs, "W": weight}
    # Every action begins when its rank is free and its inputs are available.
    ends: dict[tuple[str, int, int], Fraction] = {}
    actions: list[Action] = []
    free = [Fraction(0)] * plan.num_ranks
    waiting = [list(order[::-1]) for order in plan.orders]
    while any(waiting):
        num_before = len(actions)
        for rank, order in enumerate(waiting):
            while order and all(need in ends for need in _needs(order[-1], plan.num_stages)):
                work = order.pop()
                needs = _needs(work, plan.num_stages)
                begin = max([free[rank], *(ends[need] for need in needs)])
                end = begin + times[work.kind][work.stage]
                # Both kinds of backward have one key, under which later actions find them.
                kind = "B" if work.kind == "I" else work.kind
                ends[kind, work.stage, work.micro_batch] = free[rank] = end
                actions.append(Action(rank, *work, begin, end))
        if len(actions) == num_before:
            raise RuntimeError(f"{plan.schedule} deadlocks: this is a bug in the schedule")
    return Timeline(plan.num_ranks, tuple(sorted(actions, key=lambda a: (a.begin_us, a.end_us))))


def _by_stage(name: str, times: Times, num_stages: int) -> list[Fraction]:
    if not isinstance(times, Sequence):
        return [Fraction(times)] * num_stages
    if len(times) != num_stages:
        raise ValueError(
            f"{name} must have one time per stage, got {len(times)} for {num_stages} stages"
        )
    return [Fraction(time) for time in times]


def _needs(work: Work, num_stages: int) -> list[tuple[str, int, int]]:
    stage, micro_batch = work.stage, work.micro_batch
    if work.kind == "F":
        return [("F", stage - 1, micro_batch)] if stage else []
    if work.kind == "W":
        return [("B", stage, micro_batch)]
    needs = [("F", stage, micro_batch)]
    return needs if stage == num_stages - 1 else [*needs, ("B", stage + 1, micro_batch)]
