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
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from cells import (
    BUSY,
    CELLS,
    RESULTS,
    Cell,
    Columns,
    column_of,
    comparison,
    facts_line,
    grid,
    grid_of,
    inverse,
    microseconds,
    milliseconds,
    or_first,
    share_range,
)
from death_tables import death_lines
from front_door import DEFAULT_SIZES
from html_report import read_records
from palette import title_of
from system_tables import (
    inference_lines,
    offload_lines,
    pipeline_lines,
    planner_lines,
    system_lines,
    tensor_lines,
)

from _ringcomm.status import EXIT_FAILED, EXIT_OK, run_main
from _ringcomm.values import byte_counts
from ringcomm.screen import byte_count, counted, factor

Record = dict[str, Any]
Run = list[Record]  # one point: a record per backend, or one of a race
Point = tuple[Any, ...]
# A column's header, its cell of a record, and the names that have it.
Compared = tuple[str, Cell, Sequence[str]]
# In detail, for 2 and 4 ranks; the other operations share one table.
DETAILED_OPS = ("all_reduce", "all_reduce_apart", "barrier")
OP_TITLES = {"all_reduce_apart": "`all_reduce`, out of place"}
SHOWN_WORLDS = (2, 4)
SHOWN_BYTES = (0, *byte_counts(DEFAULT_SIZES))
# Kinds of which the page shows all worlds and types.
SHOWN_WHOLE = (
    *("cross_entropy", "inference", "lomo", "systems", "offload", "tensor_parallel"),
    *("pipeline", "planner", "libraries", "deaths"),
)
VERSION = re.compile(r"\d+(\.\d+)+")


@dataclass(frozen=True)
class Layout:
    """How the records of one kind become tables.

    Attributes:
        title: of its section where all are printed.
        kind: of the records.
        table_fields: what makes rows of one table.
        row_fields: what tells its rows apart, or its rows and columns.
        lines: heading and grid of one table.
        is_shown: whether a page shows a record.
        name: of a second layout of a kind.
        is_pooled: whether a table is of all runs of the newest record's day.
    """

    title: str
    kind: str
    table_fields: tuple[str, ...]
    row_fields: tuple[str, ...]
    lines: Callable[[list[Run]], list[str]]
    is_shown: Callable[[Record], bool] = lambda record: True
    name: str = ""
    is_pooled: bool = False


def newest(records: list[Record], layout: Layout) -> list[Run]:
    """For each point, in order, the records of one run.

    Numbers ascend; words come as the records first have them.
    """
    fields = layout.table_fields + layout.row_fields
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
    return record["machine"]["cpu"], record["machine"]["cores"]


def _by(field: str, run: Run) -> dict[str, Record]:
    return {record[field]: record for record in run}


def _mark(text: str, record: Record) -> str:
    """With an asterisk when the machine was disturbed."""
    return text if record["quiet"] else f"{text} *"


def _backends(runs: list[Run]) -> list[str]:
    """Of all rows; the one that the others are compared with is the first."""
    backends = list(dict.fromkeys(record["backend"] for run in runs for record in run))
    subjects = {r["ratio"]["over"] for run in runs for r in run if r["ratio"]}
    return sorted(backends, key=lambda name: name not in subjects)


def _compared(
    field: str,
    runs: list[Run],
    words: Columns,
    columns: list[Compared],
    num_words: int = 0,
) -> list[str]:
    """A row per point: ``words`` of its first record, and columns of each of its names.

    ``field`` holds a record's name. A column is a header, in which {} is the name, a cell, and the
    names that have it. The first ``num_words`` columns are words.
    """
    first = [column_of(word) for word in words]
    headers = [header for header, _ in first]
    headers += [header.format(title_of(name)) for header, _, names in columns for name in names]
    rows = []
    for run in runs:
        found = _by(field, run)
        cells = [
            cell(found[name]) if name in found else "–"
            for _, cell, names in columns
            for name in names
        ]
        rows.append([*(cell(run[0]) for _, cell in first), *cells])
    return grid(headers, num_words, rows)


