"""What a step of a schedule would be if it did nothing but compute: its bound, as a fraction."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from ringcomm.parallel.pipeline.schedules import Plan, Work, make_plan
from ringcomm.parallel.pipeline.timeline import Action, Timeline

__all__ = ["simulate"]

Times = float | Fraction | Sequence[float | Fraction]


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
