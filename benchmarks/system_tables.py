"""Tables of training systems and of inference: docs/benchmarks.md's, and what systems.py prints."""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

from cells import (
    BUSY,
    CELLS,
    Cell,
    Columns,
    Record,
    Run,
    comparison,
    grid,
    grid_of,
    microseconds,
    milliseconds,
    or_first,
    share_range,
)

from ringcomm.screen import byte_count, factor


def _over_ringcomm(record: Record) -> str:
    return comparison(record | {"ratio": record.get("over_ringcomm")})


def _communication(record: Record) -> str:
    share = record.get("communication_share")
    return share_range(share) if share else ""


def _is_negative(record: Record) -> bool:
    share = record.get("communication_share")
    return share is not None and share["p50"] < 0


WHY_NEGATIVE = (
    "`communication` is the part of a step that the same step over a backend that sends nothing"
    " does not take. The part can be negative: over another backend than ringcomm, ZeRO pads shards"
    " of different sizes and divides by the number of ranks in passes of its own, which over"
    " ringcomm are part of the collective. If these passes take longer than the communication that"
    " is left out, the step that sends nothing is the longer one. A share whose 10 and 90 % points"
    " have different signs cannot be told from 0."
)
# Fields that only some records have: a header, and the text of a cell.
OPTIONAL: dict[str, tuple[str, Cell]] = {
    "over_ringcomm": ("time / ringcomm's", _over_ringcomm),
    "communication_share": ("communication", _communication),
}


def _mib(*names: str, digits: int = 1) -> Cell:
    return lambda record: f"{sum(record[f'{name}_bytes'] for name in names) / 2**20:.{digits}f}"


def _sent(digits: int) -> Cell:
    """In parentheses if computed, not counted."""
    sent, formula = _mib("sent", digits=digits), _mib("formula", digits=digits)
    return lambda r: f"({formula(r)})" if r["sent_bytes"] is None else sent(r)


def _loss(record: Record) -> str:
    return f"{record['loss']:.4f}"


def system_lines(runs: list[Run]) -> list[str]:
    """Whole steps by system: time, memory, bytes."""
    run = runs[0]
    first = run[0]
    columns: Columns = [
        "system",
        ("loss", _loss),
        *("p50, ms", "p99, ms"),
        (f"time / {first['system']}'s (10–90 %)", or_first),
        *(column for name, column in OPTIONAL.items() if any(name in record for record in run)),
        ("update, ms", lambda r: milliseconds(r["update_p50_us"])),
        ("weights", _mib("param")),
        ("gradients", _mib("grad")),
        ("states", _mib("state")),
        ("sum", _mib("param", "grad", "state")),
        ("sent", _sent(1)),
    ]
    return [
        f"{first['world_size']} ranks, {first['num_params']:,} parameters,"
        f" {first['rows_per_rank']} × {first['tokens_per_row']} tokens per rank. Times are those of"
        " a training step. `update` is a step minus the forward and backward passes. Memory of a"
        " rank, and the bytes that it sends in a step, are in MiB. Bytes in parentheses are"
        " computed, not counted:",
        *grid_of(columns, 1, run),
        *(["", WHY_NEGATIVE] if any(map(_is_negative, run)) else []),
    ]


def _named_ratio(record: Record) -> str:
    """The time over ringcomm's of the same system, else over the first system's, with its name."""
    ratio = record["ratio"]
    peer = ratio and ratio["over"]
    if "over_ringcomm" in record:
        ratio, peer = record["over_ringcomm"], record["system"].rpartition(" on ")[0]
    return comparison(record | {"ratio": ratio}).replace("×", f"× {peer}", 1)


class Column(NamedTuple):
    """A column of the table that `ringcomm bench systems` prints."""

    header: str
    cell: Cell
    legend: str = ""
    is_detail: bool = True  # only with --all
    needs: str = "system"  # the cell of a record without this field is empty

    def text(self, record: Record) -> str:
        """The cell of a record."""
        return self.cell(record) if self.needs in record else ""


SUM = "weights, gradients and optimizer states of a rank, without activations"
SENT = "bytes that a rank sends in a step; in parentheses if computed, not counted"
COMMUNICATION = "part of the step time that a step without communication does not take"
UPDATE = "time of a step minus that of the forward and backward passes"
RATIO = "time of a step / that of the named system (10th to 90th percentile)"
COLUMNS = (
    Column("system", lambda record: str(record["system"]), is_detail=False),
    Column("loss", _loss, "loss of the last verified step"),
    Column("step ms", CELLS["p50 ms"], "time of a training step, median", is_detail=False),
    Column("p99 ms", CELLS["p99 ms"], "99th percentile of that time"),
    Column("time ratio", _named_ratio, RATIO, is_detail=False),
    Column("communication", _communication, COMMUNICATION, False, "communication_share"),
    Column("update ms", lambda record: f"{record['update_p50_us'] / 1e3:.2f}", UPDATE),
    Column("weights MiB", _mib("param", digits=2), "memory of a rank for weights"),
    Column("gradients MiB", _mib("grad", digits=2), "most memory of a rank for gradients"),
    Column("states MiB", _mib("state", digits=2), "memory of a rank for optimizer states"),
    Column("memory MiB", _mib("param", "grad", "state", digits=2), SUM, is_detail=False),
    Column("sent MiB", _sent(2), SENT, is_detail=False),
    Column("formula MiB", _mib("formula", digits=2), "bytes that the system's formula predicts"),
    Column("others %", CELLS["others %"], "share of the machine that other programs used"),
)


