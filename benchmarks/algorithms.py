#!/usr/bin/env python3
"""Compares the algorithms of all_reduce with each other, in one run.

    python benchmarks/algorithms.py --worlds 2,4 --seconds 4

Groups that are told an algorithm take turns on one buffer. It lies in memory that the ranks share:
"direct" runs where it lies, the others stage it as they would any other. Records say, too, from
which sizes on a group that is told nothing takes another algorithm. One JSON line per algorithm,
world and size is appended to benchmarks/results; plot.py draws them.
"""

from __future__ import annotations

import argparse
import os
import sys
from bisect import bisect_left
from functools import partial
from itertools import pairwise
from typing import Any

# isort: off
import harness  # before torch: it sets the number of threads
import torch
import torch.distributed as dist

# isort: on
from groups import open_groups, run_ranks
from operations import OPERATIONS, RINGCOMM, algorithms_used, num_calls
from point import Bench, make_bench, make_buffers, measure_point
from report import Report, comparison, state_of, table_of

from ringcomm import Options
from ringcomm.measure.ranks import Team, run_main
from ringcomm.measure.screen import as_option, byte_count, byte_counts, microseconds, whole_numbers

DIRECT = "direct"  # its group is told nothing
ALGORITHMS = {
    "one_shot": Options(algorithm="one_shot"),
    "two_shot": Options(algorithm="two_shot"),
    "ring": Options(algorithm="ring"),
    "ring, rank_order": Options(algorithm="ring", deterministic="rank_order"),
    DIRECT: Options(),
}
OPS = ("all_reduce", "all_reduce_shared")
ELEM_BYTES = 4


def chosen(bench: Bench, op: str, num_bytes: int) -> str:
    """The algorithm that is taken when none is asked for. Collective."""
    group = bench.groups[DIRECT]
    operation = OPERATIONS[op]
    before = num_calls(group)
    operation.bound(make_buffers(bench, operation, num_bytes, torch.float32), group)()
    return algorithms_used(before, num_calls(group))[0]


def changes(bench: Bench, op: str, sizes: list[int]) -> list[dict[str, Any]]:
    """The sizes, to the byte, from which on another algorithm is taken. Collective."""
    found = []
    names = {size: chosen(bench, op, size) for size in sorted(sizes)}
    for (small, first), (large, last) in pairwise(names.items()):
        if first != last:
            between = range(small, large, ELEM_BYTES)
            index = bisect_left(between, True, key=lambda n: chosen(bench, op, n) != first)
            found.append({"op": op, "bytes": small + ELEM_BYTES * index, "algorithm": last})
    return found


def run_rank(team: Team, options: argparse.Namespace) -> None:
    """One rank of one world; rank 0 reports each size's records to the parent."""
    os.environ.pop("RINGCOMM_TUNING", None)
    groups = open_groups(team, dict.fromkeys(ALGORITHMS, RINGCOMM), ALGORITHMS)
    bench = make_bench(team, groups, torch.device("cpu"))
    common: dict[str, Any] = {"world_size": team.world_size}
    common["changes"] = [change for op in OPS for change in changes(bench, op, options.sizes)]
    measure = partial(measure_point, bench, OPS[1], dtype=torch.float32)
    for num_bytes in options.sizes:
        records = measure(num_bytes, seconds=options.seconds, max_repeats=options.repeats)
        # What is too small to run where it lies is staged like the others.
        ran = [r for r in records if r["backend"] != DIRECT or r["algorithms"] == [DIRECT]]
        if ran:
            team.report([{"algorithm": r.pop("backend"), **r, **common} for r in ran])
    dist.destroy_process_group()


def row_of(record: dict[str, Any]) -> list[str]:
    """A record for people."""
    return [
        *(str(record["world_size"]), byte_count(record["bytes"]), record["algorithm"]),
        *(microseconds(record[f"{p}_us"]) for p in ("p50", "p90", "p99")),
        comparison(record),
        state_of(record),
    ]


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line; ends the process with a message when it makes no sense."""
    parser = harness.make_parser(__doc__, seconds=4.0, per="world and size, for all algorithms")
    add = parser.add_argument
    sizes = "1k,4k,8k,16k,32k,64k,128k,256k,512k,1m,4m,16m,64m"
    add("--worlds", type=as_option(whole_numbers), default="2,4", help="numbers of ranks")
    add("--sizes", type=as_option(byte_counts), default=sizes, help="bytes of a buffer")
    options = parser.parse_args(argv)
    if min(options.worlds) < 2:
        parser.error("--worlds are at least 2")
    options.json = options.json or harness.default_path("algorithms")
    return options


def main(argv: list[str]) -> int:
    """Runs all worlds; returns the exit code, 3 when any result was wrong."""
    options = parse(argv)
    report = Report("algorithm", options.json, dtype="float32", device="cpu")
    for world_size in options.worlds:
        run_ranks(world_size, lambda team: run_rank(team, options), report.add)
    headers = ["ranks", "bytes", "algorithm", "p50 µs", "p90 µs", "p99 µs", "time over", "state"]
    caption = "Time over one_shot's: median of neighbouring blocks' ratios, 10–90 %."
    section = ("world_size", "bytes")
    return report.finish(table_of(headers, caption, report.records, row_of, section))


if __name__ == "__main__":
    sys.exit(run_main("algorithms.py", main))
