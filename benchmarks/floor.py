#!/usr/bin/env python3
"""Compares all_reduce, staged and on shared buffers, with the limit of memory bandwidth.

    python benchmarks/floor.py --worlds 2,4 --sizes 262144,4194304,67108864

The floor is the time of scaling every rank's buffer in place, by all ranks at once: each byte read
once and written once, which no all_reduce can avoid. A share is the floor's time over that of the
all_reduce: one over the record's ratio.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import harness  # before torch: it sets the number of threads
import torch
from groups import labelled, open_groups
from harness import Bench, Options, flag
from operations import OPERATIONS, RINGCOMM
from point import algorithms_used, count_wrong, make_buffers, make_contender, num_calls

from _ringcomm.values import several, whole

FLOOR = "floor"
VARIANTS = {"staged": "all_reduce", "shared": "all_reduce_shared"}


def run_rank(bench: Bench, options: Options) -> None:
    """Every size in turn; rank 0 reports each one's records."""
    bench = replace(bench, groups=open_groups(bench.team, labelled([RINGCOMM])))
    group = bench.groups[RINGCOMM]
    for num_bytes in options.sizes:
        wrong, algorithms = {FLOOR: 0}, {}
        scaled = torch.zeros(max(1, num_bytes // 4))
        contenders = {FLOOR: bench.contender(partial(scaled.mul_, 1), group)}
        for variant, name in VARIANTS.items():
            buffers = make_buffers(bench, OPERATIONS[name], num_bytes, torch.float32)
            before = num_calls(group)
            wrong[variant] = count_wrong(bench, OPERATIONS[name], buffers)[RINGCOMM]
            algorithms[variant] = ", ".join(algorithms_used(before, num_calls(group)))
            contenders[variant] = make_contender(bench, OPERATIONS[name], buffers, group)
        records = bench.race(contenders, FLOOR, wrong, name="variant", bytes=scaled.nbytes)
        bench.report([{**r, "algorithm": algorithms.get(r["variant"])} for r in records])


PROGRAM = harness.Program(
    doc=__doc__,
    kind="floor",
    rank=run_rank,
    seconds=4.0,
    per="world and size",
    flags=[
        flag("--worlds", several(whole(2)), "2,4", "numbers of ranks"),
        flag("--sizes", several(whole(1)), "262144,4194304,67108864", "bytes of a buffer"),
    ],
)

if __name__ == "__main__":
    PROGRAM.run_script()
