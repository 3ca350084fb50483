"""Compares what the rows of docs/gpu-verification.md have measured with the aims on that page.

The table under "## Aims" has one aim a line:

    | entry | records | figure | aim |
    | speed-2, speed-4 | backend=nccl, mode=graph, bytes<=64k | ratio.p50 | >= 3 |

The records are those that the row has written and that have these fields. A figure is a field, or
`FIELD / key=value`: the field divided by that of the record that has this value of `key` and is of
the same point. Numbers may end in k, m or g (powers of 1024). Of several records the worst counts.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEADING = "\n## Aims\n"
Record = dict[str, Any]
Condition = tuple[str, str, str]  # a field, an operator and what it is compared with

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "=": operator.eq,
}
UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
# Records that agree in these fields, where they have them, are of one point.
POINT = ("op", "bytes", "dtype", "mode", "case", "shape", "vocab_size", "world_size", "optimizer")


@dataclass(frozen=True)
class Aim:
    """A line of the table. `over`: of the record whose figure this one's is divided by."""

    entries: tuple[str, ...]
    records: tuple[Condition, ...]
    field: str
    over: Condition | None
    comparison: str
    limit: float
    text: str


@dataclass(frozen=True)
class Verdict:
    """`is_met` is None where no record has the figure."""

    is_met: bool | None
    text: str


def number_of(text: str) -> float | None:
    """1024.0 of "1k"; None of what is no number."""
    found = re.fullmatch(r"(-?[0-9.]+)([kmg]?)", text)
    return float(found[1]) * UNITS.get(found[2], 1) if found else None


def _condition(text: str) -> Condition:
    found = re.fullmatch(r"([\w.]+) ?(<=|>=|=) ?(.+)", text.strip())
    if found is None:
        raise ValueError(f"no condition on a record: {text!r}")
    return found[1], found[2], found[3]


def read_aims(page: Path) -> list[Aim]:
    """The aims of the page. Raises ValueError that shows what of a line makes no sense."""
    table = page.read_text(encoding="utf-8").partition(HEADING)[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line[:2] == "| "]
    aims = []
    for line in lines[1:]:
        cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        entries, records, figure, aim = cells
        field, _, over = figure.partition(" / ")
        comparison, _, limit = aim.partition(" ")
        wanted = number_of(limit)
        if comparison not in ("<=", ">=") or wanted is None:
            raise ValueError(f"no aim: {aim!r} in {line!r}")
        conditions = tuple(map(_condition, records.split(",")))
        other = _condition(over) if over else None
        names = tuple(entries.split(", "))
        text = f"{figure} of {records}: aim {aim}"
        aims.append(Aim(names, conditions, field, other, comparison, wanted, text))
    return aims


def _value(record: Record, field: str) -> Any:
    """Of a field, "ratio.p50" of a dictionary's; None where there is none."""
    value: Any = record
    for name in field.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _holds(record: Record, condition: Condition) -> bool:
    field, comparison, wanted = condition
    value, number = _value(record, field), number_of(wanted)
    if number is None or isinstance(value, str):
        return comparison == "=" and str(value).lower() == wanted.lower()
    return value is not None and OPERATORS[comparison](float(value), number)


def _figure(record: Record, aim: Aim, records: list[Record]) -> float | None:
    value = _value(record, aim.field)
    if aim.over is None or value is None:
        return value
    key = aim.over[0]
    same = [name for name in POINT if name != key]
    others = [
        _value(other, aim.field)
        for other in records
        if _holds(other, aim.over) and all(other.get(n) == record.get(n) for n in same)
    ]
    return value / others[-1] if others and others[-1] else None


def _where(record: Record) -> str:
    names = [name for name in POINT if record.get(name) is not None]
    return ", ".join(f"{name} {record[name]}" for name in names)


def _judge_one(aim: Aim, records: list[Record]) -> Verdict:
    right = [record for record in records if record.get("verified", True)]
    chosen = [r for r in right if all(_holds(r, condition) for condition in aim.records)]
    figures = [(_figure(record, aim, right), record) for record in chosen]
    found = [(value, record) for value, record in figures if value is not None]
    if not found:
        return Verdict(None, f"no record: {aim.text}")
    worst = max if aim.comparison == "<=" else min
    value, record = worst(found, key=lambda pair: pair[0])
    is_met = OPERATORS[aim.comparison](value, aim.limit)
    by = abs(value - aim.limit) / aim.limit
    verdict = "met" if is_met else f"missed by {by:.1%}"
    return Verdict(is_met, f"{verdict}: {aim.text}, found {value:.5g} ({_where(record)})")


def judge(aims: Iterable[Aim], entry: str, records: list[Record]) -> list[Verdict]:
    """How the records that a row has written compare with each of its aims."""
    return [_judge_one(aim, records) for aim in aims if entry in aim.entries]


def summary(verdicts: list[Verdict]) -> str:
    """Such as `, aims: 2 met, 1 missed`; nothing where there is no aim."""
    counts = {"met": True, "missed": False, "without a record": None}
    said = [
        f"{count} {name}"
        for name, what in counts.items()
        if (count := sum(verdict.is_met is what for verdict in verdicts))
    ]
    return f", aims: {', '.join(said)}" if said else ""


class Records:
    """Records in the files of a folder, of which `new()` returns those since it was made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before = self._lines()

    def _lines(self) -> dict[Path, list[str]]:
        paths = sorted(self._folder.glob("*.jsonl"))
        return {path: path.read_text(encoding="utf-8").splitlines() for path in paths}

    def new(self) -> list[Record]:
        """What was appended, or all of a file that was written anew, but no line that was cut."""
        found = []
        for path, lines in self._lines().items():
            old = self._before.get(path, [])
            for line in lines[len(old) :] if lines[: len(old)] == old else lines:
                try:
                    found.append(json.loads(line))
                except json.JSONDecodeError:
                    continue
        return found
