"""How the records of each kind become tables: those of the pages, and what scripts print.

Without torch, which builds of the site do not have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Any, NamedTuple

from cells import (
    CELLS,
    Cell,
    Columns,
    Record,
    Run,
    before_after,
    column_of,
    comparison,
    grid,
    grid_of,
    microseconds,
    milliseconds,
    or_first,
    share_range,
    title_of,
)

from ringcomm.screen import byte_count, counted, factor

Form = Callable[[list[Run]], list[str]]  # of the points of a table, its grid

# ---- forms


def by_record(num_words: int, *columns: str | tuple[str, Cell]) -> Form:
    """A row per record; the first ``num_words`` columns are words."""
    return lambda runs: grid_of(columns, num_words, [*chain(*runs)])


def by_point(
    field: str,
    num_words: int,
    words: Columns,
    *columns: tuple[str, Cell, Callable[[list[str]], list[str]]],
    titles: Mapping[str, str] | None = None,
) -> Form:
    """A row per point: ``words`` of its first record, and columns of each of its contenders.

    ``field`` holds a contender's name. A column is a header, in which {} is the name and {over} the
    one with which the others are compared, a cell, and which of the names have it, of which that
    one is the first. ``titles`` replace names.
    """

    def form(runs: list[Run]) -> list[str]:
        subjects = {r["ratio"]["over"] for r in chain(*runs) if r["ratio"]}
        names = list(dict.fromkeys(r[field] for r in chain(*runs)))
        names.sort(key=lambda name: name not in subjects)
        first = [column_of(word) for word in words]
        shown = [
            (header.format((titles or {}).get(name) or title_of(name), over=names[0]), cell, name)
            for header, cell, chosen in columns
            for name in chosen(names)
        ]
        rows = []
        for run in runs:
            found = {record[field]: record for record in run}
            cells = [cell(found[name]) if name in found else "–" for _, cell, name in shown]
            rows.append([*(cell(run[0]) for _, cell in first), *cells])
        headers = [header for header, _ in first] + [header for header, _, _ in shown]
        return grid(headers, num_words, rows)

    return form


def crossed(
    header: str,
    row_of: Cell,
    field: str,
    cell: Callable[[list[Record]], str],
    order: Callable[[str], Any] = lambda row: 0,
) -> Form:
    """A column per number of bytes, which ``field`` holds, and a row per name."""

    def form(runs: list[Run]) -> list[str]:
        found: dict[str, dict[int | None, list[Record]]] = {}
        for record in chain(*runs):
            found.setdefault(row_of(record), {}).setdefault(record[field], []).append(record)
        sizes = sorted({run[0][field] for run in runs}, key=lambda size: (size is None, size))
        headers = ["token" if size is None else byte_count(size) for size in sizes]
        rows = [
            [name, *(cell(found[name][size]) if size in found[name] else "–" for size in sizes)]
            for name in sorted(found, key=order)
        ]
        return grid([header, *headers], 1, rows)

    return form


def _all(names: list[str]) -> list[str]:
    return names


def _first(names: list[str]) -> list[str]:
    return names[:1]


def _others(names: list[str]) -> list[str]:
    return names[1:]


def _mark(text: str, record: Record) -> str:
    """With an asterisk when the machine was disturbed."""
    return text if record["quiet"] else f"{text} *"


def _time(record: Record) -> str:
    return microseconds(record["p50_us"])


# ---- calls

OP_TITLES = {"all_reduce_apart": "`all_reduce`, out of place"}
VERSION = re.compile(r"\d+(\.\d+)+")


def _operation_cell(records: list[Record]) -> str:
    """ringcomm's time, and the next backend's over it."""
    mine, *others = records
    ratio = others[0]["ratio"] if others else None
    times = f" ({factor(ratio['p50'])}×)" if ratio else ""
    return _mark(f"{_time(mine)}{times}", mine)


OPERATIONS = crossed("operation", lambda r: f"`{r['op']}`", "bytes", _operation_cell)


def _library(record: Record) -> str:
    version = VERSION.search(record.get("mpi", "")) if "MPI" in record["way"] else None
    return f"{record['way']} {version[0]}" if version else str(record["way"])


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


def _of_libraries(run: Run) -> str:
    first = run[0]
    subject = next(record["ratio"]["over"] for record in run if record["ratio"])
    op = f"`{first['op']}`" + (" in place" if first["op"] == "all_reduce" else "")
    return (
        f"{op}, {first['world_size']} ranks, {first['dtype']}. Median time of a call in µs, and in"
        f" brackets the time over {subject}'s in the same run: the median and range of runs."
        " A call's time is that of a block of calls on its slowest rank, over the calls."
        " `torch alone` is the call over a backend that moves nothing, the part that is torch's"
        " own, `torch copy` each rank's copy of as many bytes:"
    )


def _of_hosts(run: Run) -> str:
    first = run[0]
    each = "one rank" if first["ranks_per_host"] == 1 else f"{first['ranks_per_host']} ranks"
    link = first["cable"].replace("gbit", " Gbit/s")
    return (
        f"Two network namespaces of one machine as hosts, with {each} each, over an emulated link"
        f" of {link}, {first['dtype']}. Median time of a call over ringcomm in µs, and in brackets"
        " gloo's time / ringcomm's:"
    )


# Of what each record of a collective has, the calls that no floor but memory's bounds.
FLOOR_TITLES = {
    "all_reduce": "`all_reduce`",
    "all_reduce_shared": "`all_reduce` on shared buffers",
}


def _floor_share(record: Record) -> str:
    before, after = record["floor_us"].values()
    return _mark(f"{50 * (before + after) / record['p50_us']:.0f} %", record)


def _of_losses(run: Run) -> str:
    first = run[0]
    where = counted(first["num_threads"], "thread")
    if first["world_size"] > 1:
        where = f"{first['world_size']} ranks of {where}, against one rank with all classes"
    # Until 28 November 2026; with several ranks both forms are the same.
    is_old = first["world_size"] == 1 and all(record["way"] != "in forward" for record in run)
    note = ' "In place" is `inplace="forward"` here: `True` was not measured.' if is_old else ""
    return (
        f"Forward and backward of {first['num_tokens']:,} tokens on {first['device']}, {where}."
        f"{note} Medians:"
    )


def _inference_cell(records: list[Record]) -> str:
    (record,) = records
    if not record["verified"]:
        return "other tokens" if record["what"] == "token" else "wrong results"
    ratio = record["ratio"]
    return f"{_time(record)} ({factor(ratio['p50'])}×)" if ratio else _time(record)


# ---- training systems


def _communication(record: Record) -> str:
    share = record.get("communication_share")
    return share_range(share) if share else ""


WHY_NEGATIVE = (
    "`communication` is the part of a step that the same step over a backend that sends nothing"
    " does not take. The part can be negative: over another backend than ringcomm, ZeRO pads shards"
    " of different sizes and divides by the number of ranks in passes of its own, which over"
    " ringcomm are part of the collective. If these passes take longer than the communication that"
    " is left out, the step that sends nothing is the longer one. A share whose 10 and 90 % points"
    " have different signs cannot be told from 0."
)


def _mib(*names: str) -> Cell:
    return lambda record: f"{sum(record[f'{name}_bytes'] for name in names) / 2**20:.1f}"


def _formula(record: Record) -> str:
    """The planner knows no formula of some systems."""
    return "–" if record["formula_bytes"] is None else _mib("formula")(record)


def _sent(record: Record) -> str:
    return f"({_formula(record)})" if record["sent_bytes"] is None else _mib("sent")(record)


class SystemColumn(NamedTuple):
    """A column of the tables of training systems: the page's, and what systems.py prints."""

    header: str
    cell: Cell
    legend: str
    where: str = "page"  # and with --all; or "all" for --all alone, "always" also without it
    needs: str = "system"  # some record has this field, or there is no such column


