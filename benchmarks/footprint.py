#!/usr/bin/env python3
"""Measures the resources of idle groups, and the cost of waiting.

    python benchmarks/footprint.py --world 4 --groups 64

Memory, file descriptors and threads that idle groups add to a rank, over ringcomm and over Gloo;
ringcomm's shared memory per pair of ranks before and after use; and the CPU time of ranks that wait
in an all_reduce for one that computes. All of it is the kernel's own count. One JSON line per
quantity and backend is appended to benchmarks/results.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import harness  # before torch: it sets the number of threads
import torch
import torch.distributed as dist
from groups import labelled, open_groups, run_ranks
from harness import Options, Report, flag
from report import amount
from weather import WeatherWatch

from ringcomm.measure.machine import mapped_memory
from ringcomm.measure.ranks import Team, run_main
from ringcomm.measure.timing import open_default_group
from ringcomm.screen import byte_count, words

SMALL_BYTES = 1024
# Uses all memory of a group: each algorithm of all_reduce, and messages.
USED_BYTES = (SMALL_BYTES, 1 << 20, 64 << 20)
# The backends wait in turns, because a wait begins with spinning before it sleeps.
NUM_TURNS = 3
SETTLE_S = 0.05
PROC = Path("/proc/self")
# What the kernel counts per process, with the units of the records.
COUNTED = {"memory": "bytes", "file descriptors": "", "threads": ""}


def counts() -> list[int]:
    """Of this process, in the order of ``COUNTED``; memory is what is resident."""
    gc.collect()
    resident = re.search(r"^Rss:\s+(\d+) kB", (PROC / "smaps_rollup").read_text(), re.M)
    assert resident is not None
    folders = (os.listdir(PROC / name) for name in ("fd", "task"))
    return [int(resident[1]) << 10, *map(len, folders)]


def run_idle(team: Team, options: Options, backend: str) -> None:
    """Rank 0 reports the resources of idle groups on the rank with the largest increase."""

    def added() -> list[int]:
        team.share(None)
        mine = [now - then for now, then in zip(counts(), before, strict=True)]
        return [max(ranks) for ranks in zip(*team.share(mine), strict=True)]

    open_default_group(team, backend)
    dist.all_reduce(torch.zeros(SMALL_BYTES // 4))
    before = counts()
    groups = [dist.new_group() for _ in range(options.groups)]
    name = f"{options.groups} idle groups, per rank"
    found = {name: added()}
    dist.all_reduce(torch.zeros(SMALL_BYTES // 4), group=groups[0])
    found[f"{name}, one of them used"] = added()
    if team.rank == 0:
        team.report(
            [
                {"quantity": f"{name}: {what}", "unit": unit, "backend": backend, "value": value}
                for name, values in found.items()
                for (what, unit), value in zip(COUNTED.items(), values, strict=True)
            ]
        )
    dist.destroy_process_group()


def run_mapped(team: Team) -> None:
    """Rank 0 reports the shared memory of the only group, per pair of ranks."""
    open_default_group(team, "ringcomm")
    num_pairs = team.world_size * (team.world_size - 1) // 2
    found: dict[str, int] = {}
    for when in ("unused", f"after {byte_count(USED_BYTES[-1])}"):
        if found:
            use_group(team)
        # All ranks map the same; of a page that n of them have each counts 1/n.
        by_rank = team.share(mapped_memory())
        found[f"{when}: mapped"] = by_rank[0]["mapped_bytes"]
        found[f"{when}: resident"] = sum(memory["share_bytes"] for memory in by_rank)
    if team.rank == 0:
        record = {"unit": "bytes", "backend": "ringcomm"}
        team.report(
            [
                {"quantity": f"a pair of ranks, {name}", "value": value / num_pairs, **record}
                for name, value in found.items()
            ]
        )
    dist.destroy_process_group()


def use_group(team: Team) -> None:
    """Maps all memory of a group: all_reduces, and messages around the ring. Collective."""
    for num_bytes in USED_BYTES:
        buffer = torch.zeros(num_bytes // 4)
        dist.all_reduce(buffer)
        dist.broadcast(buffer, 0)
        sending = dist.isend(buffer, (team.rank + 1) % team.world_size)
        dist.recv(torch.empty_like(buffer), (team.rank - 1) % team.world_size)
        assert sending is not None
        sending.wait()


def cpu_seconds(pids: list[int]) -> float:
    """CPU time of processes, with all their threads: the clocks of clock_getcpuclockid(3)."""
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)


def wait_once(team: Team, group: dist.ProcessGroup, pids: list[int], seconds: float) -> float:
    """Rank 0 computes, and the others wait for it in an all_reduce. Collective.

    Returns:
        On rank 0 percent of one core, for all waiting ranks together, without their first moment.
    """

    def compute_until(moment: float) -> float:
        while (now := time.monotonic()) < moment:
            pass
        return now

    buffer = torch.zeros(SMALL_BYTES // 4)
    dist.all_reduce(buffer, group=group)
    team.share(None)
    percent = 0.0
    if team.rank == 0:
        begin = compute_until(time.monotonic() + SETTLE_S)
        used_s = -cpu_seconds(pids)
        end = compute_until(begin + seconds)
        used_s += cpu_seconds(pids)
        percent = 100 * used_s / (end - begin)
    dist.all_reduce(buffer, group=group)
    return percent


def run_waiting(team: Team, options: Options) -> None:
    """Rank 0 reports the cost of waiting with each backend."""
    groups = open_groups(team, labelled(options.backends))
    watch = WeatherWatch(team)
    pids = team.share(os.getpid())[1:]

    def measure() -> dict[str, float]:
        turns = [
            {label: wait_once(team, g, pids, options.seconds) for label, g in groups.items()}
            for _ in range(NUM_TURNS)
        ]
        return {label: median(turn[label] for turn in turns) for label in groups}

    percent, weather = watch.calmest(measure, options.repeats)
    if team.rank == 0:
        quantity = f"{len(pids)} ranks that wait for one that computes: CPU time, of one core"
        record = {"quantity": quantity, "unit": "%", "seconds": options.seconds, **weather.record()}
        team.report([{**record, "backend": name, "value": v} for name, v in percent.items()])
    dist.destroy_process_group()


def check(options: Options) -> None:
    """Raises ValueError for invalid options."""
    if options.world < 2 or options.groups < 1 or options.seconds <= 0:
        raise ValueError("needs at least 2 ranks, 1 group and more than 0 seconds")


def measure(options: Options, report: Report) -> None:
    """Everything, each in ranks of its own."""

    def add(records: list[dict[str, Any]]) -> None:
        """Others can change times, and no other counts."""
        report.add([{"quiet": True, "verified": True, **record} for record in records])

    for backend in options.backends:
        run = partial(run_idle, options=options, backend=backend)
        run_ranks(options.world, run, add)
    run_ranks(options.world, run_mapped, add)
    run_ranks(options.world, partial(run_waiting, options=options), add)


PROGRAM = harness.Program(
    doc=__doc__,
    kind="footprint",
    measure=measure,
    seconds=1.0,
    per="wait",
    flags=[
        flag("--backends", words, "ringcomm,gloo"),
        flag("--world", int, 4, "ranks, all on this machine"),
        flag("--groups", int, 64, "number of idle groups"),
    ],
    check=check,
    file=lambda options: f"footprint-w{options.world}",
    facts=lambda options: {"world_size": options.world},
    columns=["quantity", "backend", ("value", lambda r: amount(r["value"], r["unit"]))],
)
parse, main = PROGRAM.parse, PROGRAM.main

if __name__ == "__main__":
    sys.exit(run_main("footprint.py", main))
