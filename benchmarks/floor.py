#!/usr/bin/env python3
"""Compares all_reduce with what memory allows: staged, on shared buffers, and the floor, in turn.

    python benchmarks/floor.py --worlds 2,4 --sizes 262144,4194304,67108864

The floor is the time of scaling every rank's buffer in place, by all ranks at once: each byte read
once and written once, which no all_reduce can avoid. A share is the floor's time over that of the
all_reduce, as the median of neighbouring blocks' ratios. One JSON line per variant, world and size
is appended to benchmarks/results.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

# isort: off
import harness  # before torch: it sets the number of threads
import torch
import torch.distributed as dist

# isort: on

import ringcomm
from ringcomm.bench import machine
from ringcomm.bench.exit_codes import EXIT_OK, EXIT_WRONG_RESULTS
from ringcomm.bench.flags import FlagProbe, did_flags_change
from ringcomm.bench.interleave import Contender, Timings, labelled, measure, open_groups
from ringcomm.bench.point import algorithms_used
from ringcomm.bench.ranks import Team, run_ranks
from ringcomm.bench.records import Recorder
from ringcomm.bench.screen import make_console, make_table, state_of
from ringcomm.bench.script import run_main
from ringcomm.bench.wording import byte_count, facts_line, microseconds, whole_numbers

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

    def counts() -> dict[tuple[str, str], int]:
        return {key: entry["num_calls"] for key, entry in ringcomm.stats(group).items()}

    before = counts()
    contender.call()
    return ", ".join(algorithms_used(before, counts()))


def measure_point(
    team: Team, group: dist.ProcessGroup, probe: FlagProbe, num_bytes: int, seconds: float
) -> list[dict[str, Any]]:
    """On rank 0 the records of one size; else nothing. Collective."""
    num_elems = max(1, num_bytes // 4)
    wrong = count_wrong(team, num_elems, group)
    contenders = make_contenders(num_elems, group)
    algorithms = {variant: algorithm_of(group, contenders[variant]) for variant in VARIANTS}
    pids = team.share(os.getpid())
    watch = machine.OthersWatch([os.getppid(), *pids]) if team.rank == 0 else None
    before_us = probe.latency_us()
    timings = measure(team, contenders, seconds)
    after_us = probe.latency_us()
    if timings is None or watch is None:
        return []
    others = watch.percent()
    weather = {
        "flag_us": {"before": before_us, "after": after_us},
        "steady": not did_flags_change(before_us, after_us),
        "others_busy_percent": others,
        "quiet": others <= machine.MAX_OTHERS_PERCENT,
    }
    return [
        _record(team, num_elems * 4, variant, timings, algorithms, wrong) | weather
        for variant in (FLOOR, *VARIANTS)
    ]


def _record(
    team: Team,
    num_bytes: int,
    variant: str,
    timings: dict[str, Timings],
    algorithms: dict[str, str],
    wrong: dict[str, int],
) -> dict[str, Any]:
    timing = timings[variant]
    return {
        "op": "all_reduce",
        "bytes": num_bytes,
        "world_size": team.world_size,
        "variant": variant,
        "algorithm": algorithms.get(variant),
        **timing.summary_us(),
        "num_calls": timing.num_calls(),
        "share_of_floor": None if variant == FLOOR else timings[FLOOR].ratio_over(timing),
        "wrong_elems": wrong.get(variant, 0),
    }


def run_rank(team: Team, options: argparse.Namespace) -> None:
    """One rank of one world; rank 0 reports each size's records to the parent."""
    group = open_groups(team, labelled(["ringcomm"]))["ringcomm"]
    probe = FlagProbe(team)
    for num_bytes in options.sizes:
        records = measure_point(team, group, probe, num_bytes, options.seconds)
        if records:
            team.report(records)
    dist.destroy_process_group()


def print_table(console: Any, records: list[dict[str, Any]]) -> None:
    """All points: the share of the floor, and the state of the machine."""
    headers = ["ranks", "bytes", "variant", "algorithm", "p50 µs", "share %", "flag µs", "state"]
    table = make_table(
        headers,
        "Share: of the floor's time, median of neighbouring blocks. Flag: one core sees what"
        " another wrote; about 0.1 µs where they share a cache, 0.5 where not.",
    )
    for record in records:
        share, flag_us = record["share_of_floor"], record["flag_us"]["after"]
        table.add_row(
            str(record["world_size"]),
            byte_count(record["bytes"]),
            record["variant"],
            record["algorithm"] or "",
            microseconds(record["p50_us"]),
            "" if share is None else f"{100 * share['p50']:.0f}",
            "" if flag_us is None else f"{flag_us:.2f}",
            state_of(record),
        )
    console.print(table)
    console.print(facts_line(records[0]))


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line; ends the process with a message when it makes no sense."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--worlds", type=whole_numbers, default="2,4", help="numbers of ranks")
    add("--sizes", type=whole_numbers, default="262144,4194304,67108864", help="bytes of a buffer")
    add("--seconds", type=float, default=4.0, help="per world and size")
    add("--json", type=Path, help="append records here (default: benchmarks/results/DATE-floor)")
    options = parser.parse_args(argv)
    if min(options.worlds) < 2 or min(options.sizes) < 1:
        parser.error("--worlds are at least 2, --sizes at least 1")
    options.json = options.json or harness.default_path("floor")
    return options


def main(argv: list[str]) -> int:
    """Runs all worlds; returns the exit code, 3 when any result was wrong."""
    options = parse(argv)
    console = make_console()
    facts = {"kind": "floor", **machine.facts()}
    recorder = Recorder(options.json, facts)
    found: list[dict[str, Any]] = []

    def on_message(records: list[dict[str, Any]]) -> None:
        for record in records:
            recorder.write(record)
            found.append({**facts, **record})

    for world_size in options.worlds:
        run_ranks(world_size, lambda team: run_rank(team, options), on_message)
    print_table(console, found)
    console.print(f"records: {options.json}")
    is_wrong = any(record["wrong_elems"] for record in found)
    return EXIT_WRONG_RESULTS if is_wrong else EXIT_OK


if __name__ == "__main__":
    sys.exit(run_main("floor.py", main))