def shown_columns(records: list[Record], with_details: bool) -> list[Column]:
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


def _amount(name: str) -> Cell:
    def cell(record: Record) -> str:
        rate, time_us = record.get(f"{name}_bytes_per_s"), record.get(f"{name}_us")
        if rate is not None:
            return f"{rate / 1e9:.2f} GB/s"
        return "–" if time_us is None else f"{milliseconds(time_us)} ms"

    return cell


def plain_ratio(record: Record) -> str:
    """``0.95 (0.90–1.09)``; a dash without one."""
    ratio = record["ratio"]
    return f"{ratio['p50']:.2f} ({ratio['p10']:.2f}–{ratio['p90']:.2f})" if ratio else "–"


def predicted(record: Record) -> str:
    """By the formula, where there is one."""
    efficiency = record.get("predicted_efficiency")
    return "" if efficiency is None else f"{efficiency:.2f}"


def offload_lines(runs: list[Run]) -> list[str]:
    """Files against fio, AdamW against torch's, steps against memory and the formula."""
    columns: Columns = [
        ("what", lambda r: r["name"]),
        ("ringcomm", _amount("p50")),
        "peer",
        ("peer's", _amount("peer_p50")),
        ("ratio (10–90 %)", plain_ratio),
        ("predicted", predicted),
    ]
    return [
        "Files: ringcomm's rate / fio's on the same file system. AdamW: torch's time /"
        " ringcomm's. Steps of ZeRO-Infinity in files: time in memory / time with files, and what"
        " the formula predicts without overlap; time without checksums / time with them:",
        *grid_of(columns, 1, runs[0]),
    ]


def tensor_lines(runs: list[Run]) -> list[str]:
    """Forward and backward passes: ringcomm's layers, DTensor's, and layers that send nothing."""
    columns: Columns = [
        *("rows × tokens", "way", "p50, ms", "p99, ms"),
        ("time / ringcomm's (10–90 %)", or_first),
    ]
    return [
        f"Forward and backward: {runs[0][0]['world_size']} ranks, a Llama of"
        f" {runs[0][0]['size']} parameters:",
        *grid_of(columns, 2, [*chain(*runs)]),
    ]


def pipeline_lines(runs: list[Run]) -> list[str]:
    """Bubbles and steps, with the bounds of the schedule."""
    columns: Columns = [
        *("schedule", "ranks", "micro-batches"),
        ("bubble, predicted", lambda r: f"{100 * r['predicted_bubble']:.1f} %"),
        ("measured", lambda r: f"{100 * r['bubble']['p50_share']:.1f} %"),
        ("step / bound", lambda r: f"{r['over_bound']:.2f}×"),
    ]
    stages = {
        "sleep": "Stages that sleep",
        "compute": "Stages that compute; the schedule is made of the measured times of its actions",
    }[runs[0][0]["stages"]]
    return [
        f"{stages}. The bound is the length of the schedule without delays:",
        *grid_of(columns, 1, [*chain(*runs)]),
    ]


def planner_lines(runs: list[Run]) -> list[str]:
    """Training steps, measured and predicted."""
    first = runs[0][0]
    columns: Columns = [
        *("rows × tokens", "system"),
        ("measured, ms", CELLS["p50, ms"]),
        ("predicted, ms", lambda r: milliseconds(r["predicted_us"])),
        ("measured / predicted", lambda r: f"{r['measured_over_predicted']:.2f}"),
    ]
    return [
        f"Predicted from this machine's measured speed: {first['world_size']} ranks, a decoder of"
        f" {first['layers']} layers, width {first['width']}:",
        *grid_of(columns, 2, [*chain(*runs)]),
    ]


def inference_lines(runs: list[Run]) -> list[str]:
    """A row per way: the sizes of a call, and then a token."""
    first = runs[0][0]
    rows: dict[str, list[str]] = {record["way"]: [] for run in runs for record in run}
    for run in runs:
        found = {record["way"]: record for record in run}
        for way, row in rows.items():
            row.append(_inference_cell(found[way]) if way in found else "–")
    sizes = [run[0]["size_bytes"] for run in runs]
    headers = ["token" if size is None else byte_count(size) for size in sizes]
    return [
        f"{first['world_size']} ranks, {first['dtype']}. Median time in µs of a sum over the ranks,"
        " the residual's addition and the RMSNorm, and of decoding a token with"
        f" `examples/decode.py` (Llama, {first['layers']} layers, hidden size {first['hidden']},"
        " batch 1). In brackets the time over that of the first row. `nothing sent` adds and"
        " normalizes with torch, which takes longer than the fused operator, so it is no lower"
        " bound:",
        *grid(["way", *headers], 1, [[way, *row] for way, row in rows.items()]),
    ]


def _inference_cell(record: Record) -> str:
    time = microseconds(record["p50_us"])
    if not record["verified"]:
        return "other tokens" if record["what"] == "token" else "wrong results"
    return f"{time} ({factor(record['ratio']['p50'])}×)" if record["ratio"] else time
