#!/usr/bin/env python3
"""Compares all_reduce, staged and on shared buffers, with the limit of memory bandwidth.

    python benchmarks/floor.py --worlds 2,4 --sizes 262144,4194304,67108864

The floor is the time of scaling every rank's buffer in place, by all ranks at once: each byte read
once and written once, which no all_reduce can avoid. A share is the floor's time over that of the
all_reduce: one over the record's ratio. One JSON line per variant, world and size is appended to
benchmarks/results.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

# isort: off
import harness  # before torch: it sets the number of threads
import torch
import torch.distributed as dist

# isort: on

from groups import labelled, open_groups, run_ranks
from point import algorithms_used, num_calls
from report import Report, inverse, records_of, share_range, state_of, table_of
from weather import WeatherWatch

import ringcomm
from ringcomm.measure.ranks import Team, run_main
from ringcomm.measure.screen import byte_count, microseconds, whole_numbers
from ringcomm.measure.timing import Contender, measure

FLOOR = "floor"
VARIANTS = ("staged", "shared")


def make_contenders(num_elems: int, group: dist.ProcessGroup) -> dict[str, Contender]:
    """The floor and the two all_reduces, each on a float32 buffer of its own, of zeros."""
    plain, scaled = torch.zeros(num_elems), torch.zeros(num_elems)
    shared = ringcomm.empty_shared(num_elems).zero_()

    def scale() -> None:
        scaled.mul_(1)

    def align() -> None:
        dist.barrier(group=group)

    return {
        FLOOR: Contender(scale, align),
        "staged": Contender(lambda: dist.all_reduce(plain, group=group), align),
        "shared": Contender(lambda: dist.all_reduce(shared, group=group), align),
    }


def count_wrong(team: Team, num_elems: int, group: dist.ProcessGroup) -> dict[str, int]:
    """Wrong elements of all ranks together, by variant, after one call on known integers."""
    values = [(torch.arange(num_elems) % 4099 + rank).float() for rank in range(team.world_size)]
    expected = torch.stack(values).sum(0) if num_elems < 1 << 22 else sum(values[1:], values[0])
    wrong = {}
    for variant in VARIANTS:
        buffer = torch.empty(num_elems) if variant == "staged" else ringcomm.empty_shared(num_elems)
        buffer.copy_(values[team.rank])
        dist.all_reduce(buffer, group=group)
        wrong[variant] = sum(team.share(int((buffer != expected).sum())))
    return wrong


def algorithm_of(group: dist.ProcessGroup, contender: Contender) -> str:
    """The name of ringcomm's algorithm that the contender's call takes."""
    before = num_calls(group)
    contender.call()
    return ", ".join(algorithms_used(before, num_calls(group)))


def run_rank(team: Team, options: argparse.Namespace) -> None:
    """One rank of one world; rank 0 reports each size's records to the parent."""
    group = open_groups(team, labelled(["ringcomm"]))["ringcomm"]
    watch = WeatherWatch(team)
    for num_bytes in options.sizes:
        num_elems = max(1, num_bytes // 4)
        wrong = {FLOOR: 0, **count_wrong(team, num_elems, group)}
        contenders = make_contenders(num_elems, group)
        algorithms = {variant: algorithm_of(group, contenders[variant]) for variant in VARIANTS}
        time_all = partial(measure, team, contenders, options.seconds)
        timings, weather = watch.calmest(time_all, options.repeats)
        if timings is None:
            continue
        point = {"bytes": num_elems * 4, "world_size": team.world_size, **weather.record()}
        records = records_of(timings, FLOOR, wrong, name="variant")
        team.report([{**r, "algorithm": algorithms.get(r["variant"]), **point} for r in records])
    dist.destroy_process_group()


def row_of(record: dict[str, Any]) -> list[str]:
    """Formats a record as a table row."""
    ratio, flag_us = record["ratio"], record["flag_us"]["after"]
    return [
        str(record["world_size"]),
        byte_count(record["bytes"]),
        record["variant"],
        record["algorithm"] or "",
        microseconds(record["p50_us"]),
        "" if ratio is None else share_range(inverse(ratio)),
        "" if flag_us is None else f"{flag_us:.2f}",
        state_of(record),
    ]


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line; exits with a message for invalid options."""
    parser = harness.make_parser(__doc__, seconds=4.0, per="world and size")
    add = parser.add_argument
    add("--worlds", type=whole_numbers, default="2,4", help="numbers of ranks")
    add("--sizes", type=whole_numbers, default="262144,4194304,67108864", help="bytes of a buffer")
    options = parser.parse_args(argv)
    if min(options.worlds) < 2 or min(options.sizes) < 1:
        parser.error("--worlds must be 2 or more, --sizes 1 or more")
    options.json = options.json or harness.default_path("floor")
    return options


def main(argv: list[str]) -> int:
    """Runs all worlds; returns the exit code, 3 when any result was wrong."""
    options = parse(argv)
    report = Report("floor", options.json)
    for world_size in options.worlds:
        run_ranks(world_size, lambda team: run_rank(team, options), report.add)
    headers = ["ranks", "bytes", "variant", "algorithm", "p50 µs", "share", "flag µs", "state"]
    caption = (
        "Share: the floor's time / the call's, median (10th to 90th percentile). Flag: time until"
        " one core sees a write of another, about 0.1 µs within a cache and 0.5 µs between caches."
    )
    return report.finish(
        table_of(headers, caption, report.records, row_of, ("world_size", "bytes"))
    )


if __name__ == "__main__":
    sys.exit(run_main("floor.py", main))
