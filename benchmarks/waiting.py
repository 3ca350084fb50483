#!/usr/bin/env python3
"""Measures waiting: barrier and 1 KB all_reduce with more ranks than cores, and beside strangers.

    python benchmarks/waiting.py --worlds 2,4,8 --strangers 0,1

A stranger is a process that only computes, as another user's job would; this script starts and
ends them. All conditions of a world take turns, and so do the backends within each. One JSON line
per backend, operation, world and number of strangers is appended to benchmarks/results.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

# isort: off
import harness  # before torch: it sets the number of threads
import torch
import torch.distributed as dist

# isort: on
from ringcomm.bench import machine
from ringcomm.bench.exit_codes import EXIT_OK, EXIT_WRONG_RESULTS
from ringcomm.bench.flags import did_flags_change
from ringcomm.bench.interleave import Timings, labelled, make_contender, measure, open_groups
from ringcomm.bench.operations import OPERATIONS, Buffers, Place
from ringcomm.bench.point import Bench, count_wrong, make_bench
from ringcomm.bench.ranks import Team, run_ranks
from ringcomm.bench.records import Recorder
from ringcomm.bench.screen import make_console, make_table, state_of
from ringcomm.bench.script import run_main
from ringcomm.bench.wording import (
    as_option,
    comparison,
    facts_line,
    microseconds,
    whole_numbers,
    words,
)

OPS = ("barrier", "all_reduce")
NUM_BYTES = 1024
# Each condition comes this often, in turn with the others.
NUM_TURNS = 3
# From the start of a stranger's interpreter until it computes, with room to spare.
STRANGER_START_S = 0.3
# Ends by itself when its parent is gone; looks at it once in some 20 ms.
STRANGER = "import os\np = os.getppid()\nwhile os.getppid() == p:\n  for _ in range(10**6): pass"


class Strangers:
    """CPU-bound processes of the usual priority, while the context lasts."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Strangers:
        command = [sys.executable, "-I", "-S", "-c", STRANGER]
        self._processes = [subprocess.Popen(command) for _ in range(self._count)]
        if self._count:
            time.sleep(STRANGER_START_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()  # from then on its time counts as this run's own


Condition = tuple[str, int]  # operation, strangers


class Tally:
    """What rank 0 collects of one world, over all turns."""

    def __init__(self) -> None:
        self._blocks: dict[Condition, dict[str, list[list[float]]]] = {}
        self._others: dict[Condition, list[float]] = {}

    def add(self, condition: Condition, timings: dict[str, Timings], others: float) -> None:
        """One turn; ``others`` in percent."""
        blocks = self._blocks.setdefault(condition, {label: [] for label in timings})
        for label, timing in timings.items():
            blocks[label] += timing.blocks
        self._others.setdefault(condition, []).append(others)

    def records(self, bench: Bench, wrong: dict[str, dict[str, int]]) -> list[dict[str, Any]]:
        """One record per condition and backend; ``wrong`` by operation and backend."""
        found = []
        for (name, strangers), blocks in self._blocks.items():
            timings = {label: Timings(lists) for label, lists in blocks.items()}
            others = max(self._others[(name, strangers)])
            for label, timing in timings.items():
                is_verified = not (wrong[name][label] or wrong[name][bench.subject])
                ratio = None
                if label != bench.subject and is_verified:
                    ratio = {"over": bench.subject, **timing.ratio_over(timings[bench.subject])}
                found.append(
                    {
                        "op": name,
                        "bytes": NUM_BYTES if OPERATIONS[name].has_data else 0,
                        "world_size": bench.team.world_size,
                        "strangers": strangers,
                        "backend": label,
                        **timing.summary_us(),
                        "num_calls": timing.num_calls(),
                        "ratio": ratio,
                        "wrong_elems": wrong[name][label],
                        "verified": wrong[name][label] == 0,
                        "others_busy_percent": others,
                        "quiet": others <= machine.MAX_OTHERS_PERCENT,
                    }
                )
        return found


def _make_buffers(team: Team, name: str) -> Buffers:
    num_elems = OPERATIONS[name].num_elems(NUM_BYTES, torch.float32, team.world_size)
    place = Place(team.rank, team.world_size, num_elems, torch.float32, torch.device("cpu"))
    return OPERATIONS[name].setup(place)


def _take_turn(
    bench: Bench, buffers: dict[str, Buffers], strangers: int, seconds: float, tally: Tally
) -> None:
    """All operations beside that many strangers. Collective."""
    team = bench.team
    for name in OPS:
        contenders = {
            label: make_contender(OPERATIONS[name], buffers[name], group)
            for label, group in bench.groups.items()
        }
        watch = machine.OthersWatch(bench.own_pids) if team.rank == 0 else None
        with Strangers(strangers if team.rank == 0 else 0):
            team.share(None)
            timings = measure(team, contenders, seconds)
        if timings is not None and watch is not None:
            tally.add((name, strangers), timings, watch.percent())


def run_rank(team: Team, options: argparse.Namespace) -> None:
    """One rank of one world; rank 0 reports the world's records to the parent."""
    groups = open_groups(team, labelled(options.backends))
    bench = make_bench(team, groups, torch.device("cpu"))
    buffers = {name: _make_buffers(team, name) for name in OPS}
    wrong = {name: count_wrong(bench, OPERATIONS[name], buffers[name]) for name in OPS}
    tally = Tally()
    before_us = bench.probe.latency_us()
    for _ in range(NUM_TURNS):
        for strangers in options.strangers:
            _take_turn(bench, buffers, strangers, options.seconds / NUM_TURNS, tally)
    after_us = bench.probe.latency_us()
    if team.rank == 0:
        steady = not did_flags_change(before_us, after_us)
        flags = {"flag_us": {"before": before_us, "after": after_us}, "steady": steady}
        team.report([{**record, **flags} for record in tally.records(bench, wrong)])
    dist.destroy_process_group()


def measure_world(world_size: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A world's records, of the attempt in which others disturbed it least."""
    attempts: list[list[dict[str, Any]]] = []
    while len(attempts) <= options.repeats:
        run_ranks(world_size, lambda team: run_rank(team, options), attempts.append)
        if all(record["quiet"] for record in attempts[-1]):
            break
    best = min(attempts, key=lambda records: max(r["others_busy_percent"] for r in records))
    return [{**record, "num_attempts": len(attempts)} for record in best]


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line; ends the process with a message when it makes no sense."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--backends", type=as_option(words), default="ringcomm,gloo", help="one may be given twice")
    add("--worlds", type=as_option(whole_numbers), default="2,4,8", help="numbers of ranks")
    add(
        "--strangers",
        type=as_option(whole_numbers),
        default="0,1",
        help="CPU-bound processes beside them",
    )
    add("--seconds", type=float, default=3.0, help="per operation, world and --strangers")
    add("--repeats", type=int, default=3, help="at most, while others disturb the machine")
    add("--json", type=Path, help="append records here (default: benchmarks/results/DATE-...)")
    options = parser.parse_args(argv)
    if min(options.worlds) < 1 or min(options.strangers) < 0:
        parser.error("--worlds are at least 1, --strangers at least 0")
    for name in set(options.backends) - set(dist.Backend.backend_list):
        parser.error(f"--backends: torch knows no {name!r}; `make build` installs ringcomm")
    options.json = options.json or harness.default_path("waiting")
    return options


def main(argv: list[str]) -> int:
    """Measures every world; returns the exit code, 3 when any result was wrong."""
    options = parse(argv)
    console = make_console()
    facts = machine.facts()
    recorder = Recorder(options.json, {"kind": "waiting", **facts, "dtype": "float32"})
    headers = ["op", "ranks", "strangers", "backend", "p50 µs", "p90 µs", "p99 µs", "mean µs"]
    table = make_table(
        [*headers, "time over", "others %", "state"],
        "Others: programs apart from this run and its strangers. * they used more than"
        f" {machine.MAX_OTHERS_PERCENT:.0f} % of the machine.",
    )
    is_wrong = False
    for world_size in options.worlds:
        for record in measure_world(world_size, options):
            recorder.write(record)
            is_wrong = is_wrong or not record["verified"]
            table.add_row(
                record["op"],
                str(record["world_size"]),
                str(record["strangers"]),
                record["backend"],
                *(microseconds(record[f"{p}_us"]) for p in ("p50", "p90", "p99", "mean")),
                comparison(record),
                f"{record['others_busy_percent']:.1f}",
                state_of(record),
            )
        table.add_section()
    console.print(facts_line(facts))
    console.print(table)
    console.print(f"records: {options.json}")
    return EXIT_WRONG_RESULTS if is_wrong else EXIT_OK


if __name__ == "__main__":
    sys.exit(run_main("waiting.py", main))
