#!/usr/bin/env python3
"""Prints Markdown tables of the newest records, for README and docs/experiments.md.

    python benchmarks/table.py [--kind collective] [FILE.jsonl ...]

Without files it reads all of benchmarks/results. The backends of a row come from one run; where
several runs measured the same point, the newest one with verified results on a quiet machine
counts, else the newest.
"""

from __future__ import annotations

import argparse
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import harness
from wording import byte_count, comparison, facts_line, microseconds

Record = dict[str, Any]
Point = tuple[Any, ...]
# What makes rows of one table, and then what tells its rows apart.
TABLE_FIELDS = {
    "collective": ("op", "world_size", "device", "dtype"),
    "waiting": ("op",),
}
ROW_FIELDS = {"collective": ("bytes",), "waiting": ("world_size", "strangers")}


def newest(records: list[Record], kind: str) -> list[list[Record]]:
    """For each point, in order, the records of one run: one per backend."""
    fields = TABLE_FIELDS[kind] + ROW_FIELDS[kind]
    runs: dict[Point, dict[str, list[Record]]] = {}
    for record in records:
        if record["kind"] == kind:
            point = (*machine_of(record), *(record[field] for field in fields))
            runs.setdefault(point, {}).setdefault(record["date"], []).append(record)
    return [
        max(runs[point].items(), key=lambda run: (_is_clean(run[1]), run[0]))[1]
        for point in sorted(runs)
    ]


def machine_of(record: Record) -> Point:
    """What must be equal for figures to stand in one table."""
    return record["machine"]["cpu"], record["machine"]["cores"]


def _is_clean(records: list[Record]) -> bool:
    return all(record["quiet"] and record["verified"] for record in records)


def _table_of(run: list[Record], kind: str) -> Point:
    return (*machine_of(run[0]), *(run[0][field] for field in TABLE_FIELDS[kind]))


def _row(run: list[Record], kind: str, backends: list[str]) -> list[str]:
    by_backend = {record["backend"]: record for record in run}
    first = run[0]
    cells = [byte_count(first["bytes"])] if kind == "collective" else []
    if kind == "waiting":
        cells = [str(first["world_size"]), str(first["strangers"])]
    found = [by_backend.get(name) for name in backends]
    cells += [microseconds(r["p50_us"]) if r else "–" for r in found]
    return cells + [comparison(r) if r else "–" for r in found[1:]]


def _markdown(runs: list[list[Record]], kind: str) -> str:
    """One table with its heading in front and, below it, where its rows come from."""
    first = runs[0][0]
    backends: list[str] = []
    for record in (record for run in runs for record in run):
        if record["backend"] not in backends:
            backends.append(record["backend"])
    subjects = {r["ratio"]["over"] for run in runs for r in run if r["ratio"]}
    backends.sort(key=lambda name: name not in subjects)
    headers = {"collective": ["bytes"], "waiting": ["ranks", "strangers"]}[kind]
    headers += [f"{name}, µs" for name in backends]
    headers += [f"{name} / {backends[0]} (10–90 %)" for name in backends[1:]]
    details = {
        "collective": lambda: f"{first['world_size']} ranks, {first['dtype']}, {first['device']}",
        "waiting": lambda: "any number of ranks",
    }
    lines = [f"`{first['op']}`, {details[kind]()}; median of calls, the slowest rank counts:", ""]
    lines += [f"| {' | '.join(headers)} |", "|" + "---:|" * len(headers)]
    lines += [f"| {' | '.join(_row(run, kind, backends))} |" for run in runs]
    sources = sorted({facts_line(run[0]) for run in runs})
    lines += ["", *(f"Measured on {source}." for source in sources)]
    if not all(record["quiet"] for run in runs for record in run):
        lines.append("\\* other programs used more than 10 % of the machine.")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Prints the tables; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--kind", choices=sorted(TABLE_FIELDS), default="collective")
    options = parser.parse_args(argv)
    files = options.files or sorted(harness.RESULTS.glob("*.jsonl"))
    records = harness.read_records(files)
    runs = newest(records, options.kind)
    if not runs:
        print(f"no records of kind {options.kind!r} in {len(files)} file(s)", file=sys.stderr)
        return harness.EXIT_FAILED
    tables = groupby(runs, key=lambda run: _table_of(run, options.kind))
    print("\n\n".join(_markdown(list(rows), options.kind) for _, rows in tables))
    return harness.EXIT_OK


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
