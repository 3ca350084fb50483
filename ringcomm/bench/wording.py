"""How people write options and read figures."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any, TypeVar

Parsed = TypeVar("Parsed")

UNIT_BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def as_option(parse: Callable[[str], Parsed]) -> Callable[[str], Parsed]:
    """``parse`` for argparse, which tells of its ValueError only that there was one."""

    def parse_option(text: str) -> Parsed:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_option


def words(text: str) -> list[str]:
    """The parts of a comma-separated option. Raises ValueError when there is none."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ValueError("names nothing")
    return parts


def whole_numbers(text: str) -> list[int]:
    """The parts of a comma-separated option as whole numbers. Raises ValueError."""
    return [int(part) for part in words(text)]


def byte_counts(text: str) -> list[int]:
    """``1k,16k,4m,1g`` in powers of 1024, or plain bytes. Raises ValueError."""
    return [byte_count_of(part) for part in words(text)]


def byte_count_of(text: str) -> int:
    """One number of ``byte_counts``; at least 1."""
    match = re.fullmatch(r"(\d+)([kmg]?)(i?b)?", text.lower())
    if match is None or int(match[1]) == 0:
        raise ValueError(f"{text!r} is no size: write 4096, 16k, 4m or 1g")
    return int(match[1]) * UNIT_BYTES[match[2]]


def microseconds(value: float) -> str:
    """Three digits, thousands whole."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def milliseconds(value_us: float) -> str:
    """Three digits, and no more than two behind the point."""
    value = value_us / 1000
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def factor(value: float) -> str:
    """Three digits, and no more than two of them behind the point."""
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"


def byte_count(value: int) -> str:
    """``4 MiB`` where that is exact, else all digits."""
    for size, unit in UNITS:
        if value >= size and value % size == 0:
            return f"{value // size} {unit}"
    return f"{value:,} B"


def amount(value: float, unit: str) -> str:
    """Of "bytes" (in KiB), "%", or a plain number of things."""
    if unit == "bytes":
        return f"{value / 1024:,.0f} KiB"
    return f"{value:.2g} %" if unit == "%" else f"{value:,.0f}"


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


def facts_line(record: dict[str, Any]) -> str:
    """Machine, versions and date of a record in one line."""
    machine = record["machine"]
    changes = " + changes" if record["dirty"] else ""
    mpi = f", {record['mpi']}" if "mpi" in record else ""
    return (
        f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}; torch"
        f" {record['torch']}, ringcomm {record['ringcomm']}{mpi}; {record['date']}; commit"
        f" {str(record['commit'])[:9]}{changes}"
    )
