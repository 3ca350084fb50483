#!/usr/bin/env python3
"""Measures the bubbles and steps of pipelines, compared with simulations of their schedules.

    python benchmarks/pipeline.py --worlds 2,4 --unit-ms 40 --seconds 2

Stages sleep instead of computing, for a known time: more ranks than cores then disturb each other
as little as on machines of their own. All of a rank's stages together take one unit for the forward
of a micro-batch, and one for each half of its backward. The prediction is schedule_simulation's:
stages that take just so long, and messages that cost nothing. With --stages compute they multiply
matrices instead, and the prediction is that for the times that stages took; as many ranks as cores.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import harness  # before torch: it sets the number of threads
import torch
import torch.distributed as dist
from harness import Bench, Options, flag
from schedule_simulation import orders_of, simulate
from torch import Tensor, nn

from _ringcomm.values import several, whole, words
from ringcomm.measure.ranks import Team
from ringcomm.measure.timing import open_default_group, percentiles
from ringcomm.parallel import pipeline

MIN_STEPS = 5
ROWS_PER_MICROBATCH, WIDTH, LAYERS_PER_RANK = 64, 512, 24


class Case(NamedTuple):
    """A schedule, with all that its step depends on."""

    schedule: str
    num_microbatches: int
    stages_per_rank: int


class SleepInputs(torch.autograd.Function):
    """Sleeps in the half of the backward for inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grads[0], None


class Sleeper(nn.Module):
    """A stage: forward and both halves of the backward take equally long."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))
        self._seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self._seconds)
        # The weight's own branch is left for the half that is for weights.
        shifted = x + SleepInputs.apply(self.weight, self._seconds)
        slept: Tensor = SleepInputs.apply(shifted, self._seconds)
        return slept


def computer(num_layers: int) -> nn.Sequential:
    """A stage that computes, some milliseconds a layer."""
    pairs = [(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_layers)]
    return nn.Sequential(*(layer for pair in pairs for layer in pair))


def cases(options: Options, world_size: int) -> Iterator[Case]:
    """All of a number of ranks."""
    for factor in options.factors:
        for schedule, own in pipeline.SCHEDULES.items():
            if schedule in options.schedules:
                yield Case(schedule, factor * world_size, own.default_stages)


def simulated(case: Case, world_size: int, **times: Any) -> pipeline.Timeline:
    """The simulated step, with these times of stages."""
    num_stages = case.stages_per_rank
    shape = case.schedule, world_size, case.num_microbatches
    return simulate(*shape, num_stages_per_rank=num_stages, **times)


def as_measured(
    case: Case, world_size: int, timelines: list[pipeline.Timeline]
) -> pipeline.Timeline:
    """The simulated step with the measured times of stages."""
    found: dict[tuple[str, int], list[float]] = {}
    for timeline in timelines:
        for action in timeline.actions:
            times = found.setdefault((action.kind, action.stage), [])
            times.append(float(action.end_us - action.begin_us))
    usual = {key: median(times) for key, times in found.items()}
    stages = range(world_size * case.stages_per_rank)
    weights = [usual.get(("W", stage), 0.0) for stage in stages]
    whole = [usual.get(("B", stage), usual.get(("I", stage), 0.0)) for stage in stages]
    return simulated(
        case,
        world_size,
        forward_us=[usual["F", stage] for stage in stages],
        backward_us=[both + own for both, own in zip(whole, weights, strict=True)],
        weight_us=weights,
    )


def run_case(
    case: Case, team: Team, options: Options
) -> tuple[list[float], list[pipeline.Timeline], bool]:
    """Step times in microseconds and timelines; whether each matched the plan."""
    num_blocks = team.world_size * case.stages_per_rank
    seconds = options.unit_ms / 1e3 / case.stages_per_rank
    torch.manual_seed(0)
    blocks: list[nn.Module] = [
        Sleeper(seconds)
        if options.stages == "sleep"
        else computer(LAYERS_PER_RANK // case.stages_per_rank)
        for _ in range(num_blocks)
    ]
    pipe = pipeline.Pipeline(
        blocks,
        lambda y, _: y.mean(),
        case.schedule,
        case.num_microbatches,
        costs=[1] * num_blocks,
        count_items=len,
    )
    x = torch.ones(case.num_microbatches * ROWS_PER_MICROBATCH, WIDTH)
    pipe.step(x, x)
    times_us: list[float] = []
    timelines = []
    is_planned = True
    limit = time.monotonic() + options.seconds
    while team.share(len(times_us) < MIN_STEPS or time.monotonic() < limit)[0]:
        dist.barrier()
        begin = time.perf_counter()
        pipe.step(x, x, record=True)
        times_us.append(1e6 * (time.perf_counter() - begin))
        timelines.append(pipe.timeline())
        for rank, planned in enumerate(orders_of(pipe.plan)):
            order = timelines[-1].of_rank(rank)
            is_planned &= [action[1:4] for action in order] == [tuple(work) for work in planned]
    return times_us, timelines, is_planned


def run_rank(bench: Bench, options: Options) -> None:
    """Rank 0 reports all cases."""
    team = bench.team
    open_default_group(team, "ringcomm")
    for case in cases(options, team.world_size):
        (times_us, timelines, is_planned), weather = bench.watch.calmest(
            partial(run_case, case, team, options), options.repeats
        )
        if team.rank > 0:
            continue
        sleeps = options.stages == "sleep"
        stage_us = 1e3 * options.unit_ms / case.stages_per_rank
        equal = {"forward_us": stage_us, "backward_us": 2 * stage_us}
        bound = (
            simulated(case, team.world_size, **equal)
            if sleeps
            else as_measured(case, team.world_size, timelines)
        )
        bubbles = [float(timeline.bubble()) for timeline in timelines]
        record = {
            **case._asdict(),
            "stages": options.stages,
            "unit_us": 1e3 * options.unit_ms if sleeps else None,
            "bubble": {name: round(v, 4) for name, v in percentiles(bubbles, "share").items()},
            "predicted_bubble": float(bound.bubble()),
            **percentiles(times_us, "us"),
            "bound_us": float(bound.span_us),
            "over_bound": median(times_us) / float(bound.span_us),
            "num_steps": len(times_us),
            "verified": is_planned,
            **weather.record(),
        }
        team.report([record])


def check(options: Options) -> None:
    """Raises ValueError for invalid options."""
    if options.unit_ms <= 0:
        raise ValueError("--unit-ms must be above 0")


PROGRAM = harness.Program(
    doc=__doc__,
    kind="pipeline",
    rank=run_rank,
    seconds=2.0,
    per="schedule and size, five steps at least",
    flags=[
        flag("--stages", str, "sleep", "what they do", choices=("sleep", "compute")),
        flag("--worlds", several(whole(1)), "2,4", "numbers of ranks"),
        flag("--factors", several(whole(1)), "1,2,4", "micro-batches per rank"),
        flag("--schedules", words, ",".join(pipeline.SCHEDULES), known=pipeline.SCHEDULES),
        flag("--unit-ms", float, 40.0, "of a forward, and of half a backward"),
    ],
    check=check,
)

if __name__ == "__main__":
    PROGRAM.run_script()
