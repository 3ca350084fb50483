"""Schedules of pipelines without ranks: the order of each rank's computations, simulated times."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from types import SimpleNamespace
from typing import NamedTuple

from torch import nn

from ringcomm.parallel.pipeline.schedules import Action, Kind, Plan, Time, Timeline, make_plan

Times = Time | Sequence[Time]


class Work(NamedTuple):
    """One unit of computation: one micro-batch in one stage.

    F is the forward, B the backward, I and W its halves: the gradients of the inputs, which the
    previous stage needs, and of the weights.
    """

    kind: Kind
    stage: int
    micro_batch: int


def orders_of(plan: Plan) -> list[list[Work]]:
    """Each rank's computations in order."""
    if plan.schedule in ("gpipe", "1f1b"):
        return [_one_stage(plan, rank) for rank in range(plan.num_ranks)]
    return _orders_of_torch(plan)


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

        simulate("1f1b", num_ranks=4, num_microbatches=8).bubble()  # Fraction(3, 11)

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
    waiting = [order[::-1] for order in orders_of(plan)]
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
