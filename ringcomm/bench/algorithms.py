"""Times the algorithms of all_reduce against each other, block by block in one set of ranks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ringcomm.bench.fit import Median, cross_over_bytes, fit_cost
from ringcomm.bench.interleave import open_groups
from ringcomm.bench.machine import MAX_OTHERS_PERCENT
from ringcomm.bench.point import RINGCOMM, Bench, make_bench, measure_point
from ringcomm.bench.ranks import RankError, Team, run_ranks
from ringcomm.bench.records import rounded
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


@dataclass(frozen=True)
class SizeTimes:
    """All algorithms at one size.

    Attributes:
        points: in the order of ``TUNED``.
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


def open_bench(team: Team, names: Sequence[str]) -> Bench:
    """One group per algorithm, on ordinary CPU tensors. Collective."""
    os.environ.pop("RINGCOMM_TUNING", None)  # it may name the file that is to be written
    pg_options: dict[str, Any] = {name: ALGORITHMS[name] for name in names}
    groups = open_groups(team, dict.fromkeys(names, RINGCOMM), pg_options)
    return make_bench(team, groups, torch.device("cpu"))


def _size_times(records: list[dict[str, Any]]) -> SizeTimes:
    """Raises RankError where a result is wrong."""
    wrong = {r["backend"]: r["wrong_elems"] for r in records if not r["verified"]}
    if wrong:
        num_bytes = records[0]["bytes"]
        raise RankError(f"wrong elements in all_reduce of {num_bytes} bytes, by algorithm: {wrong}")
    names = ("bytes", "p10_us", "p50_us", "p90_us", "num_calls")
    points = [
        Point(algorithm=r["backend"], **rounded({name: r[name] for name in names})) for r in records
    ]
    (ratio,) = (r["ratio"]["p50"] for r in records if r["backend"] == "two_shot")
    return SizeTimes(tuple(points), ratio, records[0]["others_busy_percent"])


def measure_algorithms(
    world_size: int, sizes: list[int], seconds: float, max_repeats: int
) -> list[SizeTimes]:
    """Every size in ascending order, ``seconds`` each, again while it is disturbed.

    Raises:
        RankError: a rank failed, or a result was wrong.
    """
    found: list[SizeTimes] = []

    def run_rank(team: Team) -> None:
        bench = open_bench(team, TUNED)
        for num_bytes in sorted(sizes):
            records = measure_point(
                bench, "all_reduce", num_bytes, torch.float32, seconds, max_repeats
            )
            if records:
                team.report(records)
        dist.destroy_process_group()

    run_ranks(world_size, run_rank, lambda records: found.append(_size_times(records)))
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