def _time(record: Record) -> str:
    return microseconds(record["p50_us"])


def _collective_lines(runs: list[Run]) -> list[str]:
    first = runs[0][0]
    subject, *others = _backends(runs)
    words: Columns = [
        ("operation", lambda r: OP_TITLES.get(r["op"], f"`{r['op']}`")),
        ("bytes", lambda r: byte_count(r["bytes"]) if r["bytes"] else "–"),
    ]
    columns: list[Compared] = [
        ("{}, µs", _time, [subject, *others]),
        (f"{{}} / {subject} (10–90 %)", comparison, others),
    ]
    return [
        f"{first['world_size']} ranks, {first['dtype']}, {first['device']}. Median time of a call"
        " on its slowest rank:",
        *_compared("backend", runs, words, columns, 1),
    ]


def _operation_lines(runs: list[Run]) -> list[str]:
    """A row per operation, with a column per size."""
    first = runs[0][0]
    ours, theirs = _backends(runs)[:2]
    sizes = sorted({run[0]["bytes"] for run in runs})
    cells = {}
    for run in runs:
        mine, other = (_by("backend", run).get(name) for name in (ours, theirs))
        times = f" ({factor(other['ratio']['p50'])}×)" if other and other["ratio"] else ""
        text = f"{microseconds(mine['p50_us'])}{times}" if mine else "–"
        cells[run[0]["op"], run[0]["bytes"]] = _mark(text, run[0])
    rows = [
        [f"`{op}`", *(cells.get((op, size), "–") for size in sizes)]
        for op in dict.fromkeys(run[0]["op"] for run in runs)
    ]
    return [
        f"{first['world_size']} ranks, {first['dtype']}, {first['device']}. Median time of a call"
        f" over {ours} in µs, and in brackets {theirs}'s time / {ours}'s:",
        *grid(["operation", *map(byte_count, sizes)], 1, rows),
    ]


def _library_cell(records: list[Record]) -> str:
    """Of all runs: the median time, and the median and the range of the ratio."""
    if not all(record["verified"] for record in records):
        return "wrong results"
    text = microseconds(median(record["p50_us"] for record in records))
    if ratios := sorted(record["ratio"]["p50"] for record in records if record["ratio"]):
        least, most = factor(ratios[0]), factor(ratios[-1])
        ends = f", {least}–{most}" if least != most else ""
        text += f" ({factor(median(ratios))}×{ends})"
    return text if all(record["quiet"] for record in records) else f"{text} *"


def _library_lines(runs: list[Run]) -> list[str]:
    """A row per library, with a column per size."""
    first = runs[0][0]
    found: dict[str, dict[int, list[Record]]] = {}
    for record in itertools.chain.from_iterable(runs):
        version = VERSION.search(record.get("mpi", "")) if "MPI" in record["way"] else None
        name = f"{record['way']} {version[0]}" if version else record["way"]
        found.setdefault(name, {}).setdefault(record["bytes"], []).append(record)
    sizes = sorted({run[0]["bytes"] for run in runs})
    every_run = [record["way"] for record in runs[0] if "MPI" not in record["way"]]
    rows = [
        [
            name,
            *(_library_cell(found[name][size]) if size in found[name] else "–" for size in sizes),
        ]
        for name in [*every_run, *sorted(found.keys() - set(every_run))]
    ]
    subject = next(record["ratio"]["over"] for run in runs for record in run if record["ratio"])
    op = f"`{first['op']}`" + (" in place" if first["op"] == "all_reduce" else "")
    return [
        f"{op}, {first['world_size']} ranks, float32. Median time of a call in µs, and in brackets"
        f" the time over that of {subject} in the same run: the median and the range of the runs."
        " A call's time is that of a block of calls on its slowest rank, over the calls."
        " `torch alone` is the call over a backend that moves nothing, the part that is torch's"
        " own:",
        *grid(["library", *map(byte_count, sizes)], 1, rows),
    ]


