"""Times whole training steps by every data-parallel system, in turn, on one model.

Losses are checked against one process, bytes are counted beside their formula, and memory is what
a rank's tensors keep alive.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ringcomm.bench.wording import as_option, comparison

NAMES = ("systems",)
HELP = "training steps by system: loss, time, memory, bytes"


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many ranks, which systems, which model, how long."""
    add = parser.add_argument
    add("--world-size", type=int, default=2, help="ranks, all on this machine")
    add("--systems", type=as_option(_names), help="separated by commas; default: all")
    add("--width", type=int, default=128, help="of the model, a multiple of 32")
    add("--layers", type=int, default=4)
    add("--rows", type=int, default=1, help="of a rank's batch")
    add("--tokens", type=int, default=64, help="of a row")
    add("--seconds", type=float, default=20.0, help="for all systems together")
    add("--repeats", type=int, default=2, help="at most, while others disturb the machine")
    add("--json", type=Path, metavar="FILE", help="append one record per system here")
    add("--plot", type=Path, metavar="FILE", help="draw time and memory (SVG, PNG, PDF)")
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter


def _row(record: dict[str, Any]) -> list[str]:
    parts = [record[f"{name}_bytes"] for name in ("param", "grad", "state")]
    return [
        record["system"],
        f"{record['loss']:.4f}",
        *(f"{record[f'{p}_us'] / 1e3:.2f}" for p in ("p50", "p99")),
        comparison(record),
        f"{record['update_p50_us'] / 1e3:.2f}",
        *(f"{part / 2**20:.2f}" for part in (*parts, sum(parts))),
        _traffic(record["sent_bytes"], record["formula_bytes"]),
        f"{record['others_busy_percent']:.1f}",
    ]


def _traffic(sent: float | None, formula: float) -> str:
    """Counted beside the formula, which is a mean over shards that differ by an element."""
    if sent is None:
        return f"({formula / 2**20:.2f})"
    return f"{sent / 2**20:.2f} {'=' if sent == formula else '≈'} {formula / 2**20:.2f}"


def run(options: argparse.Namespace) -> int:
    """Measures; the status is 3 when losses are not those of one process."""
    from functools import partial

    from ringcomm.bench.ranks import run_ranks
    from ringcomm.bench.report import Report
    from ringcomm.bench.screen import table_of
    from ringcomm.bench.systems import SYSTEMS, Systems, run_rank

    if options.plot:
        import matplotlib  # noqa: F401 - or an error before minutes of measuring

    systems = Systems(
        world_size=options.world_size,
        names=options.systems or list(SYSTEMS),
        width=options.width,
        num_layers=options.layers,
        rows=options.rows,
        tokens=options.tokens,
        seconds=options.seconds,
        repeats=options.repeats,
    )
    try:
        systems.check()
    except ValueError as error:
        options.parser.error(str(error))
    num_params = sum(param.numel() for param in systems.model().parameters())
    report = Report(
        "systems",
        options.json,
        world_size=systems.world_size,
        num_params=num_params,
        rows_per_rank=systems.rows,
        tokens_per_row=systems.tokens,
    )
    run_ranks(systems.world_size, partial(run_rank, systems), report.add)
    headers = ["system", "loss", "p50 ms", "p99 ms", f"over {systems.names[0]}'s"]
    headers += ["update ms"]
    headers += ["params", "grads", "states", "together", "sent = formula", "others %"]
    caption = (
        "update: beyond forward and backward alone, communication included. params to together:"
        " MiB that a rank keeps alive. sent: MiB of a rank in a step; in brackets where the backend"
        " does not count."
    )
    table = table_of(headers, caption, report.records, _row)
    if options.plot and report.records:
        from ringcomm.bench.systems_plot import draw

        draw(report.records, options.plot)
    return report.finish(f"{num_params:,} parameters, {systems.world_size} ranks", table)