def system_columns(run: Run) -> list[SystemColumn]:
    """Those of these records."""
    first = run[0]["system"]
    over = "time of a step (10th to 90th percentile) / that of"
    columns = [
        SystemColumn("system", lambda r: str(r["system"]), "", "always"),
        SystemColumn("loss", lambda r: f"{r['loss']:.4f}", "of the last verified step"),
        SystemColumn("p50, ms", CELLS["p50, ms"], "time of a step, median", "always"),
        SystemColumn("p99, ms", CELLS["p99, ms"], "99th percentile of that time"),
        SystemColumn(f"time / {first}'s (10–90 %)", or_first, f"{over} the first system", "always"),
        SystemColumn(
            "time / ringcomm's",
            lambda r: comparison(r | {"ratio": r.get("over_ringcomm")}),
            f"{over} the same system over ringcomm",
            where="always",
            needs="over_ringcomm",
        ),
        SystemColumn(
            "communication",
            _communication,
            "part of the step time that a step without communication does not take",
            where="always",
            needs="communication_share",
        ),
        SystemColumn(
            "predicted, ms",
            lambda r: milliseconds(r["predicted_us"]) if "predicted_us" in r else "",
            "time of a step that the planner predicts",
            where="always",
            needs="predicted_us",
        ),
        SystemColumn(
            "update, ms",
            lambda r: milliseconds(r["update_p50_us"]),
            "time of a step minus that of the forward and backward passes",
        ),
        SystemColumn("weights", _mib("param"), "MiB of a rank"),
        SystemColumn("gradients", _mib("grad"), "most MiB of a rank"),
        SystemColumn("states", _mib("state"), "MiB of a rank for optimizer states"),
        SystemColumn("sum", _mib("param", "grad", "state"), "MiB of these three", "always"),
        SystemColumn(
            "sent",
            _sent,
            "MiB that a rank sends in a step; in parentheses if computed, not counted",
            "always",
        ),
        SystemColumn("formula", _formula, "MiB that the planner predicts", "all"),
        SystemColumn("others %", CELLS["others %"], "what other programs used of all cores", "all"),
    ]
    return [column for column in columns if any(column.needs in record for record in run)]