def _host_lines(runs: list[Run]) -> list[str]:
    first = runs[0][0]
    each = "one rank" if first["ranks_per_host"] == 1 else f"{first['ranks_per_host']} ranks"
    link = first["cable"].replace("gbit", " Gbit/s")
    return [
        f"Two network namespaces of one machine as hosts, with {each} each, over an emulated link"
        f" of {link}, {first['dtype']}. Median time of a call over ringcomm in µs, and in brackets"
        " gloo's time / ringcomm's:",
        *_operation_lines(runs)[1:],
    ]


def _floor_share(record: Record) -> str:
    share = share_range(inverse(record["ratio"])) if record["ratio"] else "wrong results"
    return _mark(share, record)


def _floor_lines(runs: list[Run]) -> list[str]:
    """Times, and the floor's part of them."""
    columns: list[Compared] = [("{}, µs", _time, ["floor"])]
    for variant, name in (("staged", "`all_reduce`"), ("shared", "on shared buffers")):
        columns += [(f"{name}, µs", _time, [variant]), (f"{name}, share", _floor_share, [variant])]
    return [
        "`all_reduce` over ringcomm against the floor: the time to read and write each byte once."
        " Medians, and the floor as a share of them (10–90 %):",
        *_compared("variant", runs, ["ranks", "bytes"], columns),
    ]


def _update_lines(runs: list[Run]) -> list[str]:
    first = runs[0][0]
    subject, *others = _by("way", runs[0])
    names = {"zero1": "ZeRO-1 over ringcomm", "ringcomm": "DDP over ringcomm", "gloo": "over Gloo"}
    columns: list[Compared] = [("{}, µs", _time, [subject])]
    columns += [(f"{names.get(n, n)} / {subject}", comparison, [n]) for n in others]
    return [
        f"Gradients averaged and parameters updated ({first['optimizer']}), {first['world_size']}"
        f" ranks, {first['dtype']}. Median time of a step on its slowest rank (10–90 %):",
        *_compared("way", runs, [("parameters", CELLS["bytes"])], columns),
    ]


def _loss_lines(runs: list[Run]) -> list[str]:
    """Forward and backward: times, and memory beyond the logits."""
    first = runs[0][0]
    ways = list(dict.fromkeys(record["way"] for run in runs for record in run))
    where = counted(first["num_threads"], "thread")
    if first["world_size"] > 1:
        where = f"{first['world_size']} ranks of {where}, against one rank with all classes"
    columns: list[Compared] = [
        ("{}, ms", lambda r: milliseconds(r["p50_us"]), ways),
        (f"{{}} / {ways[0]} (10–90 %)", comparison, ways[1:]),
        ("{}, MiB", lambda r: str(r["extra_bytes"] >> 20), [w for w in ways if w != "copy"]),
    ]
    # Until 28 November 2026; with several ranks both forms are the same.
    is_old = first["world_size"] == 1 and "in forward" not in ways
    note = ' "In place" is `inplace="forward"` here: `True` was not measured.' if is_old else ""
    return [
        f"Forward and backward of {first['num_tokens']:,} tokens on {first['device']}, {where}."
        f"{note} Medians:",
        *_compared("way", runs, ["type", "classes"], columns, 1),
    ]


def _optimizer_lines(runs: list[Run]) -> list[str]:
    """Whole steps by optimizer: times, and gradients that are kept at a time."""
    first = runs[0][0]
    ranks = (
        f"{first['world_size']} ranks, torch's with DDP" if first["world_size"] > 1 else "1 rank"
    )
    columns: Columns = [
        *("optimizer", "p50, ms", "p99, ms"),
        ("gradients, MiB", lambda r: f"{r['grad_bytes'] / 2**20:.2f}"),
        (f"time / {first['way']}'s (10–90 %)", or_first),
    ]
    return [
        f"Training steps: {ranks}, {first['num_params']:,} parameters,"
        f" {first['rows_per_rank']} × {first['tokens_per_row']} tokens per rank. The largest weight"
        f" is {first['largest_weight_bytes'] / 2**20:.2f} MiB:",
        *grid_of(columns, 1, runs[0]),
    ]


