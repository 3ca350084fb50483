#!/usr/bin/env python3
"""Measures what ringcomm costs before the first collective: import, init, memory.

    python benchmarks/startup.py --imports 9 --inits 9

Imports are timed in fresh interpreters, torch alone and torch with ringcomm in turn; inits in
freshly forked ranks that meet through a FileStore, backends in turn; memory is read from
/proc/self/smaps. One JSON line per quantity is appended to benchmarks/results.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# isort: off
import harness  # before torch: it sets the number of threads
import torch
import torch.distributed as dist

# isort: on
from ringcomm.bench import machine
from ringcomm.bench.exit_codes import EXIT_OK
from ringcomm.bench.interleave import open_default_group
from ringcomm.bench.memory import mapped_memory
from ringcomm.bench.quantiles import median
from ringcomm.bench.ranks import Team, run_ranks
from ringcomm.bench.records import Recorder, percentiles
from ringcomm.bench.screen import make_console, make_table
from ringcomm.bench.script import run_main
from ringcomm.bench.wording import facts_line

# Printed by a fresh interpreter: seconds for torch, and for ringcomm after it.
IMPORT = (
    "import time; a = time.perf_counter(); import torch; b = time.perf_counter();{more}"
    " c = time.perf_counter(); print(b - a, c - b)"
)
# torch as it is without ringcomm installed: no autoload of its entry point.
ALONE = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
# Touches whatever ringcomm's groups touch: each algorithm of all_reduce, and messages.
USED_BYTES = (1024, 1 << 20, 64 << 20)
# Of a fresh interpreter on a cold disk, many times over.
IMPORT_TIMEOUT_S = 300.0


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
        timeout=IMPORT_TIMEOUT_S,
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


def measure_imports(num_pairs: int) -> dict[str, Any]:
    """Importing torch and ringcomm, over importing torch alone; the first pair fills the caches."""
    pairs = []
    for index in range(num_pairs + 1):
        order = (True, False) if index % 2 else (False, True)
        seconds = {which: _import_seconds(which) for which in order}
        pairs.append((seconds[True], seconds[False]))
    ours, theirs = (list(side) for side in zip(*pairs[1:], strict=True))
    return {"quantity": "import", **_compare(ours, theirs, "torch")}


def _init_rank(team: Team, backend: str, use: bool) -> None:
    """Reports the seconds of init_process_group; with ``use``, also memory before and after use."""
    team.share(None)
    begin = time.perf_counter()
    open_default_group(team, backend)
    init_s = team.share(time.perf_counter() - begin)
    memory: dict[str, dict[str, int]] = {}
    if use:
        memory["after_init"] = mapped_memory()
        for num_bytes in USED_BYTES:
            buffer = torch.zeros(num_bytes // 4)
            dist.all_reduce(buffer)
            dist.broadcast(buffer, 0)
            sending = dist.isend(buffer, (team.rank + 1) % team.world_size)
            dist.recv(torch.empty_like(buffer), (team.rank - 1) % team.world_size)
            assert sending is not None
            sending.wait()
        team.share(None)  # nobody unmaps before all have read
        memory["after_use"] = mapped_memory()
        team.share(None)
    if team.rank == 0:
        team.report((max(init_s), memory))
    dist.destroy_process_group()


def run_init(
    backend: str, world_size: int, use: bool = False
) -> tuple[float, dict[str, dict[str, int]]]:
    """Fresh ranks make one group; the slowest rank's seconds, and rank 0's memory if ``use``."""
    found: list[tuple[float, dict[str, dict[str, int]]]] = []
    run_ranks(world_size, lambda team: _init_rank(team, backend, use), found.append)
    return found[0]


def measure_inits(backends: list[str], num_pairs: int, world_size: int) -> dict[str, Any]:
    """Making the default group, ringcomm's over the other's."""
    seconds: dict[str, list[float]] = {name: [] for name in backends}
    for index in range(num_pairs):
        for name in backends if index % 2 else backends[::-1]:
            seconds[name].append(run_init(name, world_size)[0])
    ours, theirs = (seconds[name] for name in backends)
    return {"quantity": "init", "world_size": world_size, **_compare(ours, theirs, backends[1])}


def measure_memory(world_size: int) -> dict[str, Any]:
    """Shared memory of one ringcomm group, and of that per pair of ranks."""
    _, memory = run_init("ringcomm", world_size, use=True)
    num_pairs = world_size * (world_size - 1) // 2
    per_pair = memory["after_use"]["resident_bytes"] / num_pairs
    record = {"quantity": "memory", "world_size": world_size, **memory}
    return {**record, "resident_bytes_per_pair": per_pair}


def _rows(record: dict[str, Any]) -> list[tuple[str, str]]:
    """What a record says, for people."""
    if record["quantity"] == "memory":
        mib = 1 << 20
        rows = [
            (f"{when}: {what.removesuffix('_bytes')}, MiB", f"{num_bytes / mib:.2f}")
            for when in ("after_init", "after_use")
            for what, num_bytes in record[when].items()
        ]
        per_pair = f"{record['resident_bytes_per_pair'] / mib:.2f}"
        return [*rows, ("after_use: resident per pair, MiB", per_pair)]
    sides = {name: v for name, v in record.items() if isinstance(v, float) and name[-2:] == "_s"}
    rows = [(name.replace("_s", ", s"), f"{v:.3f}") for name, v in sides.items()]
    d = record["difference_s"]
    return [
        *rows,
        ("difference, s (10 to 90 %)", f"{d['p50']:.3f} ({d['p10']:.3f} to {d['p90']:.3f})"),
    ]


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line; ends the process with a message when it makes no sense."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--peer", default="gloo", help="backend whose init ringcomm's is compared with")
    add("--world", type=int, default=2, help="ranks of the groups that are made")
    add("--imports", type=int, default=9, help="pairs of imports")
    add("--inits", type=int, default=9, help="pairs of inits")
    add("--json", type=Path, help="append records here (default: benchmarks/results/DATE-...)")
    options = parser.parse_args(argv)
    if options.world < 2 or options.imports < 1 or options.inits < 1:
        parser.error("--world is at least 2, --imports and --inits at least 1")
    for name in {"ringcomm", options.peer} - set(dist.Backend.backend_list):
        parser.error(f"torch knows no backend {name!r}; `make build` installs ringcomm")
    options.json = options.json or harness.default_path(f"startup-w{options.world}")
    return options


def main(argv: list[str]) -> int:
    """Measures all three; returns the exit code."""
    options = parse(argv)
    console = make_console()
    facts = machine.facts()
    recorder = Recorder(options.json, {"kind": "startup", **facts})
    table = make_table(["quantity", "what", "value"], f"{options.world} ranks; medians of pairs.")
    steps = (
        lambda: measure_imports(options.imports),
        lambda: measure_inits(["ringcomm", options.peer], options.inits, options.world),
        lambda: measure_memory(options.world),
    )
    for step in steps:
        # Imports and ranks are children that have been waited for, and so this process's own.
        watch = machine.OthersWatch([os.getpid()])
        record = step()
        record["others_busy_percent"] = watch.percent()
        record["quiet"] = record["others_busy_percent"] <= machine.MAX_OTHERS_PERCENT
        recorder.write(record)
        for what, value in [*_rows(record), ("others %", f"{record['others_busy_percent']:.1f}")]:
            table.add_row(record["quantity"], what, value)
        table.add_section()
    console.print(facts_line(facts))
    console.print(table)
    console.print(f"records: {options.json}")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(run_main("startup.py", main))
