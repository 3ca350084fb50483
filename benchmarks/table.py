#!/usr/bin/env python3
"""Prints Markdown tables of the newest records, or writes README's.

    python benchmarks/table.py [--kind collective] [FILE.jsonl ...]
    python benchmarks/table.py --write README.md

Without files it reads all of benchmarks/results. The backends of a row come from one run; where
several runs measured the same point, the newest one with verified results on a quiet machine
counts, else the newest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import harness

from ringcomm.bench.exit_codes import EXIT_FAILED, EXIT_OK
from ringcomm.bench.records import read_records
from ringcomm.bench.script import run_main
from ringcomm.bench.wording import byte_count, comparison, facts_line, microseconds

Record = dict[str, Any]
Point = tuple[Any, ...]
# What makes rows of one table, and then what tells its rows (and the columns of races) apart.
TABLE_FIELDS = {
    "collective": ("world_size", "device", "dtype"),
    "waiting": ("op",),
    "races": ("world_size", "device", "size"),
}
ROW_FIELDS = {
    "collective": ("op", "bytes"),
    "waiting": ("world_size", "strangers"),
    "races": ("system", "tokens"),
}
README_KINDS = ("collective", "races")
README_WORLDS = (2, 4)
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


def newest(records: list[Record], kind: str) -> list[list[Record]]:
    """For each point, in order, the records of one run: one per backend, or the one of a race.

    Numbers ascend; words come as the records first have them.
    """
    fields = TABLE_FIELDS[kind] + ROW_FIELDS[kind]
    runs: dict[Point, dict[str, list[Record]]] = {}
    for record in records:
        if record["kind"] == kind:
            point = (*machine_of(record), *(record[field] for field in fields))
            runs.setdefault(point, {}).setdefault(record["date"], []).append(record)
    places: dict[Any, int] = {}
    for word in (part for point in runs for part in point if isinstance(part, str)):
        places.setdefault(word, len(places))
    return [
        max(runs[point].items(), key=lambda run: (_is_clean(run[1]), run[0]))[1]
        for point in sorted(runs, key=lambda point: [places.get(part, part) for part in point])
    ]


def machine_of(record: Record) -> Point:
    """What must be equal for figures to stand in one table."""
    return record["machine"]["cpu"], record["machine"]["cores"]


def _is_clean(records: list[Record]) -> bool:
    return all(record["quiet"] and record["verified"] for record in records)


def _table_of(run: list[Record], kind: str) -> Point:
    return (*machine_of(run[0]), *(run[0][field] for field in TABLE_FIELDS[kind]))


def _grid(headers: list[str], num_words: int, rows: Sequence[list[str]]) -> list[str]:
    """A table whose first ``num_words`` columns are words, and the others figures."""
    rule = "|" + "---|" * num_words + "---:|" * (len(headers) - num_words)
    return [f"| {' | '.join(headers)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)]


def _timing_row(run: list[Record], kind: str, backends: list[str]) -> list[str]:
    by_backend = {record["backend"]: record for record in run}
    first = run[0]
    if kind == "collective":
        cells = [f"`{first['op']}`", byte_count(first["bytes"]) if first["bytes"] else "–"]
    else:
        cells = [str(first["world_size"]), str(first["strangers"])]
    found = [by_backend.get(name) for name in backends]
    cells += [microseconds(r["p50_us"]) if r else "–" for r in found]
    return cells + [comparison(r) if r else "–" for r in found[1:]]


def _timing_lines(runs: list[list[Record]], kind: str) -> list[str]:
    """Times of calls: a row per point, with a column per backend."""
    first = runs[0][0]
    backends = list(dict.fromkeys(record["backend"] for run in runs for record in run))
    subjects = {r["ratio"]["over"] for run in runs for r in run if r["ratio"]}
    backends.sort(key=lambda name: name not in subjects)
    if kind == "collective":
        title = f"{first['world_size']} ranks, {first['dtype']}, {first['device']}"
        headers = ["operation", "bytes"]
    else:
        title, headers = f"`{first['op']}`, any number of ranks", ["ranks", "strangers"]
    headers += [f"{name}, µs" for name in backends]
    headers += [f"{name} / {backends[0]} (10–90 %)" for name in backends[1:]]
    rows = [_timing_row(run, kind, backends) for run in runs]
    num_words = 1 if kind == "collective" else 0
    return [
        f"{title}; median of calls, the slowest rank counts:",
        "",
        *_grid(headers, num_words, rows),
    ]


def _race_lines(runs: list[list[Record]]) -> list[str]:
    """Ratios of training steps: a row per system, with a column per number of tokens."""
    records = [run[0] for run in runs]
    first = records[0]
    columns = {r["tokens"]: f"{r['rows_per_rank']} × {r['tokens_per_row']}" for r in records}
    cells = {(r["system"], r["tokens"]): comparison(r) for r in records}
    rows = [
        [system, *(cells.get((system, tokens), "–") for tokens in columns)]
        for system in dict.fromkeys(r["system"] for r in records)
    ]
    headers = ["system", *(f"{name}: {shape} per rank" for name, shape in columns.items())]
    ours, theirs = first["backends"]
    return [
        f"Training steps, {theirs} / {ours}, by tokens: {first['world_size']} ranks,"
        f" {first['num_params']:,} parameters, {first['device']}; median of pairs of neighbouring"
        " steps (10–90 %), the slowest rank counts:",
        "",
        *_grid(headers, 1, rows),
    ]


def _markdown(runs: list[list[Record]], kind: str) -> str:
    """One table with its heading in front and, below it, where its rows come from."""
    lines = _race_lines(runs) if kind == "races" else _timing_lines(runs, kind)
    sources = dict.fromkeys(facts_line(run[0]) for run in runs)
    lines += ["", *(f"Measured on {source}." for source in sources)]
    busy = "other programs used more than 10 % of the machine"
    noisy = [record for run in runs for record in run if not record["quiet"]]
    reasons = dict.fromkeys(record.get("no_claim") or busy for record in noisy)
    return "\n".join([*lines, *(["", f"\\* {'; or '.join(reasons)}."] if reasons else [])])


def tables(records: list[Record], kind: str) -> list[str]:
    """The tables of one kind in Markdown."""
    grouped = groupby(newest(records, kind), key=lambda run: _table_of(run, kind))
    return [_markdown(list(runs), kind) for _, runs in grouped]


def readme_tables(records: list[Record]) -> list[str]:
    """README's tables: collectives in the usual type, then races."""
    chosen = [
        record
        for record in records
        if record.get("world_size") in README_WORLDS and record.get("dtype") in (None, "float32")
    ]
    return [text for kind in README_KINDS for text in tables(chosen, kind)]


def with_tables(text: str, written: list[str]) -> str:
    """``text`` with the tables in place of what stands between the marks. Raises ValueError."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"no line {BEGIN} with {END} after it")
    return f"{head}{begin}\n\n" + "\n\n".join(written) + f"\n\n{end}{tail}"


def main(argv: list[str]) -> int:
    """Prints or writes the tables; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.jsonl")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--kind", choices=sorted(TABLE_FIELDS), default="collective")
    what.add_argument(
        "--write",
        type=Path,
        metavar="README.md",
        help="put the tables of collectives and races between its two marks",
    )
    options = parser.parse_args(argv)
    files = options.files or sorted(harness.RESULTS.glob("*.jsonl"))
    records = read_records(files)
    found = readme_tables(records) if options.write else tables(records, options.kind)
    if not found:
        kinds = " or ".join(README_KINDS) if options.write else options.kind
        print(f"no records of kind {kinds} in {len(files)} file(s)", file=sys.stderr)
        return EXIT_FAILED
    if options.write:
        text = options.write.read_text(encoding="utf-8")
        options.write.write_text(with_tables(text, found), encoding="utf-8")
    else:
        print("\n\n".join(found))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(run_main("table.py", main))
