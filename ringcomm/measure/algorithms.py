"""`ringcomm tune`: the algorithms of all_reduce in turn, and the cost model that fits their times.

    time = overhead + alpha * hand-overs + beta * bytes sent

with hand-overs and bytes of docs/design/collectives.md. Errors count relative to the time, since
times span five orders of magnitude; no coefficient is negative.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ringcomm.measure.machine import MAX_OTHERS_PERCENT, rounded
from ringcomm.measure.operations import ALL_REDUCE, RINGCOMM, Place, make_contender
from ringcomm.measure.ranks import RankError, Team, run_ranks
from ringcomm.measure.timing import measure, open_groups
from ringcomm.measure.weather import WeatherWatch
from ringcomm.options import Options
from ringcomm.tuning import Point, World

# How groups are made that run them. What is chosen by size is direct on buffers that the ranks
# share, from where on that pays.
ALGORITHMS = {
    "one_shot": Options(algorithm="one_shot"),
    "two_shot": Options(algorithm="two_shot"),
    "ring": Options(algorithm="ring"),
    "ring, rank_order": Options(algorithm="ring", deterministic="rank_order"),
    "direct": Options(algorithm="auto"),
}
# The ring is measured to show what it costs; it is never chosen in shared memory.
TUNED = ("one_shot", "two_shot", "ring")
MIB = 1 << 20
# A piece of one_shot and two_shot, see docs/design/collectives.md.
PIECE_BYTES = MIB
# Of a cross-over between two measured sizes: more digits would be noise.
CROSS_OVER_UNIT_BYTES = 256
NEVER_BYTES = 1


@dataclass(frozen=True)
class SizeTimes:
    """All algorithms at one size, in the order of ``TUNED``."""

    points: tuple[Point, ...]
    ratio: float  # two_shot's time over one_shot's: the median of neighbouring blocks' ratios
    others_percent: float  # of the machine, used by other programs

    @property
    def is_quiet(self) -> bool:
        """Whether other programs left the machine alone."""
        return self.others_percent <= MAX_OTHERS_PERCENT


def open_algorithms(team: Team, names: Sequence[str]) -> dict[str, Any]:
    """One group per algorithm, by name. Collective."""
    os.environ.pop("RINGCOMM_TUNING", None)  # it may name the file that is to be written
    options: dict[str, Any] = {name: ALGORITHMS[name] for name in names}
    return open_groups(team, dict.fromkeys(names, RINGCOMM), options)


def _measure_size(
    team: Team,
    watch: WeatherWatch,
    groups: dict[str, Any],
    num_bytes: int,
    seconds: float,
    max_repeats: int,
) -> SizeTimes | None:
    """Verifies, times and verifies again; the calmest times on rank 0. Collective."""
    num_elems = ALL_REDUCE.num_elems(num_bytes, torch.float32, team.world_size)
    place = Place(team.rank, team.world_size, num_elems, torch.float32, torch.device("cpu"))
    buffers = ALL_REDUCE.setup(place)
    contenders = {name: make_contender(ALL_REDUCE, buffers, g) for name, g in groups.items()}

    def check() -> None:
        wrong = {
            name: sum(team.share(ALL_REDUCE.verify(contender.call, buffers, team)))
            for name, contender in contenders.items()
        }
        buffers.clear()
        if any(wrong.values()):
            text = f"wrong elements in all_reduce of {num_bytes} bytes, by algorithm: {wrong}"
            raise RankError(text)

    check()
    timings, weather = watch.calmest(partial(measure, team, contenders, seconds), max_repeats)
    check()
    if timings is None:
        return None
    points = []
    for name, timing in timings.items():
        us = timing.summary_us()
        times = rounded({key: us[key] for key in ("p10_us", "p50_us", "p90_us")})
        points.append(Point(4 * num_elems, name, **times, num_calls=timing.num_calls()))
    ratio = timings["two_shot"].ratio_over(timings["one_shot"])["p50"]
    return SizeTimes(tuple(points), ratio, weather.others_percent)


def measure_algorithms(
    world_size: int, sizes: list[int], seconds: float, max_repeats: int
) -> list[SizeTimes]:
    """Every size in ascending order, ``seconds`` each, again while it is disturbed.

    Raises:
        RankError: a rank failed, or a result was wrong.
    """
    found: list[SizeTimes] = []

    def run_rank(team: Team) -> None:
        groups, watch = open_algorithms(team, TUNED), WeatherWatch(team)
        for num_bytes in sorted(sizes):
            times = _measure_size(team, watch, groups, num_bytes, seconds, max_repeats)
            if times is not None:
                team.report(times)
        dist.destroy_process_group()

    run_ranks(world_size, run_rank, found.append)
    return found


def world_of(world_size: int, times: list[SizeTimes]) -> World:
    """What a tuning file holds of one number of ranks. Raises ValueError for too few sizes."""
    points = [point for size in times for point in size.points]
    cost = fit_cost([point for point in points if point.algorithm != "ring"], world_size)
    return World(
        world_size=world_size,
        quiet=all(size.is_quiet for size in times),
        one_shot_max_bytes=cross_over_bytes({t.points[0].bytes: t.ratio for t in times}),
        points=tuple(points),
        **rounded(cost),
    )


def terms(algorithm: str, num_bytes: int, world_size: int) -> tuple[float, float]:
    """Hand-overs, and MiB that one rank sends. Raises ValueError for an unknown algorithm."""
    num_pieces = max(1, math.ceil(num_bytes / PIECE_BYTES))
    others = world_size - 1
    if algorithm == "one_shot":
        return num_pieces, others * num_bytes / MIB
    if algorithm == "two_shot":
        return 2 * num_pieces, 2 * others / world_size * num_bytes / MIB
    raise ValueError(f"no model of {algorithm!r}: there are one_shot and two_shot")


def fit_cost(points: Sequence[Point], world_size: int) -> dict[str, float]:
    """The model with the least sum of squared relative errors of the medians.

    Of the models that leave out some coefficients, that with the least error among those without a
    negative one: with three coefficients that is the non-negative least-squares solution.

    Returns:
        ``alpha_us`` per hand-over, ``beta_us_per_mib`` sent, ``overhead_us`` per call, and
        ``worst_fit``, the largest factor between a measured time and the model's, at least 1.

    Raises:
        ValueError: there are fewer than three measurements.
    """
    if len(points) < 3:
        raise ValueError(f"three measurements at least make a model, got {len(points)}")
    rows = [(*terms(point.algorithm, point.bytes, world_size), 1.0) for point in points]
    times = torch.tensor([point.p50_us for point in points], dtype=torch.float64)
    relative = torch.tensor(rows, dtype=torch.float64) / times.unsqueeze(1)
    ones = torch.ones_like(times)
    best = torch.zeros(3, dtype=torch.float64)
    least = float(len(points))  # the error of the model that is zero everywhere
    for count in (1, 2, 3):
        for kept in itertools.combinations(range(3), count):
            found = torch.linalg.lstsq(relative[:, kept], ones.unsqueeze(1), driver="gelsd")
            solution = torch.zeros_like(best)
            solution[list(kept)] = found.solution.squeeze(1)
            error = float((relative @ solution - ones).square().sum())
            if error < least and bool((solution >= 0).all()):
                best, least = solution, error
    factors = relative @ best
    worst = float(torch.maximum(factors, 1 / factors.clamp_min(1e-9)).max())
    names = ("alpha_us", "beta_us_per_mib", "overhead_us", "worst_fit")
    return dict(zip(names, (*best.tolist(), worst), strict=True))


def cross_over_bytes(ratios: dict[int, float]) -> int:
    """The largest size for which one_shot should be chosen.

    Where noise makes the ratio cross 1 several times, that split of the sizes counts with which the
    chosen times are least in all, as factors; between its two sizes the ratio is interpolated over
    the sizes' logarithms.

    Args:
        ratios: the time of two_shot over that of one_shot, by bytes; at least one.

    Returns:
        ``NEVER_BYTES`` where two_shot wins from the smallest size on; the largest size where
        one_shot wins everywhere, since nobody knows about more.
    """
    sizes = sorted(ratios)
    gains = [math.log(ratios[size]) for size in sizes]  # of one_shot
    totals = list(itertools.accumulate(gains, initial=0.0))
    num_won = max(range(len(totals)), key=lambda count: totals[count])
    if num_won == 0:
        return NEVER_BYTES
    if num_won == len(sizes):
        return sizes[-1]
    # The split is at its best there: the last of those won gains, the first of the others loses.
    gain, loss = gains[num_won - 1], -gains[num_won]
    share = gain / (gain + loss) if gain + loss > 0 else 0.0
    low, high = sizes[num_won - 1], sizes[num_won]
    between = low * (high / low) ** share
    return max(low, int(between) // CROSS_OVER_UNIT_BYTES * CROSS_OVER_UNIT_BYTES)
