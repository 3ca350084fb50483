"""`ringcomm tune`: measures the algorithms of all_reduce in turn, and fits a cost model.

The model is ringcomm.cost_model, whose costs are the same for all numbers of ranks and all
collectives. Errors are relative to the time, because times span five orders of magnitude. No cost
is negative.
"""

import itertools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from _ringcomm.status import EXIT_FAILED, EXIT_OK, RankError
from _ringcomm.values import MAX_OTHERS_PERCENT
from ringcomm import __version__, tuning
from ringcomm.cost_model import FITTED, NOT_FITTED, Costs, Machine, all_reduce_algorithm
from ringcomm.measure import timing
from ringcomm.measure.machine import identity, num_nodes, rounded, utc_now
from ringcomm.measure.ranks import Team, run_ranks
from ringcomm.options import Options
from ringcomm.screen import Progress, byte_count, columns, factor, in_seconds
from ringcomm.tuning import Point, World

FloatArray: TypeAlias = npt.NDArray[np.float64]
# The ring is measured to show what it costs; it is never chosen in shared memory.
TUNED: tuple[Any, ...] = ("one_shot", "two_shot", "ring")
CACHES = tuple(num << power for power in range(19, 25) for num in (2, 3))  # 1 to 48 MiB
# The weight of the defaults in the fit: it decides where the measurements do not.
DEFAULT_WEIGHT = 1e-6
CROSS_OVER_UNIT_BYTES = 256  # between two measured sizes: more digits would be noise
NEVER_BYTES = 1
MAX_WORST_FIT = 10.0  # of a cost model that is worth a line


@dataclass(frozen=True)
class SizeTimes:
    """All algorithms at one size, in the order of ``TUNED``."""

    points: tuple[Point, ...]
    ratio: float  # two_shot's time over one_shot's: the median of neighbouring blocks' ratios
    others_percent: float  # share of the machine that other programs used