def _is_usual(record: Record) -> bool:
    """Whether type, size and number of ranks are what the page shows; some kinds do not say."""
    return record["kind"] in SHOWN_WHOLE or (
        record.get("world_size") in SHOWN_WORLDS
        and record.get("dtype", "float32") == "float32"
        and (record["kind"] != "collective" or record["bytes"] in SHOWN_BYTES)
    )


_SWEEP = ("world_size", "device", "dtype")
_STEPS = ("world_size", "num_params", "rows_per_rank", "tokens_per_row")
# Only the newest model of a shape.
_SYSTEMS = ("world_size", "rows_per_rank", "tokens_per_row")
# In the page's order.
_LAYOUTS = (
    Layout(
        "Collectives",
        "collective",
        _SWEEP,
        ("op", "bytes"),
        _collective_lines,
        lambda r: r["op"] in DETAILED_OPS,
    ),
    Layout(
        "Other collectives, by size",
        "collective",
        _SWEEP,
        ("op", "bytes"),
        _operation_lines,
        lambda r: r["op"] not in DETAILED_OPS and r["world_size"] == 2,
        name="operations",
    ),
    Layout(
        "All libraries",
        "libraries",
        ("op", "world_size"),
        ("bytes", "date"),
        _library_lines,
        is_pooled=True,
    ),
    Layout("Between two hosts", "hosts", ("cable", "ranks_per_host"), ("op", "bytes"), _host_lines),
    Layout("Memory bandwidth as the floor", "floor", (), ("world_size", "bytes"), _floor_lines),
    Layout("Fused update", "fused_update", ("world_size", "optimizer"), ("bytes",), _update_lines),
    Layout(
        "Cross-entropy",
        "cross_entropy",
        ("world_size", "device", "num_threads", "num_tokens"),
        ("dtype", "vocab_size"),
        _loss_lines,
    ),
    Layout(
        "LOMO",
        "lomo",
        _STEPS,
        (),
        _optimizer_lines,
        lambda r: r["rows_per_rank"] * r["tokens_per_row"] == 512,
    ),
    Layout("Training systems", "systems", _SYSTEMS, (), system_lines),
    Layout(
        "Tensor parallelism",
        "tensor_parallel",
        ("world_size", "size"),
        ("rows", "tokens"),
        tensor_lines,
    ),
    Layout(
        "Tensor-parallel inference",
        "inference",
        ("world_size", "dtype"),
        ("what", "size_bytes"),
        inference_lines,
    ),
    Layout(
        "Pipeline parallelism",
        "pipeline",
        ("stages",),
        ("world_size", "schedule", "num_microbatches"),
        pipeline_lines,
        lambda r: r["num_microbatches"] == 4 * r["world_size"],
    ),
    Layout("Planner", "planner", ("world_size", "width", "layers"), ("rows",), planner_lines),
    Layout("Offload", "offload", (), (), offload_lines),
    Layout("Deaths", "deaths", ("strangers",), ("backend", "moment", "world_size"), death_lines),
)
LAYOUTS = {layout.name or layout.kind: layout for layout in _LAYOUTS}


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
    return read_records(files or sorted(RESULTS.glob("*.jsonl")))


def main(argv: list[str]) -> int:
    """Prints the tables; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--kind", choices=list(LAYOUTS), help="everything of one kind")
    options = parser.parse_args(argv)
    records = read_results(options.files)
    if options.kind:
        found = tables(records, LAYOUTS[options.kind])
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
