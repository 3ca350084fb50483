#!/usr/bin/env python3
"""Measures waiting: barrier and 1 KB all_reduce with more ranks than cores, and under other load.

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
from functools import partial
from itertools import product
from types import TracebackType
from typing import Any

# isort: off
import harness  # before torch: it sets the number of threads
import torch
import torch.distributed as dist

# isort: on
from groups import labelled, open_groups, run_ranks
from operations import OPERATIONS
from point import Bench, count_wrong, make_bench, make_buffers, make_contender
from report import Report, comparison, records_of, state_of, table_of
from weather import Weather, worst

from ringcomm.measure.machine import MAX_OTHERS_PERCENT
from ringcomm.measure.ranks import Team, run_main
from ringcomm.measure.screen import as_option, microseconds, whole_numbers, words
from ringcomm.measure.timing import Contender, Timings, measure

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
    """The results of one world over all turns; timings on rank 0 only."""

    def __init__(self) -> None:
        self._blocks: dict[Condition, dict[str, list[list[float]]]] = {}
        self._weathers: dict[Condition, list[Weather]] = {}

    def add(
        self, condition: Condition, timings: dict[str, Timings] | None, weather: Weather
    ) -> None:
        """One turn."""
        blocks = self._blocks.setdefault(condition, {})
        for label, timing in (timings or {}).items():
            blocks.setdefault(label, []).extend(timing.blocks)
        self._weathers.setdefault(condition, []).append(weather)

    def records(self, bench: Bench, wrong: dict[str, dict[str, int]]) -> list[dict[str, Any]]:
        """One record per condition and backend; ``wrong`` by operation and backend."""
        found = []
        for (name, strangers), blocks in self._blocks.items():
            timings = {label: Timings(lists) for label, lists in blocks.items()}
            common = {
                "op": name,
                "bytes": NUM_BYTES if OPERATIONS[name].has_data else 0,
                "world_size": bench.team.world_size,
                "strangers": strangers,
                **worst(self._weathers[(name, strangers)]).record(),
            }
            found += [common | r for r in records_of(timings, bench.subject, wrong[name])]
        return found


def _time_beside(
    team: Team, strangers: int, contenders: dict[str, Contender], seconds: float
) -> dict[str, Timings] | None:
    """Times all contenders with that many strangers; returns timings on rank 0. Collective."""
    with Strangers(strangers if team.rank == 0 else 0):
        team.share(None)
        return measure(team, contenders, seconds)


def run_rank(team: Team, options: argparse.Namespace) -> None:
    """One rank of one world; rank 0 reports the world's records to the parent."""
    groups = open_groups(team, labelled(options.backends))
    bench = make_bench(team, groups, torch.device("cpu"))
    buffers = {op: make_buffers(bench, OPERATIONS[op], NUM_BYTES, torch.float32) for op in OPS}
    wrong = {op: count_wrong(bench, OPERATIONS[op], buffers[op]) for op in OPS}
    contenders = {
        op: {label: make_contender(OPERATIONS[op], buffers[op], g) for label, g in groups.items()}
        for op in OPS
    }
    tally = Tally()
    seconds = options.seconds / NUM_TURNS
    for _ in range(NUM_TURNS):
        for strangers, op in product(options.strangers, OPS):
            turn = partial(_time_beside, team, strangers, contenders[op], seconds)
            tally.add((op, strangers), *bench.watch.calmest(turn, options.repeats))
    if team.rank == 0:
        team.report(tally.records(bench, wrong))
    dist.destroy_process_group()


def row_of(record: dict[str, Any]) -> list[str]:
    """Formats a record as a table row."""
    return [
        record["op"],
        str(record["world_size"]),
        str(record["strangers"]),
        record["backend"],
        *(microseconds(record[f"{p}_us"]) for p in ("p50", "p90", "p99", "mean")),
        comparison(record),
        f"{record['others_busy_percent']:.1f}",
        state_of(record),
    ]


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line; exits with a message for invalid options."""
    per = "operation, world and --strangers"
    parser = harness.make_parser(__doc__, seconds=3.0, per=per)
    add = parser.add_argument
    add("--backends", type=as_option(words), default="ringcomm,gloo", help="one may be given twice")
    add("--worlds", type=as_option(whole_numbers), default="2,4,8", help="numbers of ranks")
    add(
        "--strangers",
        type=as_option(whole_numbers),
        default="0,1",
        help="number of CPU-bound processes that run at the same time",
    )
    options = parser.parse_args(argv)
    if min(options.worlds) < 1 or min(options.strangers) < 0:
        parser.error("--worlds must be 1 or more, --strangers 0 or more")
    for name in set(options.backends) - set(dist.Backend.backend_list):
        parser.error(f"--backends: torch has no backend {name!r}; `make build` installs ringcomm")
    options.json = options.json or harness.default_path("waiting")
    return options


def main(argv: list[str]) -> int:
    """Measures every world; returns the exit code, 3 when any result was wrong."""
    options = parse(argv)
    report = Report("waiting", options.json, dtype="float32")
    for world_size in options.worlds:
        run_ranks(world_size, lambda team: run_rank(team, options), report.add)
    headers = ["op", "ranks", "strangers", "backend", "p50 µs", "p90 µs", "p99 µs", "mean µs"]
    headers += ["time / ringcomm's", "others %", "state"]
    caption = (
        "Others: programs that this run did not start. * they used more than"
        f" {MAX_OTHERS_PERCENT:.0f} % of the machine."
    )
    return report.finish(table_of(headers, caption, report.records, row_of, ("world_size",)))


if __name__ == "__main__":
    sys.exit(run_main("waiting.py", main))
