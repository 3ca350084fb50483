"""How records look on a terminal: results in the columns of nccl-tests, and the machine's state."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from ringcomm.bench.machine import MAX_OTHERS_PERCENT
from ringcomm.bench.wording import comparison, microseconds

# Of tables that do not go to a terminal.
FILE_COLUMNS = 140
TEXT_COLUMNS = (
    "op",
    "backend",
    "algorithm",
    "state",
    "quantity",
    "what",
    "found",
    "transport",
    "why",
    "system",
    "tokens",
    "type",
    "mode",
    "redop",
)


def make_console() -> Console:
    """A console on stdout; wide enough for the tables when that is a file."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = FILE_COLUMNS
    return console


def make_table(headers: list[str], caption: str, wraps: bool = False) -> Table:
    """An empty table: words to the left, numbers to the right, a caption below."""
    table = Table(caption=caption or None, caption_justify="left")
    for header in headers:
        justify = "left" if header in TEXT_COLUMNS else "right"
        table.add_column(header, justify=justify, no_wrap=not wraps)  # type: ignore[arg-type]
    return table


def table_of(
    headers: list[str],
    caption: str,
    records: list[dict[str, Any]],
    row: Callable[[dict[str, Any]], list[str]],
    section: tuple[str, ...] = (),
) -> Table:
    """A row per record, with a rule where a field of ``section`` changes."""
    table = make_table(headers, caption)
    for _, together in groupby(records, key=lambda record: [record[name] for name in section]):
        for record in together:
            table.add_row(*row(record))
        table.add_section()
    return table


def _results_table(records: list[dict[str, Any]], subject: str) -> Table:
    headers = ["op", "bytes", "backend", "p50 µs", "p99 µs", "algbw GB/s", "busbw GB/s", "wrong"]
    table = make_table(
        [*headers, f"time over {subject}'s", "algorithm"],
        "The slowest rank of each call counts. Time over: median of neighbouring blocks' ratios,"
        f" 10–90 %; * others used more than {MAX_OTHERS_PERCENT:.0f} % of the machine.",
    )
    last = None
    for record in records:
        point = (record["op"], f"{record['bytes']:,}")
        if last not in (None, point):
            table.add_section()
        table.add_row(
            *(point if point != last else ("", "")),
            record["backend"],
            microseconds(record["p50_us"]),
            microseconds(record["p99_us"]),
            f"{record['algbw_gb_per_s']:.3f}",
            f"{record['busbw_gb_per_s']:.3f}",
            f"{record['wrong_elems']:,}",
            comparison(record),
            "+".join(record["algorithms"]),
        )
        last = point
    return table


def before_after(pair: dict[str, float | None]) -> str:
    """Two figures in µs; a question mark for what could not be measured."""
    return " → ".join("?" if v is None else microseconds(v) for v in pair.values())


def state_of(record: dict[str, Any]) -> str:
    """Whether the machine was left alone while the record was made."""
    faults = [] if record["quiet"] else ["not quiet"]
    faults += [] if record["steady"] else ["cores moved"]
    return ", ".join(faults) or "quiet"


def _machine_table(records: list[dict[str, Any]]) -> Table:
    table = make_table(
        ["op", "bytes", "floor µs", "flag µs", "others %", "attempts", "state"],
        "Before → after. Floor: in-place scale of each rank's buffer by all at once. Flag: one"
        " core sees what another wrote; about 0.1 where they share a cache, 0.5 where not.",
    )
    points = {(record["op"], record["bytes"]): record for record in records}
    for (op, num_bytes), record in points.items():
        table.add_row(
            op,
            f"{num_bytes:,}",
            before_after(record["floor_us"]),
            before_after(record["flag_us"]),
            f"{record['others_busy_percent']:.1f}",
            str(record["num_attempts"]),
            state_of(record),
        )
    return table


def sweep_tables(records: list[dict[str, Any]], subject: str) -> tuple[Table, Table]:
    """What a sweep found, and the state of the machine meanwhile."""
    return _results_table(records, subject), _machine_table(records)
