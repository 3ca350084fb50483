"""Tables of calls: collectives, all libraries, hosts, the floor, updates, losses, LOMO's steps.

Those of docs/benchmarks.md, and what the scripts print. Without torch.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from statistics import median

from cells import (
    CELLS,
    Cell,
    Columns,
    Record,
    Run,
    column_of,
    comparison,
    grid,
    grid_of,
    inverse,
    microseconds,
    milliseconds,
    or_first,
    share_range,
)
from palette import title_of

from ringcomm.screen import byte_count, counted, factor

# A column's header, its cell of a record, and the names that have it.
Compared = tuple[str, Cell, Sequence[str]]
OP_TITLES = {"all_reduce_apart": "`all_reduce`, out of place"}
VERSION = re.compile(r"\d+(\.\d+)+")


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


def collective_lines(runs: list[Run]) -> list[str]:
    """A row per operation and size: times, and those of the other backends over the first one's."""
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


def operation_lines(runs: list[Run]) -> list[str]:
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


def library_lines(runs: list[Run]) -> list[str]:
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


def host_lines(runs: list[Run]) -> list[str]:
    """A row per operation, with a column per size."""
    first = runs[0][0]
    each = "one rank" if first["ranks_per_host"] == 1 else f"{first['ranks_per_host']} ranks"
    link = first["cable"].replace("gbit", " Gbit/s")
    return [
        f"Two network namespaces of one machine as hosts, with {each} each, over an emulated link"
        f" of {link}, {first['dtype']}. Median time of a call over ringcomm in µs, and in brackets"
        " gloo's time / ringcomm's:",
        *operation_lines(runs)[1:],
    ]


def _floor_share(record: Record) -> str:
    share = share_range(inverse(record["ratio"])) if record["ratio"] else "wrong results"
    return _mark(share, record)


def floor_lines(runs: list[Run]) -> list[str]:
    """Times, and the floor's part of them."""
    columns: list[Compared] = [("{}, µs", _time, ["floor"])]
    for variant, name in (("staged", "`all_reduce`"), ("shared", "on shared buffers")):
        columns += [(f"{name}, µs", _time, [variant]), (f"{name}, share", _floor_share, [variant])]
    return [
        "`all_reduce` over ringcomm against the floor: the time to read and write each byte once."
        " Medians, and the floor as a share of them (10–90 %):",
        *_compared("variant", runs, ["ranks", "bytes"], columns),
    ]


def update_lines(runs: list[Run]) -> list[str]:
    """A row per number of parameters."""
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


def loss_lines(runs: list[Run]) -> list[str]:
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


def optimizer_lines(runs: list[Run]) -> list[str]:
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
