"""The columns of the table that `ringcomm bench systems` prints."""

from __future__ import annotations

from typing import Any, NamedTuple

from report import BUSY, Cell, comparison, share_range
from trainees import parse_name


def _memory(record: dict[str, Any]) -> str:
    return _mib(sum(record[f"{part}_bytes"] for part in ("param", "grad", "state")))


def _ratio(record: dict[str, Any]) -> str:
    """The step time over ringcomm's of the same system, else over the first system's."""
    ratio, peer = record["ratio"], record["ratio"] and record["ratio"]["over"]
    if "over_ringcomm" in record:
        ratio, peer = record["over_ringcomm"], parse_name(record["system"])[0]
    return comparison(record | {"ratio": ratio}).replace("×", f"× {peer}", 1)


def _traffic(record: dict[str, Any]) -> str:
    sent, formula = record["sent_bytes"], record["formula_bytes"]
    return _mib(sent) if sent is not None else f"({_mib(formula)})"


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.2f}"


def _ms(name: str) -> Cell:
    return lambda record: f"{record[name] / 1e3:.2f}"


def _part(name: str) -> Cell:
    return lambda record: _mib(record[name])


class Column(NamedTuple):
    """A column of the table: its header, a cell, and a sentence for the legend."""

    header: str
    cell: Cell
    legend: str = ""
    needs: str = "system"  # the cell of a record without this field is empty
    is_detail: bool = True  # only with --all

    def text(self, record: dict[str, Any]) -> str:
        """The cell of a record."""
        return self.cell(record) if self.needs in record else ""


COLUMNS = (
    Column("system", lambda record: str(record["system"]), is_detail=False),
    Column("loss", lambda record: f"{record['loss']:.4f}", "loss of the last verified step"),
    Column("step ms", _ms("p50_us"), "time of a training step, median", is_detail=False),
    Column("p99 ms", _ms("p99_us"), "99th percentile of that time"),
    Column(
        "time ratio",
        _ratio,
        "time of a step / that of the named system (10th to 90th percentile)",
        is_detail=False,
    ),
    Column(
        "communication",
        lambda record: share_range(record["communication_share"]),
        "part of the step time that a step without communication does not take",
        needs="communication_share",
        is_detail=False,
    ),
    Column(
        "update ms",
        _ms("update_p50_us"),
        "time of a step minus that of the forward and backward passes",
    ),
    Column("weights MiB", _part("param_bytes"), "memory of a rank for weights"),
    Column("gradients MiB", _part("grad_bytes"), "most memory of a rank for gradients"),
    Column("states MiB", _part("state_bytes"), "memory of a rank for optimizer states"),
    Column(
        "memory MiB",
        _memory,
        "weights, gradients and optimizer states of a rank, without activations",
        is_detail=False,
    ),
    Column(
        "sent MiB",
        _traffic,
        "bytes that a rank sends in a step; in parentheses if computed, not counted",
        is_detail=False,
    ),
    Column("formula MiB", _part("formula_bytes"), "bytes that the system's formula predicts"),
    Column(
        "others %",
        lambda record: f"{record['others_busy_percent']:.1f}",
        "share of the machine that other programs used",
    ),
)


def shown_columns(records: list[dict[str, Any]], with_details: bool) -> list[Column]:
    """Those that are not empty in every record."""
    return [
        column
        for column in COLUMNS
        if (with_details or not column.is_detail)
        and any(column.needs in record for record in records)
    ]


def legend_lines(columns: list[Column]) -> list[str]:
    """A line for each column that needs one, and one for the asterisk."""
    width = max(len(column.header) for column in columns)
    lines = [(column.header, column.legend) for column in columns if column.legend]
    return [f"{name.ljust(width)}  {text}" for name, text in [*lines, ("*", BUSY)]]