def _system_grid(runs: list[Run]) -> list[str]:
    run = runs[0]
    shown = [(one.header, one.cell) for one in system_columns(run) if one.where != "all"]
    shares = [r["communication_share"]["p50"] for r in run if "communication_share" in r]
    return [*grid_of(shown, 1, run), *(["", WHY_NEGATIVE] if min(shares, default=0) < 0 else [])]


SYSTEMS_HEADING = (
    "{world_size} ranks, {num_params:,} parameters, {rows_per_rank} × {tokens_per_row} tokens per"
    " rank. Times are those of a training step. `update` is a step minus the forward and backward"
    " passes. Memory of a rank, and the bytes that it sends in a step, are in MiB. Bytes in"
    " parentheses are computed, not counted:"
)


def _amount(name: str) -> Cell:
    def cell(record: Record) -> str:
        rate, time_us = record.get(f"{name}_bytes_per_s"), record.get(f"{name}_us")
        if rate is not None:
            return f"{rate / 1e9:.2f} GB/s"
        return "–" if time_us is None else f"{milliseconds(time_us)} ms"

    return cell


def _plain_ratio(record: Record) -> str:
    """``0.95 (0.90–1.09)``; a dash without one."""
    ratio = record["ratio"]
    return f"{ratio['p50']:.2f} ({ratio['p10']:.2f}–{ratio['p90']:.2f})" if ratio else "–"


# ---- deaths: how the ranks of a backend go on after the error

SHRINK, STAY, END = "shrink", "stay", "end"
HOSTS = "ringcomm-hosts"  # two, which exchange messages over Gloo
AFTER_DEATH = {"ringcomm": SHRINK, HOSTS: STAY, "gloo": STAY, "gloo-end": END, "mpi": STAY}
DEATH_NAMES = {
    HOSTS: "ringcomm, two hosts",
    "gloo": "Gloo, caught",
    "gloo-end": "Gloo, not caught",
    "mpi": "MPI",
}


