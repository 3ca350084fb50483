"""Times the algorithms of all_reduce against each other, block by block in one set of ranks."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ringcomm.bench.fit import Median, cross_over_bytes, fit_cost
from ringcomm.bench.interleave import Timings, make_contender, measure, open_groups
from ringcomm.bench.machine import MAX_OTHERS_PERCENT, OthersWatch
from ringcomm.bench.operations import OPERATIONS, Place
from ringcomm.bench.point import RINGCOMM, Bench, count_wrong, make_bench
from ringcomm.bench.ranks import RankError, Team, run_ranks
from ringcomm.bench.records import rounded
from ringcomm.options import AlgorithmName, Options
from ringcomm.tuning import Point, World

# The ring is measured to show what it costs; it is never chosen in shared memory.
ALGORITHMS: tuple[AlgorithmName, ...] = ("one_shot", "two_shot", "ring")


@dataclass(frozen=True)
class SizeTimes:
    """All algorithms at one size.

    Attributes:
        points: in the order of ``ALGORITHMS``.
        ratio: two_shot's time over one_shot's: the median of neighbouring blocks' ratios.
        others_percent: how much of the machine other programs used meanwhile.
    """

    points: tuple[Point, ...]
    ratio: float
    others_percent: float

    @property
    def is_quiet(self) -> bool:
        """Whether other programs left the machine alone."""
        return self.others_percent <= MAX_OTHERS_PERCENT


def _point(label: str, num_bytes: int, timings: Timings) -> Point:
    us = timings.summary_us()
    times: dict[str, Any] = {name: us[name] for name in ("p10_us", "p50_us", "p90_us")}
    return Point(num_bytes, label, **rounded(times), num_calls=timings.num_calls())


def _time_size(bench: Bench, num_bytes: int, seconds: float) -> SizeTimes | None:
    """One size on this rank; the times on rank 0. Raises RankError where a result is wrong."""
    operation = OPERATIONS["all_reduce"]
    num_elems = operation.num_elems(num_bytes, torch.float32, bench.team.world_size)
    place = Place(
        bench.team.rank, bench.team.world_size, num_elems, torch.float32, torch.device("cpu")
    )
    buffers = operation.setup(place)
    wrong = {
        label: count for label, count in count_wrong(bench, operation, buffers).items() if count
    }
    if wrong:
        raise RankError(f"wrong elements in all_reduce of {num_bytes} bytes, by algorithm: {wrong}")
    contenders = {
        label: make_contender(operation, buffers, group) for label, group in bench.groups.items()
    }
    watch = OthersWatch(bench.own_pids) if bench.team.rank == 0 else None
    timings = measure(bench.team, contenders, seconds)
    if timings is None or watch is None:
        return None
    points = tuple(_point(label, buffers.output.nbytes, timings[label]) for label in ALGORITHMS)
    ratio = timings["two_shot"].ratio_over(timings["one_shot"])["p50"]
    return SizeTimes(points, ratio, watch.percent())


def _least_disturbed(
    bench: Bench, num_bytes: int, seconds: float, max_repeats: int
) -> SizeTimes | None:
    """One size again while other programs disturb it; on rank 0 its quietest times. Collective."""
    best: SizeTimes | None = None
    for _ in range(max_repeats + 1):
        times = _time_size(bench, num_bytes, seconds)
        if times is not None and (best is None or times.others_percent < best.others_percent):
            best = times
        if bench.team.agree(best is not None and best.is_quiet):
            break
    return best


def _run_rank(team: Team, sizes: list[int], seconds: float, max_repeats: int) -> None:
    os.environ.pop("RINGCOMM_TUNING", None)  # it may name the file that is to be written
    options: dict[str, Any] = {name: Options(algorithm=name) for name in ALGORITHMS}
    groups = open_groups(team, dict.fromkeys(ALGORITHMS, RINGCOMM), options)
    bench = make_bench(team, groups, torch.device("cpu"))
    for num_bytes in sizes:
        times = _least_disturbed(bench, num_bytes, seconds, max_repeats)
        if times is not None:
            team.report(times)
    dist.destroy_process_group()


def measure_algorithms(
    world_size: int, sizes: list[int], seconds: float, max_repeats: int
) -> list[SizeTimes]:
    """Every size in ascending order, ``seconds`` each, again while it is disturbed.

    Raises:
        RankError: a rank failed, or a result was wrong.
    """
    found: list[SizeTimes] = []
    run_ranks(
        world_size,
        lambda team: _run_rank(team, sorted(sizes), seconds, max_repeats),
        found.append,
    )
    return found


def world_of(world_size: int, times: list[SizeTimes]) -> World:
    """What a tuning file holds of one number of ranks. Raises ValueError for too few sizes."""
    points = [point for size in times for point in size.points]
    medians = [Median(p.algorithm, p.bytes, p.p50_us) for p in points if p.algorithm != "ring"]
    cost = dataclasses.asdict(fit_cost(medians, world_size))
    return World(
        world_size=world_size,
        quiet=all(size.is_quiet for size in times),
        one_shot_max_bytes=cross_over_bytes({t.points[0].bytes: t.ratio for t in times}),
        points=tuple(points),
        **rounded(cost),
    )
