#!/usr/bin/env python3
"""Measures collectives with 1, 2, ... threads of each rank, and what memory allows.

    ringcomm bench cores --worlds 2,4 --ops all_reduce,all_gather --json cores.jsonl

Each rank is pinned to cores of its own where there are enough. "1 thread" and the others are
groups with that Options(max_threads=); "auto" is what a group chooses by itself. "memory" scales
the rank's buffer in place, by all ranks and all their threads at once: each byte read and written
once. The record has the processor's name and its cores, so that it can be sent.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

import front_door
import harness  # before torch: it sets the number of threads
import torch
import torch.distributed as dist
from groups import labelled, open_groups
from harness import Bench, Options
from operations import OPERATIONS, RINGCOMM
from point import count_wrong, make_buffers, make_contender
from report import comparison

import ringcomm

MEMORY, AUTO = "memory", "auto"


def default_threads(world_size: int) -> list[int]:
    """1, 2, 4, ... and as many as each rank has cores."""
    most = max(1, len(os.sched_getaffinity(0)) // world_size)
    return sorted({1, most, *(1 << power for power in range(most.bit_length()))})


def pin(rank: int, world_size: int, num_threads: int) -> bool:
    """To cores of this rank; False, and nothing is done, where ranks would share them."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // world_size
    if each < num_threads:
        return False
    os.sched_setaffinity(0, cores[rank * each : (rank + 1) * each])
    return True


def run_rank(bench: Bench, options: Options) -> None:
    """Every operation and size in turn; rank 0 reports each one's records."""
    team = bench.team
    counts = options.threads or default_threads(team.world_size)
    is_pinned = pin(team.rank, team.world_size, max(counts))  # before torch's threads begin
    torch.set_num_threads(max(counts))
    everyone = list(range(team.world_size))
    default = open_groups(team, labelled([RINGCOMM]))
    groups = {
        f"{num} thread{'s' if num > 1 else ''}": dist.new_group(
            everyone, pg_options=ringcomm.Options(max_threads=num)
        )
        for num in counts
    }
    groups[AUTO] = dist.new_group(everyone, pg_options=ringcomm.Options())
    for op in options.ops:
        for num_bytes in options.sizes:
            buffers = make_buffers(
                replace(bench, groups=default), OPERATIONS[op], num_bytes, torch.float32
            )
            wrong = count_wrong(replace(bench, groups=groups), OPERATIONS[op], buffers)
            scaled = torch.zeros(max(1, num_bytes // 4))
            contenders = {
                MEMORY: bench.contender(partial(scaled.mul_, 1), default[RINGCOMM]),
                **{
                    label: make_contender(bench, OPERATIONS[op], buffers, group)
                    for label, group in groups.items()
                },
            }
            facts = {"op": op, "bytes": scaled.nbytes, "is_pinned": is_pinned}
            wrong = {MEMORY: 0, **wrong}
            bench.report(bench.race(contenders, next(iter(groups)), wrong, name="threads", **facts))


PROGRAM = harness.Program(
    **vars(front_door.CORES),
    kind="cores",
    rank=run_rank,
    columns=[
        *("ranks", "op", "bytes", "threads", "p50 µs", "p99 µs"),
        ("time / one thread's", comparison),
        ("own cores", lambda r: "yes" if r["is_pinned"] else "no"),
        "state",
    ],
    section=("world_size", "op", "bytes"),
    caption="Time / one thread's: median (10th to 90th percentile). Own cores: whether each thread"
    " of every rank has one.",
)
run = PROGRAM.run

if __name__ == "__main__":
    PROGRAM.run_script()
