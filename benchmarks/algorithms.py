#!/usr/bin/env python3
"""Compares the algorithms of all_reduce with each other, in one run.

    python benchmarks/algorithms.py --worlds 2,4 --seconds 4

Groups with a fixed algorithm take turns on one buffer in memory that the ranks share: "direct" runs
in place, the others stage it. Records also have the sizes at which a group without a fixed
algorithm changes its algorithm. One JSON line per algorithm, world and size is appended to
benchmarks/results; plot.py draws them.
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
from operations import OPERATIONS, RINGCOMM
from point import Bench, algorithms_used, make_bench, make_buffers, measure_point, num_calls
from report import Report, comparison, state_of, table_of

from ringcomm import Options
from ringcomm.measure.ranks import Team, run_main
from ringcomm.measure.screen import as_option, byte_count, byte_counts, microseconds, whole_numbers

DIRECT = "direct"  # its group has no fixed algorithm
ALGORITHMS = {
    "one_shot": Options(algorithm="one_shot"),
    "two_shot": Options(algorithm="two_shot"),
    "ring": Options(algorithm="ring"),
    DIRECT: Options(),
}
OPS = ("all_reduce", "all_reduce_shared")
ELEM_BYTES = 4


def chosen(bench: Bench, op: str, num_bytes: int) -> str:
    """The algorithm that is selected automatically. Collective."""
    group = bench.groups[DIRECT]
    operation = OPERATIONS[op]
    before = num_calls(group)
    operation.bound(make_buffers(bench, operation, num_bytes, torch.float32), group)()
    return algorithms_used(before, num_calls(group))[0]


def changes(bench: Bench, op: str, sizes: list[int]) -> list[dict[str, Any]]:
    """The exact sizes in bytes from which another algorithm is selected. Collective."""
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
        # Buffers that are too small to run in place are staged like the others.
        ran = [r for r in records if r["backend"] != DIRECT or r["algorithms"] == [DIRECT]]
        if ran:
            team.report([{"algorithm": r.pop("backend"), **r, **common} for r in ran])
    dist.destroy_process_group()


def row_of(record: dict[str, Any]) -> list[str]:
    """Formats a record as a table row."""
    return [
        *(str(record["world_size"]), byte_count(record["bytes"]), record["algorithm"]),
        *(microseconds(record[f"{p}_us"]) for p in ("p50", "p90", "p99")),
        comparison(record),
        state_of(record),
    ]


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line; exits with a message for invalid options."""
    parser = harness.make_parser(__doc__, seconds=4.0, per="world and size, for all algorithms")
    add = parser.add_argument
    sizes = "1k,4k,8k,16k,32k,64k,128k,256k,512k,1m,4m,16m,64m"
    add("--worlds", type=as_option(whole_numbers), default="2,4", help="numbers of ranks")
    add("--sizes", type=as_option(byte_counts), default=sizes, help="bytes of a buffer")
    options = parser.parse_args(argv)
    if min(options.worlds) < 2:
        parser.error("--worlds must be 2 or more")
    options.json = options.json or harness.default_path("algorithms")
    return options


def main(argv: list[str]) -> int:
    """Runs all worlds; returns the exit code, 3 when any result was wrong."""
    options = parse(argv)
    report = Report("algorithm", options.json, dtype="float32", device="cpu")
    for world_size in options.worlds:
        run_ranks(world_size, lambda team: run_rank(team, options), report.add)
    headers = ["ranks", "bytes", "algorithm", "p50 µs", "p90 µs", "p99 µs"]
    headers += ["time / one_shot's", "state"]
    caption = "Time / one_shot's: median, in parentheses the 10th to 90th percentile."
    section = ("world_size", "bytes")
    return report.finish(table_of(headers, caption, report.records, row_of, section))


if __name__ == "__main__":
    sys.exit(run_main("algorithms.py", main))
