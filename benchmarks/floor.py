#!/usr/bin/env python3
"""Compares all_reduce, staged and on shared buffers, with the limit of memory bandwidth.

    python benchmarks/floor.py --worlds 2,4 --sizes 262144,4194304,67108864

The floor is the time of scaling every rank's buffer in place, by all ranks at once: each byte read
once and written once, which no all_reduce can avoid. A share is the floor's time over that of the
all_reduce: one over the record's ratio. One JSON line per variant, world and size is appended to
benchmarks/results.
"""

from __future__ import annotations

import sys
from typing import Any

import harness  # before torch: it sets the number of threads
import torch
import torch.distributed as dist
from groups import labelled, open_groups
from harness import Bench, Options, flag
from point import algorithms_used, num_calls
from report import Record, inverse, share_range

import ringcomm
from ringcomm.measure.ranks import Team, run_main
from ringcomm.measure.timing import Contender
from ringcomm.screen import whole_numbers

FLOOR = "floor"
VARIANTS = ("staged", "shared")


def make_contenders(bench: Bench, num_elems: int, group: dist.ProcessGroup) -> dict[str, Contender]:
    """The floor and the two all_reduces, each on a float32 buffer of its own, of zeros."""
    plain, scaled = torch.zeros(num_elems), torch.zeros(num_elems)
    shared = ringcomm.empty_shared(num_elems).zero_()
    calls: dict[str, Any] = {
        FLOOR: lambda: scaled.mul_(1),
        "staged": lambda: dist.all_reduce(plain, group=group),
        "shared": lambda: dist.all_reduce(shared, group=group),
    }
    return {name: bench.contender(call, group) for name, call in calls.items()}


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


def run_rank(bench: Bench, options: Options) -> None:
    """Every size in turn; rank 0 reports each one's records."""
    group = open_groups(bench.team, labelled(["ringcomm"]))["ringcomm"]
    for num_bytes in options.sizes:
        num_elems = max(1, num_bytes // 4)
        wrong = {FLOOR: 0, **count_wrong(bench.team, num_elems, group)}
        contenders = make_contenders(bench, num_elems, group)
        algorithms = {variant: algorithm_of(group, contenders[variant]) for variant in VARIANTS}
        point = {"bytes": num_elems * 4, "world_size": bench.team.world_size}
        records = bench.race(contenders, FLOOR, wrong, name="variant", **point)
        bench.report([{**r, "algorithm": algorithms.get(r["variant"])} for r in records])


def share_of(record: Record) -> str:
    """The floor's time over that of the call."""
    return "" if record["ratio"] is None else share_range(inverse(record["ratio"]))


def flag_after(record: Record) -> str:
    """The flag's latency after the calls."""
    flag_us = record["flag_us"]["after"]
    return "" if flag_us is None else f"{flag_us:.2f}"


def check(options: Options) -> None:
    """Raises ValueError for invalid options."""
    if min(options.worlds) < 2 or min(options.sizes) < 1:
        raise ValueError("--worlds must be 2 or more, --sizes 1 or more")


PROGRAM = harness.Program(
    doc=__doc__,
    kind="floor",
    rank=run_rank,
    seconds=4.0,
    per="world and size",
    flags=[
        flag("--worlds", whole_numbers, "2,4", "numbers of ranks"),
        flag("--sizes", whole_numbers, "262144,4194304,67108864", "bytes of a buffer"),
    ],
    check=check,
    columns=[
        *("ranks", "bytes", "variant", "algorithm", "p50 µs"),
        ("share", share_of),
        ("flag µs", flag_after),
        "state",
    ],
    section=("world_size", "bytes"),
    caption="Share: the floor's time / the call's, median (10th to 90th percentile). Flag: time"
    " until one core sees a write of another, about 0.1 µs within a cache and 0.5 µs between"
    " caches.",
)
parse, main = PROGRAM.parse, PROGRAM.main

if __name__ == "__main__":
    sys.exit(run_main("floor.py", main))
