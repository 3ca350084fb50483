#!/usr/bin/env python3
"""Prints Markdown tables of what gpu/kernel_sweep has measured, beside what the model predicts.

    python benchmarks/sweep_table.py [--cuts] [FILE.jsonl ...]

Reads standard input where no file is named. There is a table for each number of ranks, operation
and type. It shows the plan's own number of blocks and size of regions; --cuts shows the others as
well.
"""

from __future__ import annotations

import argparse
import fileinput
import json
import sys
from collections.abc import Iterable
from itertools import groupby

from cells import Columns, Record, grid_of

from ringcomm.screen import byte_count


def cut_of(point: Record) -> str:
    """How a call is cut into blocks; a copy is not."""
    return f"{point['blocks']}, {point['held_vectors']} vectors" if point["blocks"] else ""


COLUMNS: Columns = (
    ("size", lambda p: byte_count(p["bytes"])),
    "path",
    ("blocks, vectors per thread", cut_of),
    ("predicted, µs", lambda p: f"{p['predicted_us']:.1f}"),
    ("p50, µs", lambda p: f"{p['p50_us']:.1f}"),
    ("p50 / predicted", lambda p: f"{p['p50_us'] / p['predicted_us']:.2f}"),
    ("p99, µs", lambda p: f"{p['p99_us']:.1f}"),
    ("% of a copy", lambda p: f"{100 * p['copy_share']:.0f}"),
    ("wrong", lambda p: str(p["num_wrong"])),
)


def table_of(point: Record) -> tuple[int, str, str]:
    """What the points of a table have in common."""
    return point["ranks"], point["op"], point["dtype"]


def tables(points: Iterable[Record], has_cuts: bool) -> list[str]:
    """The lines of all tables."""
    shown = [p for p in points if p["op"] != "where" and (has_cuts or p["is_plan"])]
    lines = []
    for (ranks, op, dtype), rows in groupby(sorted(shown, key=table_of), table_of):
        in_order = sorted(
            rows, key=lambda p: (p["bytes"], p["path"], p["held_vectors"], not p["is_plan"])
        )
        lines += [f"**{op}, {ranks} ranks, {dtype}**", *grid_of(COLUMNS, 3, in_order), ""]
    return lines


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cuts", action="store_true", help="other blocks and regions as well")
    parser.add_argument("files", nargs="*", metavar="FILE.jsonl", help="lines of kernel_sweep")
    options = parser.parse_args()
    with fileinput.input(options.files, encoding="utf-8") as lines:
        points = [json.loads(line) for line in lines if line.strip()]
    print("\n".join(tables(points, options.cuts)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
