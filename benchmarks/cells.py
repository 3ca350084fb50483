"""What tables and pages show of records: cells, columns, grids in Markdown. Without torch.

mkdocs makes the tables of docs/ with it (tools/site_pages.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _ringcomm.values import MAX_OTHERS_PERCENT
from ringcomm.screen import COLORS, byte_count, counted, factor

Record = dict[str, Any]
Run = list[Record]  # one point: a record per backend, or one of a race
Cell = Callable[[Record], str]
# Of a printed table: headers that CELLS or a record's fields have, or a header with its cell.
Columns = Sequence[str | tuple[str, Cell]]
CHECKOUT = Path(__file__).resolve().parents[1]
# A run adds its records there, which changes no figure.
RECORDS_FOLDER = "benchmarks/results"
RESULTS = CHECKOUT / RECORDS_FOLDER
BUSY = f"other programs used more than {MAX_OTHERS_PERCENT:.0f} % of the machine"


def microseconds(value: float) -> str:
    """Three digits, thousands whole."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def milliseconds(value_us: float) -> str:
    """Three digits, and no more than two behind the point."""
    value = value_us / 1000
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def comparison(record: dict[str, Any]) -> str:
    """``38.1× (35.0–41.2)``, with an asterisk when the machine was disturbed; or why not."""
    ratio = record["ratio"]
    if ratio is None:
        return "" if record["verified"] else "wrong results"
    mark = "" if record["quiet"] else " *"
    return f"{factor(ratio['p50'])}× ({factor(ratio['p10'])}–{factor(ratio['p90'])}){mark}"


def share_range(share: dict[str, float]) -> str:
    """``25 % (20–31)`` of a median with its 10 and 90 % points."""
    middle, low, high = (f"{100 * share[name]:.0f}" for name in ("p50", "p10", "p90"))
    return f"{middle} % ({low}–{high})"


def inverse(ratio: dict[str, Any]) -> dict[str, float]:
    """One over a ratio, with its 10 and 90 % points."""
    return {"p50": 1 / ratio["p50"], "p10": 1 / ratio["p90"], "p90": 1 / ratio["p10"]}


def last_cache(machine: dict[str, Any]) -> str:
    """Its size in lscpu's words: CPUs of different models share a name. Old records have none."""
    return str(machine.get("lscpu", {}).get("L3 cache", ""))


def facts_line(record: dict[str, Any]) -> str:
    """Machine, versions and date of a record in one line."""
    machine = record["machine"]
    changes = " + changes" if record["dirty"] else ""
    cache = last_cache(machine)
    cpu = f"{machine['cpu']} (L3 {cache})" if cache else machine["cpu"]
    mpi = f", {record['mpi']}" if "mpi" in record else ""
    return (
        f"{cpu}, {counted(machine['cores'], 'core')}, Linux {machine['kernel']}; torch"
        f" {record['torch']}, ringcomm {record['ringcomm']}{mpi}; {record['date']}; commit"
        f" {str(record['commit'])[:9]}{changes}"
    )


def before_after(pair: dict[str, float | None]) -> str:
    """Two figures in µs; a question mark for what could not be measured."""
    return " → ".join("?" if v is None else microseconds(v) for v in pair.values())


def state_of(record: dict[str, Any]) -> str:
    """Whether the machine was otherwise idle during the measurement."""
    return "quiet" if record["quiet"] else "not quiet"


def grid(headers: list[str], num_words: int, rows: Sequence[list[str]]) -> list[str]:
    """A table whose first ``num_words`` columns are words, and the others figures."""
    rule = "|" + "---|" * num_words + "---:|" * (len(headers) - num_words)
    return ["", f"| {' | '.join(headers)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)]


def or_first(record: Record) -> str:
    """How a contender compares, which the first one does with itself."""
    return comparison(record) or "1×"


def _times(unit: str, scale: float, digits: Callable[[float], str]) -> dict[str, Cell]:
    """``p50 ms`` and its like."""

    def cell(name: str) -> Cell:
        return lambda record: digits(record[f"{name}_us"] / scale)

    return {f"{name}{unit}": cell(name) for name in ("p50", "p90", "p99")}


# What tables print of a record, by header.
CELLS: dict[str, Cell] = {
    "ranks": lambda r: str(r["world_size"]),
    "bytes": lambda r: byte_count(r["bytes"]),
    "type": lambda r: str(r["dtype"]),
    "classes": lambda r: f"{r['vocab_size']:,}",
    "others %": lambda r: f"{r['others_busy_percent']:.1f}",
    "state": state_of,
    **_times(" µs", 1, microseconds),
    **_times(" ms", 1e3, lambda value: f"{value:.2f}"),
    **_times(", ms", 1, milliseconds),
}


def column_of(column: str | tuple[str, Cell]) -> tuple[str, Cell]:
    """The header and the cell of a column; a header of "time" is of a ratio."""
    if not isinstance(column, str):
        return column
    plain = comparison if column.startswith("time ") else lambda record: str(record[column] or "")
    return column, CELLS.get(column, plain)


def grid_of(columns: Columns, num_words: int, records: list[Record]) -> list[str]:
    """A row per record, in Markdown; the first ``num_words`` columns are words."""
    headers, cells = zip(*map(column_of, columns), strict=True)
    return grid(list(headers), num_words, [[cell(r) for cell in cells] for r in records])


# ---- colours and titles: each library has the same ones wherever it is compared

GREY = "#7f7f7f"
# Of what is no library, such as an algorithm: from Tol's muted colours, and black.
OTHERS = ("#332288", "#44aa99", "#882255", "#222222")

# By the name of a backend or a library in records.
LIBRARIES = {
    "ringcomm": COLORS["blue"],
    "in place": "#12355b",  # ringcomm's losses in their logits, and by Triton
    "triton": "#5f8fd3",
    "gloo": COLORS["orange"],
    "mpi4py": COLORS["green"],
    "nccl": COLORS["pink"],
    "torch": COLORS["yellow"],
    "compile": COLORS["sky"],
    "liger": "#7a5195",
    "deepspeed": "#8c564b",
    "vllm": "#808000",
    "quack": "#b3446c",
    "copy": GREY,  # a copy of the data: no library
}
_TITLES = {
    "gloo": "Gloo",
    "mpi4py": "Intel MPI",
    "nccl": "NCCL",
    "compile": "torch.compile",
    "liger": "Liger",
    "deepspeed": "DeepSpeed",
    "vllm": "vLLM",
    "quack": "QuACK",
}


def title_of(library: str) -> str:
    """How a library is written, by its name in records."""
    return _TITLES.get(library, library)


def colors_of(names: list[str]) -> dict[str, str]:
    """A colour for each name: of a library its own, of others one that no library has, in order."""
    free = iter(OTHERS)
    return {name: LIBRARIES.get(name) or next(free, GREY) for name in names}
