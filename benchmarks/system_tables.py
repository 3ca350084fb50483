"""Tables of training systems and of inference from their records, for docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from report import comparison, grid, milliseconds, share_range

from ringcomm.measure.screen import byte_count, factor, microseconds

Record = dict[str, Any]
Run = list[Record]


def _over_ringcomm(record: Record) -> str:
    return comparison(record | {"ratio": record.get("over_ringcomm")})


def _communication(record: Record) -> str:
    share = record.get("communication_share")
    return share_range(share) if share else ""


# Fields that only some records have: a header, and the text of a cell.
OPTIONAL: dict[str, tuple[str, Callable[[Record], str]]] = {
    "over_ringcomm": ("time / ringcomm's", _over_ringcomm),
    "communication_share": ("communication", _communication),
}


def system_lines(runs: list[Run]) -> list[str]:
    """Whole steps by system: time, memory, bytes."""
    run = runs[0]
    first = run[0]
    has = {name: any(name in record for record in run) for name in OPTIONAL}
    rows = []
    for record in run:
        parts = [record[f"{name}_bytes"] for name in ("param", "grad", "state")]
        sent, formula = record["sent_bytes"], record["formula_bytes"]
        rows.append(
            [
                record["system"],
                f"{record['loss']:.4f}",
                milliseconds(record["p50_us"]),
                milliseconds(record["p99_us"]),
                comparison(record) or "1×",
                *(cell(record) for name, (_, cell) in OPTIONAL.items() if has[name]),
                milliseconds(record["update_p50_us"]),
                *(f"{part / 2**20:.1f}" for part in (*parts, sum(parts))),
                f"({formula / 2**20:.1f})" if sent is None else f"{sent / 2**20:.1f}",
            ]
        )
    headers = ["system", "loss", "p50, ms", "p99, ms", f"time / {first['system']}'s (10–90 %)"]
    headers += [header for name, (header, _) in OPTIONAL.items() if has[name]]
    headers += ["update, ms", "weights", "gradients", "states", "sum", "sent"]
    return [
        f"{first['world_size']} ranks, {first['num_params']:,} parameters,"
        f" {first['rows_per_rank']} × {first['tokens_per_row']} tokens per rank. Times are those of"
        " a training step. `update` is a step minus the forward and backward passes. Memory of a"
        " rank, and the bytes that it sends in a step, are in MiB. Bytes in parentheses are"
        " computed, not counted:",
        *grid(headers, 1, rows),
    ]


def offload_lines(runs: list[Run]) -> list[str]:
    """Files against fio, AdamW against torch's, steps against memory and the formula."""
    rows = []
    for record in runs[0]:
        ratio = record["ratio"]
        rows.append(
            [
                record["name"],
                _amount_of(record, "p50"),
                record["peer"],
                _amount_of(record, "peer_p50"),
                "–"
                if ratio is None
                else f"{ratio['p50']:.2f} ({ratio['p10']:.2f}–{ratio['p90']:.2f})",
                f"{record['predicted_efficiency']:.2f}" if "predicted_efficiency" in record else "",
            ]
        )
    headers = ["what", "ringcomm", "peer", "peer's", "ratio (10–90 %)", "predicted"]
    return [
        "Files: ringcomm's rate / fio's on the same file system. AdamW: torch's time /"
        " ringcomm's. Steps of ZeRO-Infinity in files: time in memory / time with files, and what"
        " the formula predicts without overlap; time without checksums / time with them:",
        *grid(headers, 1, rows),
    ]


def _amount_of(record: Record, name: str) -> str:
    rate = record.get(f"{name}_bytes_per_s")
    if rate is not None:
        return f"{rate / 1e9:.2f} GB/s"
    time_us = record.get(f"{name}_us")
    return "–" if time_us is None else f"{milliseconds(time_us)} ms"


def tensor_lines(runs: list[Run]) -> list[str]:
    """Forward and backward passes: ringcomm's layers, DTensor's, and layers that send nothing."""
    rows = []
    for run in runs:
        batch = f"{run[0]['rows']} × {run[0]['tokens']}"
        for record in run:
            times = [milliseconds(record[name]) for name in ("p50_us", "p99_us")]
            rows.append([batch, record["way"], *times, comparison(record) or "1×"])
    headers = ["rows × tokens", "way", "p50, ms", "p99, ms", "time / ringcomm's (10–90 %)"]
    return [
        f"Forward and backward: {runs[0][0]['world_size']} ranks, a Llama of"
        f" {runs[0][0]['size']} parameters:",
        *grid(headers, 2, rows),
    ]


def pipeline_lines(runs: list[Run]) -> list[str]:
    """Bubbles and steps, with the bounds of the schedule."""
    rows = []
    for record in (record for run in runs for record in run):
        rows.append(
            [
                record["schedule"],
                *(str(record[name]) for name in ("world_size", "num_microbatches")),
                f"{100 * record['predicted_bubble']:.1f} %",
                f"{100 * record['bubble']['p50_share']:.1f} %",
                f"{record['over_bound']:.2f}×",
            ]
        )
    headers = ["schedule", "ranks", "micro-batches", "bubble, predicted", "measured"]
    stages = {
        "sleep": "Stages that sleep",
        "compute": "Stages that compute; the schedule is made of the measured times of its actions",
    }[runs[0][0]["stages"]]
    return [
        f"{stages}. The bound is the length of the schedule without delays:",
        *grid([*headers, "step / bound"], 1, rows),
    ]


def planner_lines(runs: list[Run]) -> list[str]:
    """Training steps, measured and predicted."""
    rows = []
    for record in (record for run in runs for record in run):
        rows.append(
            [
                f"{record['rows']} × {record['tokens']}",
                record["system"],
                *(milliseconds(record[name]) for name in ("p50_us", "predicted_us")),
                f"{record['measured_over_predicted']:.2f}",
            ]
        )
    headers = ["rows × tokens", "system", "measured, ms", "predicted, ms", "measured / predicted"]
    first = runs[0][0]
    return [
        f"Predicted from this machine's measured speed: {first['world_size']} ranks, a decoder of"
        f" {first['layers']} layers, width {first['width']}:",
        *grid(headers, 2, rows),
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
        " batch 1). In brackets the time over that of the first row:",
        *grid(["way", *headers], 1, [[way, *row] for way, row in rows.items()]),
    ]


def _inference_cell(record: Record) -> str:
    time = microseconds(record["p50_us"])
    if not record["verified"]:
        return "other tokens" if record["what"] == "token" else "wrong results"
    return f"{time} ({factor(record['ratio']['p50'])}×)" if record["ratio"] else time