def _measure_size(
    team: Team, groups: dict[str, Any], num_bytes: int, seconds: float, max_repeats: int
) -> SizeTimes | None:
    """Verifies, times (again if disturbed), verifies; returns on rank 0. Collective."""
    buffer = torch.zeros(max(1, num_bytes // 4), dtype=torch.float32)
    calls = {name: partial(dist.all_reduce, buffer, group=group) for name, group in groups.items()}
    attempts = []
    timing.check_sums(team, groups, buffer)
    for _ in range(1 + max_repeats):
        attempts.append(timing.measure_beside_others(team, groups, calls, seconds))
        if attempts[-1][0] <= MAX_OTHERS_PERCENT:
            break
    timing.check_sums(team, groups, buffer)
    percent, timings = min(attempts, key=itemgetter(0))
    if timings is None:
        return None
    points = []
    for name, found in timings.items():
        times = rounded(found.summary_us())
        p10_us, p50_us, p90_us = (times[key] for key in ("p10_us", "p50_us", "p90_us"))
        points.append(Point(buffer.nbytes, name, p10_us, p50_us, p90_us, found.num_calls()))
    ratio = timings["two_shot"].ratio_over(timings["one_shot"])["p50"]
    return SizeTimes(tuple(points), ratio, percent)


def measure_algorithms(
    world_size: int,
    sizes: list[int],
    seconds: float,
    max_repeats: int,
    on_size: Callable[[], None] = lambda: None,
) -> list[SizeTimes]:
    """Measures every size in ascending order for ``seconds`` each; repeats a disturbed measurement.

    ``on_size`` is called in this process when a size is done. Raises RankError if a rank failed, or
    a result was wrong.
    """
    found: list[SizeTimes] = []

    def run_rank(team: Team) -> None:
        for option in fields(Options):  # defaults are measured, and not by the file to be written
            os.environ.pop(f"RINGCOMM_{option.name.upper()}", None)
        timing.open_default_group(team, "ringcomm")
        groups = {
            name: dist.new_group(timeout=timing.GROUP_TIMEOUT, pg_options=Options(algorithm=name))
            for name in TUNED
        }
        for num_bytes in sorted(sizes):
            times = _measure_size(team, groups, num_bytes, seconds, max_repeats)
            if times is not None:
                team.report(times)
        dist.destroy_process_group()

    def keep(times: SizeTimes) -> None:
        found.append(times)
        on_size()

    run_ranks(world_size, run_rank, keep)
    return found


def world_of(world_size: int, times: list[SizeTimes]) -> World:
    """The entry of a tuning file for one number of ranks."""
    return World(
        world_size=world_size,
        quiet=all(size.others_percent <= MAX_OTHERS_PERCENT for size in times),
        one_shot_max_bytes=cross_over_bytes({t.points[0].bytes: t.ratio for t in times}),
        points=tuple(point for size in times for point in size.points),
    )


def fit_costs(worlds: Sequence[World], cores: int, nodes: int = 1) -> tuple[Costs, float]:
    """The costs with the least squares of relative errors, and their largest error, as a factor.

    Of each size and number of ranks, the algorithm counts that runs with the tuned limit. The model
    is linear in FITTED: the time with one of them at 1 and all others at 0 is that one's column.
    The size of the cache is the best of some. A cost that no measurement has, such as that of
    shared cores where no ranks share one, keeps its default; of costs that the measurements cannot
    tell apart, the ratio of the defaults stays. Raises ValueError if there is no such time.
    """
    points = [
        (w.world_size, p)
        for w in worlds
        for p in w.points
        if p.algorithm == all_reduce_algorithm(p.bytes, w.world_size, w.one_shot_max_bytes)
    ]
    if not points:
        raise ValueError("a cost model needs the time of an algorithm that runs")
    zeros: dict[str, Any] = dict.fromkeys(FITTED, 0.0)
    nothing = Costs(**zeros, node_gb_per_s=math.inf, between_gb_per_s=math.inf)
    times = np.array([point.p50_us for _, point in points])

    def column(costs: Costs) -> FloatArray:
        machine = Machine(cores, nodes, costs)
        found = [machine.microseconds(p.algorithm, p.bytes, ranks) for ranks, p in points]
        return np.array(found) / times

    ones: dict[str, dict[str, Any]] = {name: {name: 1.0} for name in FITTED}
    by_cost = {name: column(replace(nothing, **one)) for name, one in ones.items()}
    best: tuple[float, int, FloatArray, FloatArray] | None = None
    for cache_bytes in CACHES:  # on which the other costs do not depend
        far = replace(nothing, memory_us=1.0, cache_bytes=cache_bytes)
        by_cost["memory_us"] = column(far)
        relative = np.stack([*by_cost.values()], 1)
        solution = _least_squares(relative)
        error = float(np.square(relative @ solution - 1).sum())
        if best is None or error < best[0]:
            best = (error, cache_bytes, relative, solution)
    assert best is not None
    _, cache_bytes, relative, solution = best
    found = dict(zip(FITTED, map(float, solution), strict=True))
    missing = [name for name, column in zip(FITTED, relative.T, strict=True) if not column.any()]
    if "memory_us" in missing:
        missing.append("cache_bytes")
    measured = {name: value for name, value in found.items() if name not in missing}
    if "cache_bytes" not in missing:
        measured["cache_bytes"] = cache_bytes
    factors = relative @ solution
    worst = float(np.maximum(factors, 1 / np.maximum(factors, 1e-9)).max())
    return Costs(**rounded(measured), defaults=(*missing, *NOT_FITTED)), worst


def _least_squares(relative: FloatArray) -> FloatArray:
    """Non-negative costs whose sum of columns is nearest to 1.

    Of the models that leave out some columns, the best one without a negative coefficient is the
    non-negative least-squares solution.
    """
    defaults = np.array([getattr(Costs(), name) for name in FITTED])
    scaled = relative * defaults
    # The normal equations, with what pulls each cost to its default.
    square = scaled.T @ scaled + DEFAULT_WEIGHT * np.eye(len(FITTED))
    right = scaled.sum(0) + DEFAULT_WEIGHT
    best, least = np.zeros(len(FITTED)), 0.0
    used = np.flatnonzero(relative.any(0))
    for count in range(1, len(used) + 1):
        for kept in map(list, itertools.combinations(used, count)):
            found = np.linalg.solve(square[np.ix_(kept, kept)], right[kept])
            error = -float(right[kept] @ found)  # but for what all models have
            if error < least and (found >= 0).all():
                best, least = np.zeros(len(FITTED)), error
                best[kept] = found
    return best * defaults


def cross_over_bytes(ratios: dict[int, float]) -> int:
    """The largest size for which one_shot should be chosen.

    ``ratios`` are times of two_shot over one_shot, by bytes. If noise makes them cross 1 several
    times, the split with the smallest product of chosen times is used. Between its two sizes the
    ratio is interpolated over their logarithms. ``NEVER_BYTES`` if two_shot always wins, the
    largest size if one_shot does, since no larger one was measured.
    """
    sizes = sorted(ratios)
    gains = [math.log(ratios[size]) for size in sizes]  # by one_shot
    totals = list(itertools.accumulate(gains, initial=0.0))
    num_won = max(range(len(totals)), key=totals.__getitem__)
    if num_won == 0:
        return NEVER_BYTES
    if num_won == len(sizes):
        return sizes[-1]
    # The split is optimal there: the last size below it gains, the first above it loses.
    gain, loss = gains[num_won - 1], -gains[num_won]
    share = gain / (gain + loss) if gain + loss > 0 else 0.0
    low, high = sizes[num_won - 1], sizes[num_won]
    between = low * (high / low) ** share
    return max(low, int(between) // CROSS_OVER_UNIT_BYTES * CROSS_OVER_UNIT_BYTES)


def tune(
    world_sizes: list[int],
    sizes: list[int],
    seconds: float,
    repeats: int,
    path: Path,
    *,
    is_forced: bool = False,
) -> int:
    """Tunes for each number of ranks, and returns the exit status.

    After Ctrl-C, or if a rank fails, the numbers of ranks that were measured are in
    PATH.interrupted. Where other programs disturbed it, nothing is written unless `is_forced`.
    """
    worlds: list[World] = []

    def result() -> tuning.Tuning:
        nodes, machine = num_nodes(), identity()
        costs, worst_fit = fit_costs(worlds, machine["cores"], nodes)
        versions = (torch.__version__, __version__, nodes, costs, rounded(worst_fit))
        return tuning.Tuning(utc_now().isoformat(), machine, *versions, tuple(worlds))

    sizes, world_sizes = sorted(set(sizes)), sorted(set(world_sizes))
    progress = Progress([f"{byte_count(size)} on {n} ranks" for n in world_sizes for size in sizes])
    try:
        for world_size in world_sizes:
            progress.show()
            times = measure_algorithms(world_size, sizes, seconds, repeats, progress.step)
            worlds.append(world_of(world_size, times))
            progress.clear()
            print(f"all_reduce on {world_size} ranks, float32: medians of the slowest rank")
            print(_table(worlds[-1], times), flush=True)
    except (KeyboardInterrupt, RankError):
        progress.clear()
        if worlds:  # not over a whole file of an earlier run
            partial = path.with_name(f"{path.name}.interrupted")
            tuning.save(result(), partial)
            print(f"interrupted: {partial} has only the numbers of ranks above")
        raise
    if not all(world.quiet for world in worlds):
        print("other programs disturbed the measurement: tune again on an idle machine")
        if not is_forced:
            print(f"not written: {path} (--force writes it)")
            return EXIT_FAILED
    found = result()
    tuning.save(found, path)
    print(_model_text(found))
    print(f"written: {path}")
    return EXIT_OK


def _model_text(found: tuning.Tuning) -> str:
    if found.worst_fit > MAX_WORST_FIT or not all(world.quiet for world in found.worlds):
        return "No cost model fits these times."
    costs = [
        f"{name} {getattr(found.costs, name):.3g}"
        for name in (*FITTED, "cache_bytes")
        if name not in found.costs.defaults
    ]
    return (
        f"Cost model: {', '.join(costs)}; its largest error is a factor of"
        f" {factor(found.worst_fit)}. Not measured: {', '.join(found.costs.defaults)}."
    )


def _table(world: World, times: list[SizeTimes]) -> str:
    chosen = f"one_shot up to {byte_count(world.one_shot_max_bytes)}"
    if world.one_shot_max_bytes == 1:
        chosen = "one_shot never wins"
    names = [point.algorithm for point in times[0].points]
    rows = [["bytes", *names, "two_shot / one_shot", "other programs"]]
    for size in times:
        medians = [in_seconds(point.p50_us / 1e6) for point in size.points]
        ratio, others = factor(size.ratio), f"{size.others_percent:.0f} %"
        rows.append([byte_count(size.points[0].bytes), *medians, ratio, others])
    return (
        f"{columns(rows, '')}\n"
        "other programs: their share of this machine, which should be at most"
        f" {MAX_OTHERS_PERCENT:.0f} %\n"
        f"{chosen}."
    )
