"""Examines this machine and a group of ringcomm on it, and says what deserves attention.

Cores and caches, limits of the container, versions, RINGCOMM_* variables; then it starts ranks,
makes a group, and measures hand-over between CPUs, all_reduce, messages and memory per pair of
ranks. The status is 1 when the group cannot be made.
"""

from __future__ import annotations

import argparse
import json
import os

from ringcomm.measure.ranks import MAX_WORLD_SIZE, joined_world_size
from ringcomm.measure.screen import make_console

HELP = "examine this machine and a group on it"
MOST_BY_DEFAULT = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many ranks, and in which form to report."""
    usable = len(os.sched_getaffinity(0))
    add = parser.add_argument
    add(
        "--world-size",
        type=int,
        default=max(2, min(MOST_BY_DEFAULT, usable)),
        help="ranks to start, 1 to 64 (default: one per CPU, 2 to 4)",
    )
    add("--seconds", type=float, default=0.3, help="per size that is timed (default: %(default)s)")
    add("--json", action="store_true", help="print the report as one JSON object")


def run(options: argparse.Namespace) -> int:
    """Prints the report."""
    if not 1 <= options.world_size <= MAX_WORLD_SIZE:
        options.parser.error(f"--world-size is 1 to {MAX_WORLD_SIZE}, got {options.world_size}")
    if options.seconds < 0:
        options.parser.error("--seconds is not negative")
    if joined_world_size() is not None:
        options.parser.error("it starts its own ranks: run it without torchrun")
    from ringcomm.doctor.report import examine, print_report

    console = None if options.json else make_console()  # before it measures
    report = examine(options.world_size, options.seconds)
    if console is None:
        print(json.dumps(report, allow_nan=False))
    else:
        print_report(console, report)
    return 1 if "errors" in report["group"] else 0
