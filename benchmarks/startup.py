#!/usr/bin/env python3
"""Measures the cost of ringcomm before the first collective: import, first group and later ones.

    python benchmarks/startup.py --imports 9 --inits 9

Imports are timed in fresh interpreters, torch alone and torch with ringcomm in turn. First groups
are made by fresh interpreters that have imported torch only, so that ringcomm's import counts; init
is by freshly forked ranks that have imported ringcomm. Ranks meet through a FileStore, backends in
turn. One JSON line per quantity is appended to benchmarks/results.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from statistics import median
from typing import Any

# isort: off
import harness  # before torch: it sets the number of threads
import torch.distributed as dist

# isort: on
from groups import run_ranks
from report import Report, make_table
from weather import Weather

from ringcomm.measure.machine import OthersWatch
from ringcomm.measure.ranks import RankError, Team, run_main
from ringcomm.measure.timing import open_default_group, percentiles

# Printed by a fresh interpreter: seconds for torch, and for ringcomm after it.
IMPORT = (
    "import time; a = time.perf_counter(); import torch; b = time.perf_counter();{more}"
    " c = time.perf_counter(); print(b - a, c - b)"
)
# Run by each rank in a fresh interpreter: prints seconds and CPU seconds of its first group, from
# the time that all ranks have imported torch.
FIRST_GROUP = """
import sys, time, torch, torch.distributed as dist
backend, path, rank, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
store = dist.FileStore(path, size)
store.set(f"rank {rank}", "ready")
store.wait([f"rank {other}" for other in range(size)])
begin, begin_cpu = time.perf_counter(), time.process_time()
dist.init_process_group(backend, store=store, rank=rank, world_size=size)
print(time.perf_counter() - begin, time.process_time() - begin_cpu)
dist.destroy_process_group()
"""
# torch as it is without ringcomm installed: no autoload of its entry point.
ALONE = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
# Many times what a fresh interpreter takes on a cold disk.
START_TIMEOUT_S = 300.0


def _import_seconds(with_ringcomm: bool) -> float:
    """Seconds of the imports in a fresh interpreter."""
    code = IMPORT.format(more=" import ringcomm;" if with_ringcomm else "")
    environment = {**os.environ, **({} if with_ringcomm else ALONE)}
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=harness.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=START_TIMEOUT_S,
    )
    return sum(map(float, run.stdout.split()))


def _compare(ours: list[float], theirs: list[float], peer: str) -> dict[str, Any]:
    """Medians in seconds, and the median of the paired differences."""
    difference = percentiles((a - b for a, b in zip(ours, theirs, strict=True)), "s")
    return {
        "ringcomm_s": median(ours),
        f"{peer}_s": median(theirs),
        "difference_s": {name: difference[f"{name}_s"] for name in ("p50", "p10", "p90")},
        "num_pairs": len(ours),
    }


def measure_imports(num_pairs: int) -> list[dict[str, Any]]:
    """Importing torch and ringcomm, over importing torch alone; the first pair fills the caches."""
    pairs = []
    for index in range(num_pairs + 1):
        order = (True, False) if index % 2 else (False, True)
        seconds = {which: _import_seconds(which) for which in order}
        pairs.append((seconds[True], seconds[False]))
    ours, theirs = (list(side) for side in zip(*pairs[1:], strict=True))
    return [{"quantity": "import", **_compare(ours, theirs, "torch")}]


def _first_group_seconds(backend: str, world_size: int) -> tuple[float, float]:
    """Seconds and CPU seconds of init_process_group in fresh interpreters, of the slowest rank."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", FIRST_GROUP, backend, f"{folder}/store"]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(world_size)],
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]
        try:
            said = [rank.communicate(timeout=START_TIMEOUT_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    for rank, (_, errors) in zip(ranks, said, strict=True):
        if rank.returncode != 0:
            raise RankError(f"a rank over {backend} failed: {errors.strip().splitlines()[-1:]}")
    seconds, cpu_seconds = zip(*(map(float, out.split()) for out, _ in said), strict=True)
    return max(seconds), max(cpu_seconds)


def measure_first_groups(
    backends: list[str], num_pairs: int, world_size: int
) -> list[dict[str, Any]]:
    """The first group of programs that do not import ringcomm; the first pair fills the caches."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in backends}
    for index in range(num_pairs + 1):
        for name in backends if index % 2 else backends[::-1]:
            found[name].append(_first_group_seconds(name, world_size))
    records = []
    for which, quantity in enumerate(("first group", "first group, CPU")):
        ours, theirs = ([one[which] for one in found[name][1:]] for name in backends)
        what = {"quantity": quantity, "world_size": world_size}
        records.append({**what, **_compare(ours, theirs, backends[1])})
    return records


def _init_rank(team: Team, backend: str) -> None:
    """Reports the seconds of init_process_group, of the slowest rank."""
    team.share(None)
    begin = time.perf_counter()
    open_default_group(team, backend)
    init_s = team.share(time.perf_counter() - begin)
    if team.rank == 0:
        team.report(max(init_s))
    dist.destroy_process_group()


def measure_inits(backends: list[str], num_pairs: int, world_size: int) -> list[dict[str, Any]]:
    """Making the default group where ringcomm has been imported, ringcomm's over the other's."""
    seconds: dict[str, list[float]] = {name: [] for name in backends}
    for index in range(num_pairs):
        for name in backends if index % 2 else backends[::-1]:
            init = partial(_init_rank, backend=name)
            run_ranks(world_size, init, seconds[name].append)
    ours, theirs = (seconds[name] for name in backends)
    what = {"quantity": "init", "world_size": world_size}
    return [{**what, **_compare(ours, theirs, backends[1])}]


def rows_of(record: dict[str, Any]) -> list[list[str]]:
    """Formats a record as table rows."""
    sides = {name: v for name, v in record.items() if isinstance(v, float) and name[-2:] == "_s"}
    d = record["difference_s"]
    rows = [[name.replace("_s", ", s"), f"{v:.3f}"] for name, v in sides.items()]
    rows += [["difference, s (10–90 %)", f"{d['p50']:.3f} ({d['p10']:.3f}–{d['p90']:.3f})"]]
    rows += [["others %", f"{record['others_busy_percent']:.1f}"]]
    return [[record["quantity"], *row] for row in rows]


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line; exits with a message for invalid options."""
    parser = harness.make_parser(__doc__)
    add = parser.add_argument
    add("--peer", default="gloo", help="backend whose init ringcomm's is compared with")
    add("--world", type=int, default=2, help="ranks of the groups that are made")
    add("--imports", type=int, default=9, help="pairs of imports")
    add("--inits", type=int, default=9, help="pairs of first groups, and of inits")
    options = parser.parse_args(argv)
    if options.world < 2 or options.imports < 1 or options.inits < 1:
        parser.error("--world must be 2 or more, --imports and --inits 1 or more")
    for name in {"ringcomm", options.peer} - set(dist.Backend.backend_list):
        parser.error(f"torch has no backend {name!r}; `make build` installs ringcomm")
    options.json = options.json or harness.default_path(f"startup-w{options.world}")
    return options


def main(argv: list[str]) -> int:
    """Measures all; returns the exit code."""
    options = parse(argv)
    backends = ["ringcomm", options.peer]
    report = Report("startup", options.json)
    table = make_table(["quantity", "what", "value"], f"{options.world} ranks; medians of pairs.")
    steps = (
        lambda: measure_imports(options.imports),
        lambda: measure_first_groups(backends, options.inits, options.world),
        lambda: measure_inits(backends, options.inits, options.world),
    )
    for step in steps:
        # Imports and ranks are children that have been waited for, and so this process's own.
        watch = OthersWatch([os.getpid()])
        records = step()
        weather = Weather(watch.percent()).record()
        records = [{**record, **weather, "verified": True} for record in records]
        report.add(records)
        for row in (row for record in records for row in rows_of(record)):
            table.add_row(*row)
        table.add_section()
    return report.finish(table)


if __name__ == "__main__":
    sys.exit(run_main("startup.py", main))
