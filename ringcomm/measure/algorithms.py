"""`ringcomm tune`: measures the algorithms of all_reduce in turn, and fits a cost model.

    time = overhead + alpha * transfers + beta * bytes sent

with transfers and bytes as in docs/design/collectives.md. Errors are relative to the time, because
times span five orders of magnitude. No coefficient is negative.
"""

import itertools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from _ringcomm_cli import EXIT_FAILED, EXIT_OK
from ringcomm import __version__, tuning
from ringcomm.measure import timing
from ringcomm.measure.machine import MAX_OTHERS_PERCENT, identity, rounded, utc_now
from ringcomm.measure.ranks import Team, run_ranks
from ringcomm.options import Options
from ringcomm.screen import Progress, byte_count, columns, factor, in_seconds
from ringcomm.tuning import Point, World

# The ring is measured to show what it costs; it is never chosen in shared memory.
TUNED: tuple[Any, ...] = ("one_shot", "two_shot", "ring")
MIB = 1 << 20
PIECE_BYTES = MIB  # of one_shot and two_shot, see docs/design/collectives.md
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
        os.environ.pop("RINGCOMM_TUNING", None)  # it may name the file that will be written
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
    """The entry of a tuning file for one number of ranks. Raises ValueError for too few sizes."""
    points = [point for size in times for point in size.points]
    cost = fit_cost([point for point in points if point.algorithm != "ring"], world_size)
    return World(
        world_size=world_size,
        quiet=all(size.others_percent <= MAX_OTHERS_PERCENT for size in times),
        one_shot_max_bytes=cross_over_bytes({t.points[0].bytes: t.ratio for t in times}),
        points=tuple(points),
        **rounded(cost),
    )


def terms(algorithm: str, num_bytes: int, world_size: int) -> tuple[float, float]:
    """Transfers, and MiB that one rank sends. Raises ValueError for an unknown algorithm."""
    num_pieces = max(1, math.ceil(num_bytes / PIECE_BYTES))
    others = world_size - 1
    if algorithm == "one_shot":
        return num_pieces, others * num_bytes / MIB
    if algorithm == "two_shot":
        return 2 * num_pieces, 2 * others / world_size * num_bytes / MIB
    raise ValueError(f"the algorithm must be one_shot or two_shot, got {algorithm!r}")


def fit_cost(points: Sequence[Point], world_size: int) -> dict[str, float]:
    """The coefficients of a World: least squares of relative errors, none of them negative.

    Of the models that leave out some coefficients, the best one without a negative coefficient is
    the non-negative least-squares solution. Raises ValueError for fewer than three measurements.
    """
    if len(points) < 3:
        raise ValueError(f"a cost model needs at least three measurements, got {len(points)}")
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

    After Ctrl-C the numbers of ranks that were measured are in PATH.interrupted. Where other
    programs disturbed it, nothing is written unless `is_forced`.
    """
    worlds: list[World] = []

    def save(file: Path) -> None:
        date, versions = utc_now().isoformat(), (torch.__version__, __version__)
        tuning.save(tuning.Tuning(date, identity(), *versions, tuple(worlds)), file)

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
    except KeyboardInterrupt:
        progress.clear()
        if worlds:  # not over a whole file of an earlier run
            partial = path.with_name(f"{path.name}.interrupted")
            save(partial)
            print(f"interrupted: {partial} has only the numbers of ranks above")
        raise
    if not all(world.quiet for world in worlds):
        print("other programs disturbed the measurement: tune again on an idle machine")
        if not is_forced:
            print(f"not written: {path} (--force writes it)")
            return EXIT_FAILED
    save(path)
    print(f"written: {path}")
    return EXIT_OK


def _model_text(world: World) -> str:
    if not world.quiet or world.worst_fit > MAX_WORST_FIT:
        return "No cost model fits: other programs disturbed the times."
    return (
        f"Cost model: {world.alpha_us:.3g} µs per transfer (alpha),"
        f" {world.beta_us_per_mib:.3g} µs per MiB (beta), {world.overhead_us:.3g} µs per call;"
        f" its largest error is a factor of {factor(world.worst_fit)}."
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
        f"{chosen}. {_model_text(world)}"
    )
