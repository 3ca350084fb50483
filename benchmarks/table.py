#!/usr/bin/env python3
"""Prints Markdown tables of the newest records: those of docs/benchmarks.md and reliability.md.

    python benchmarks/table.py [--kind floor] [FILE.jsonl ...]

Without files it reads all of benchmarks/results. Without --kind it prints what the pages show where
they have `<!-- table: NAME -->`; tools/site_pages.py puts that there when the site is built. The
backends of a row come from one run. If several runs measured the same point, the newest run with
verified results on a quiet machine counts, else the newest. Kinds without records have no table.

This and what it imports need no torch, which builds of the site do not have.
"""

from __future__ import annotations

import argparse
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from cells import BUSY, RESULTS, Record, Run, facts_line, last_cache
from front_door import DEFAULT_SIZES
from html_report import read_records
from layouts import LAYOUTS, Layout

from _ringcomm.status import EXIT_FAILED, EXIT_OK, run_main
from _ringcomm.values import byte_counts
from ringcomm.screen import counted

Point = tuple[Any, ...]
SHOWN_WORLDS = (2, 4)
SHOWN_BYTES = (0, *byte_counts(DEFAULT_SIZES))
# Kinds of which the page shows some worlds and types.
NARROWED = ("collective", "fused_update", "hosts")


def newest(records: list[Record], layout: Layout) -> list[Run]:
    """For each point, in order, the records of one run.

    Numbers ascend; words come as the records first have them.
    """
    fields = (*layout.table_fields, *layout.row_fields)
    runs: dict[Point, dict[str, Run]] = {}
    for record in records:
        if record["kind"] == layout.kind:
            point = (*machine_of(record), *(record[field] for field in fields))
            runs.setdefault(point, {}).setdefault(record["date"], []).append(record)
    places: dict[Any, int] = {}
    for word in (part for point in runs for part in point if isinstance(part, str)):
        places.setdefault(word, len(places))

    def quality(dated: tuple[str, Run]) -> tuple[bool, str]:
        return all(r["quiet"] and r["verified"] for r in dated[1]), dated[0]

    return [
        max(runs[point].items(), key=quality)[1]
        for point in sorted(runs, key=lambda point: [places.get(part, part) for part in point])
    ]


def machine_of(record: Record) -> Point:
    """What must be equal for figures to stand in one table."""
    machine = record["machine"]
    return machine["cpu"], machine["cores"], last_cache(machine)


def _is_usual(record: Record) -> bool:
    """Whether type, size and number of ranks are what the page shows."""
    return record["kind"] not in NARROWED or (
        record["world_size"] in SHOWN_WORLDS
        and record["dtype"] == "float32"
        and (record["kind"] != "collective" or record["bytes"] in SHOWN_BYTES)
    )


def _markdown(runs: list[Run], layout: Layout) -> str:
    """One table with its heading in front and, below it, where its rows come from."""
    if layout.is_pooled:
        last = max(run[0]["date"] for run in runs)
        runs = [run for run in runs if run[0]["date"][:10] == last[:10]]
        dates = sorted({run[0]["date"] for run in runs})
        facts = {name: fact for name, fact in runs[-1][0].items() if name != "mpi"}
        sources = [f"{facts_line(facts | {'date': last})}; {counted(len(dates), 'run')}"]
    else:
        sources = [*dict.fromkeys(facts_line(run[0]) for run in runs)]
    lines = [*layout.lines(runs), "", *(f"Measured on {source}." for source in sources)]
    noisy = [record for run in runs for record in run if not record["quiet"]]
    reasons = dict.fromkeys(record.get("no_claim") or BUSY for record in noisy)
    return "\n".join([*lines, *(["", f"\\* {'; or '.join(reasons)}."] if reasons else [])])


def tables(records: list[Record], layout: Layout) -> list[str]:
    """The tables of one layout in Markdown."""

    def table_of(run: Run) -> Point:
        return (*machine_of(run[0]), *(run[0][field] for field in layout.table_fields))

    grouped = groupby(newest(records, layout), key=table_of)
    return [_markdown(list(runs), layout) for _, runs in grouped]


def page_tables(records: list[Record]) -> dict[str, str]:
    """What pages show of each layout that has records, by its name."""
    usual = [record for record in records if _is_usual(record)]
    texts = {}
    for name, layout in LAYOUTS.items():
        shown = [r for r in usual if r["kind"] == layout.kind and layout.is_shown(r)]
        if found := tables(shown, layout):
            texts[name] = "\n\n".join(found)
    return texts


def read_results(files: list[Path]) -> list[Record]:
    """The records of files, or of all in benchmarks/results. Raises ValueError."""
    records = read_records(files or sorted(RESULTS.glob("*.jsonl")))
    # Those of libraries named no type at first.
    return [{"dtype": "float32"} | r if r["kind"] == "libraries" else r for r in records]


def main(argv: list[str]) -> int:
    """Prints the tables; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--kind", choices=list(LAYOUTS), help="everything of one kind")
    options = parser.parse_args(argv)
    records = read_results(options.files)
    if options.kind:
        layout = LAYOUTS[options.kind]
        own = [record for record in records if record["kind"] == layout.kind]
        found = tables([r for r in own if not layout.name or layout.is_shown(r)], layout)
    else:
        shown = page_tables(records)
        found = [f"## {LAYOUTS[name].title}\n\n{text}" for name, text in shown.items()]
    if not found:
        print(f"no records of kind {options.kind or 'that a page shows'}", file=sys.stderr)
        return EXIT_FAILED
    print("\n\n".join(found))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(run_main("table.py", main))
