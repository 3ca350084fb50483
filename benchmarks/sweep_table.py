#!/usr/bin/env python3
"""Prints Markdown tables of what gpu/kernel_sweep has measured, beside what the model predicts.

    python benchmarks/sweep_table.py [--cuts] [FILE.jsonl ...]

Reads standard input where no file is named. There is a table for each number of ranks, operation
and type. It shows the plan's own number of blocks and size of regions; --cuts shows the others as
well. Needs only the standard library.
"""

from __future__ import annotations

import argparse
import fileinput
import json
import sys
from collections.abc import Iterable
from itertools import groupby
from typing import Any

Point = dict[str, Any]
CUT = "blocks, vectors per thread"
TIMES = ("predicted, µs", "p50, µs", "p50 / predicted", "p99, µs")
HEADINGS = ("size", "path", CUT, *TIMES, "% of a copy", "wrong")


def size_text(num_bytes: int) -> str:
    """``64 KiB``."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit and num_bytes % unit == 0:
            return f"{num_bytes // unit} {name}"
    return f"{num_bytes} B"


def cells(point: Point) -> list[str]:
    """A row, under HEADINGS."""
    cut = str(point["blocks"] or "")
    cut += f", {point['held_vectors']} vectors" if point["blocks"] else ""
    measured, predicted = point["p50_us"], point["predicted_us"]
    return [
        size_text(point["bytes"]),
        point["path"],
        cut,
        f"{predicted:.1f}",
        f"{measured:.1f}",
        f"{measured / predicted:.2f}",
        f"{point['p99_us']:.1f}",
        f"{100 * point['copy_share']:.0f}",
        str(point["num_wrong"]),
    ]


def table_of(point: Point) -> tuple[int, str, str]:
    """What the points of a table have in common."""
    return point["ranks"], point["op"], point["dtype"]


def tables(points: Iterable[Point], has_cuts: bool) -> list[str]:
    """The lines of all tables."""
    shown = [p for p in points if p["op"] != "where" and (has_cuts or p["is_plan"])]
    lines = []
    for (ranks, op, dtype), rows in groupby(sorted(shown, key=table_of), table_of):
        lines += [f"**{op}, {ranks} ranks, {dtype}**", "", "| " + " | ".join(HEADINGS) + " |"]
        lines.append("|---:|---|---" + "|---:" * (len(HEADINGS) - 3) + "|")
        in_order = sorted(
            rows, key=lambda p: (p["bytes"], p["path"], p["held_vectors"], not p["is_plan"])
        )
        lines += ["| " + " | ".join(cells(point)) + " |" for point in in_order]
        lines.append("")
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