def _figures(found: dict[str, float] | None) -> str:
    """``p50 / p99 / max``."""
    if found is None:
        return "–"
    return " / ".join(f"{found[name]:,.1f}" for name in ("p50", "p99", "max"))


def _group_figures(record: Record) -> str:
    """None between hosts; records of 25 November 2026 are from before shrink() refused them."""
    has_group = AFTER_DEATH[record["backend"]] == SHRINK
    return _figures(record["new_group"] if has_group else None)


DEATH_COLUMNS: list[tuple[str, Cell]] = [
    ("backend", lambda r: DEATH_NAMES.get(r["backend"], str(r["backend"]))),
    ("killed in a", lambda r: r["moment"]),
    ("ranks", lambda r: str(r["world_size"])),
    ("deaths", lambda r: str(r["num_deaths"])),
    ("death to last error, ms", lambda r: _mark(_figures(r["aware"]), r)),
    ("call to last error, ms", lambda r: _figures(r["after_call"])),
    ("then to the new group, ms", _group_figures),
    ("ranks with an error", lambda r: f"{100 * r['raised_share']:.0f} %"),
]


def _of_deaths(run: Run) -> str:
    num = run[0]["strangers"]
    beside = f"Beside {num} CPU-bound processes" if num else "Ranks alone"
    return f"{beside}; median / 99th percentile / most:"


# ---- layouts

# In detail, for 2 and 4 ranks; the other operations share one table.
DETAILED_OPS = ("all_reduce", "all_reduce_apart", "barrier")


@dataclass(frozen=True)
class Layout:
    """How the records of one kind become tables.

    Attributes:
        title: of its section where all are printed.
        kind: of the records.
        table_fields: what makes rows of one table.
        row_fields: what tells its rows apart, or its rows and columns.
        heading: the line above a table, with fields of its first record, or made of all records.
        form: its grid.
        is_shown: whether a page shows a record.
        name: of a second layout of a kind.
        is_pooled: whether a table is of all runs of the newest record's day.
    """

    title: str
    kind: str
    table_fields: Sequence[str]
    row_fields: Sequence[str]
    heading: str | Callable[[Run], str]
    form: Form
    is_shown: Callable[[Record], bool] = lambda record: True
    name: str = ""
    is_pooled: bool = False

    def lines(self, runs: list[Run]) -> list[str]:
        """Heading and grid of one table."""
        run = [*chain(*runs)]
        if isinstance(self.heading, str):
            return [self.heading.format_map(run[0]), *self.form(runs)]
        return [self.heading(run), *self.form(runs)]


_SWEEP = ("world_size", "device", "dtype")
# Only the newest model of a shape.
_SYSTEMS = ("world_size", "rows_per_rank", "tokens_per_row")


_CALL = "{world_size} ranks, {dtype}, {device}. Median time of a call"

