#!/usr/bin/env python3
"""Compares the algorithms of all_reduce with each other, in one run.

    python benchmarks/algorithms.py --worlds 2,4 --seconds 4

Groups with a fixed algorithm take turns on one buffer in memory that the ranks share: "direct" runs
in place, the others stage it. Records also have the sizes at which a group without a fixed
algorithm changes its algorithm. plot.py draws them.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from dataclasses import replace
from itertools import pairwise
from typing import Any

import harness  # before torch: it sets the number of threads
import torch
from groups import open_groups
from harness import Bench, Options, flag
from operations import OPERATIONS, RINGCOMM
from point import algorithms_used, make_buffers, measure_point, num_calls

import ringcomm
from _ringcomm.values import byte_counts, several, whole

DIRECT = "direct"  # its group has no fixed algorithm
ALGORITHMS = {
    "one_shot": ringcomm.Options(algorithm="one_shot"),
    "two_shot": ringcomm.Options(algorithm="two_shot"),
    "ring": ringcomm.Options(algorithm="ring"),
    DIRECT: ringcomm.Options(),
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


def run_rank(bench: Bench, options: Options) -> None:
    """Every size in turn; rank 0 reports each one's records."""
    os.environ.pop("RINGCOMM_TUNING", None)
    groups = open_groups(bench.team, dict.fromkeys(ALGORITHMS, RINGCOMM), ALGORITHMS)
    bench = replace(bench, groups=groups)
    common = {"changes": [c for op in OPS for c in changes(bench, op, options.sizes)]}
    for num_bytes in options.sizes:
        records = measure_point(bench, OPS[1], num_bytes, torch.float32)
        # Buffers that are too small to run in place are staged like the others.
        ran = [r for r in records if r["backend"] != DIRECT or r["algorithms"] == [DIRECT]]
        bench.report([{"algorithm": r.pop("backend"), **r, **common} for r in ran])


SIZES = "1k,4k,8k,16k,32k,64k,128k,256k,512k,1m,4m,16m,64m"
PROGRAM = harness.Program(
    doc=__doc__,
    kind="algorithm",
    rank=run_rank,
    seconds=4.0,
    per="world and size, for all algorithms",
    flags=[
        flag("--worlds", several(whole(2)), "2,4", "numbers of ranks"),
        flag("--sizes", byte_counts, SIZES, "bytes of a buffer"),
    ],
    file=lambda options: "algorithms",
    facts=lambda options: {"dtype": "float32"},
    columns=[
        *("ranks", "bytes", "algorithm", "p50 µs", "p90 µs", "p99 µs"),
        *("time / one_shot's", "state"),
    ],
    section=("world_size", "bytes"),
    caption="Time / one_shot's: median, in parentheses the 10th to 90th percentile.",
)

if __name__ == "__main__":
    PROGRAM.run_script()
