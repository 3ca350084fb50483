#!/usr/bin/env python3
"""Compares c10d backends in one run: collectives on the same buffers, alternating in short blocks.

    python benchmarks/all_reduce.py --backends ringcomm,gloo --world 2 --seconds 4

Each result is verified with exact integers before and after the clocks run; of each call the
slowest rank counts. A size is measured again while other programs disturb it, and says so if they
never stop. One JSON line per backend and size is appended to benchmarks/results; table.py makes
README's table of those lines.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

# isort: off
import harness  # before torch: it sets the number of threads
import torch
import torch.distributed as dist

# isort: on
import machine
from harness import Recorder, Team
from interleave import labels_of, open_groups
from operations import OPERATIONS
from point import make_bench, measure_point
from screen import make_console, print_tables
from wording import comparison, microseconds, whole_numbers, words

DEFAULT_SIZES = "1024,16384,262144,4194304,67108864"
DTYPES = ("float32", "float64", "bfloat16", "float16", "int32", "int64")


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line; ends the process with a message when it makes no sense."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--backends",
        type=words,
        default="ringcomm,gloo",
        help="c10d backends; one may be given twice",
    )
    add("--world", type=int, default=2, help="ranks, all on this machine")
    add(
        "--sizes",
        type=whole_numbers,
        default=DEFAULT_SIZES,
        help="bytes of the larger buffer of a rank",
    )
    add("--dtype", choices=DTYPES, default="float32")
    add("--ops", type=words, default="all_reduce", help=f"of {', '.join(OPERATIONS)}")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="nccl needs cuda")
    add("--seconds", type=float, default=4.0, help="per size and operation, for all backends")
    add("--repeats", type=int, default=3, help="at most, while the machine is disturbed")
    add("--json", type=Path, help="append records here (default: benchmarks/results/DATE-...)")
    options = parser.parse_args(argv)
    if options.world < 1 or min(options.sizes) < 1:
        parser.error("--world and --sizes are at least 1")
    for name in set(options.ops) - set(OPERATIONS):
        parser.error(f"--ops: {name!r} is not one of {', '.join(OPERATIONS)}")
    for name in set(options.backends) - set(dist.Backend.backend_list):
        parser.error(f"--backends: torch knows no {name!r}; `make build` installs ringcomm")
    if "nccl" in options.backends and options.device != "cuda":
        parser.error("nccl has no CPU tensors: add --device cuda")
    if options.json is None:
        stem = options.ops[0] if len(options.ops) == 1 else "collectives"
        options.json = harness.default_path(f"{stem}-w{options.world}")
    return options


def run_rank(
    team: Team, options: argparse.Namespace, folder: Path, probe: machine.FlagProbe
) -> None:
    """One rank: every point in turn; rank 0 reports each point's records to the parent."""
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", team.rank % max(1, torch.cuda.device_count()))
        torch.cuda.set_device(device)
    groups = open_groups(team, options.backends, folder)
    bench = make_bench(team, groups, probe, device)
    dtype = getattr(torch, options.dtype)
    for name in options.ops:
        sizes = options.sizes if OPERATIONS[name].has_data else [0]
        for num_bytes in sizes:
            records = measure_point(bench, name, num_bytes, dtype, options.seconds, options.repeats)
            if records:
                team.report(records)
    dist.destroy_process_group()


def progress_line(records: list[dict[str, Any]]) -> str:
    """One finished point in a line."""
    first = records[0]
    times = ", ".join(f"{r['backend']} {microseconds(r['p50_us'])} µs" for r in records)
    ratios = " ".join(filter(None, map(comparison, records)))
    state = "" if first["quiet"] else f"; not quiet ({first['others_busy_percent']:.0f} % others)"
    return f"{first['op']} {first['bytes']:,} bytes: {times}; {ratios}{state}"


def main(argv: list[str]) -> int:
    """Runs the comparison; returns the exit code, 3 when any result was wrong."""
    options = parse(argv)
    console = make_console()
    facts = machine.facts()
    dimensions = {"world_size": options.world, "dtype": options.dtype, "device": options.device}
    recorder = Recorder(options.json, {"kind": "collective", **facts, **dimensions})
    found: list[dict[str, Any]] = []

    def on_message(records: list[dict[str, Any]]) -> None:
        for record in records:
            recorder.write(record)
        found.extend(records)
        console.print(progress_line(records))

    probe = machine.FlagProbe()
    with tempfile.TemporaryDirectory(prefix="ringcomm-bench-") as folder:
        harness.run_ranks(
            options.world, lambda team: run_rank(team, options, Path(folder), probe), on_message
        )
    labels = labels_of(options.backends)
    subject = "ringcomm" if "ringcomm" in labels else labels[0]
    print_tables(console, found, options, facts, subject)
    console.print(f"records: {options.json}")
    is_wrong = any(record["wrong_elems"] for record in found)
    return harness.EXIT_WRONG_RESULTS if is_wrong else harness.EXIT_OK


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