# In the page's order.
_LAYOUTS = (
    Layout(
        "Collectives",
        "collective",
        _SWEEP,
        ("op", "bytes"),
        f"{_CALL} on its slowest rank:",
        by_point(
            "backend",
            1,
            [
                ("operation", lambda r: OP_TITLES.get(r["op"], f"`{r['op']}`")),
                ("bytes", lambda r: byte_count(r["bytes"]) if r["bytes"] else "–"),
            ],
            ("{}, µs", _time, _all),
            ("{} / {over} (10–90 %)", comparison, _others),
        ),
        lambda r: r["op"] in DETAILED_OPS,
    ),
    Layout(
        "Other collectives, by size",
        "collective",
        _SWEEP,
        ("op", "bytes"),
        f"{_CALL} over ringcomm in µs, and in brackets gloo's time / ringcomm's:",
        OPERATIONS,
        lambda r: r["op"] not in DETAILED_OPS and r["world_size"] == 2,
        name="operations",
    ),
    Layout(
        "All libraries",
        "libraries",
        ("op", "dtype", "world_size"),
        ("bytes", "date"),
        _of_libraries,
        crossed(
            *("library", _library, "bytes", _library_cell),
            order=lambda name: (True, name) if "MPI" in name else (False, ""),
        ),
        is_pooled=True,
    ),
    Layout(
        "Between two hosts",
        "hosts",
        ("cable", "ranks_per_host"),
        ("op", "bytes"),
        _of_hosts,
        OPERATIONS,
    ),
    Layout(
        "Memory bandwidth as the floor",
        "collective",
        _SWEEP,
        ("op", "bytes"),
        "{world_size} ranks, {dtype}: calls over ringcomm against the floor, the time in which all"
        " ranks read and write each byte of their buffers once, before and after the calls."
        " Medians:",
        by_record(
            1,
            ("operation", lambda r: FLOOR_TITLES[r["op"]]),
            "bytes",
            ("floor, µs", lambda r: before_after(r["floor_us"])),
            ("call, µs", _time),
            ("floor / call", _floor_share),
        ),
        lambda r: r["op"] in FLOOR_TITLES and r["backend"] == "ringcomm" and r["bytes"] > 1 << 16,
        name="floor",
    ),
    Layout(
        "Fused update",
        "fused_update",
        ("world_size", "optimizer"),
        ("bytes",),
        "Gradients averaged and parameters updated ({optimizer}), {world_size} ranks, {dtype}."
        " Median time of a step on its slowest rank (10–90 %):",
        by_point(
            "way",
            0,
            [("parameters", CELLS["bytes"])],
            ("{}, µs", _time, _first),
            ("{} / {over}", comparison, _others),
            titles={
                "zero1": "ZeRO-1 over ringcomm",
                "ringcomm": "DDP over ringcomm",
                "gloo": "over Gloo",
            },
        ),
    ),
    Layout(
        "Cross-entropy",
        "cross_entropy",
        ("world_size", "device", "num_threads", "num_tokens"),
        ("dtype", "vocab_size"),
        _of_losses,
        by_point(
            "way",
            1,
            ["type", "classes"],
            ("{}, ms", lambda r: milliseconds(r["p50_us"]), _all),
            ("{} / {over} (10–90 %)", comparison, _others),
            (
                "{}, MiB",
                lambda r: str(r["extra_bytes"] >> 20),
                lambda ways: [way for way in ways if way != "copy"],
            ),
        ),
    ),
    Layout("Training systems", "systems", _SYSTEMS, (), SYSTEMS_HEADING, _system_grid),
    Layout(
        "Tensor-parallel inference",
        "inference",
        ("world_size", "dtype"),
        ("what", "size_bytes"),
        "{world_size} ranks, {dtype}. Median time in µs of a sum over the ranks, the residual's"
        " addition and the RMSNorm, and of decoding a token with `examples/decode.py` (Llama,"
        " {layers} layers, hidden size {hidden}, batch 1). In brackets the time over that of the"
        " first row. `nothing sent` adds and normalizes with torch, which takes longer than the"
        " fused operator, so it is no lower bound:",
        crossed("way", lambda r: str(r["way"]), "size_bytes", _inference_cell),
    ),
    Layout(
        "Offload",
        "offload",
        (),
        (),
        "Files: ringcomm's rate / fio's on the same file system. AdamW: torch's time / ringcomm's:",
        by_record(
            1,
            ("what", lambda r: r["name"]),
            ("ringcomm", _amount("p50")),
            "peer",
            ("peer's", _amount("peer_p50")),
            ("ratio (10–90 %)", _plain_ratio),
        ),
        lambda r: r["part"] != "steps",  # which records had until 26 November 2026
    ),
    Layout(
        "Deaths",
        "deaths",
        ("strangers",),
        ("backend", "moment", "world_size"),
        _of_deaths,
        by_record(2, *DEATH_COLUMNS),
    ),
)
LAYOUTS = {layout.name or layout.kind: layout for layout in _LAYOUTS}
