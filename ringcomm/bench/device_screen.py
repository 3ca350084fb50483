"""Records of devices on a terminal, in the columns of nccl-tests, and as a plot of bandwidths."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.table import Table

from ringcomm.bench.machine import MAX_OTHERS_PERCENT
from ringcomm.bench.screen import table_of
from ringcomm.bench.wording import byte_count, comparison, microseconds

Record = dict[str, Any]
# Okabe and Ito's, which most people can tell apart.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
LINES = {"eager": ":", "graph": "-"}


def _row(record: Record) -> list[str]:
    return [
        *(record["op"], f"{record['bytes']:,}", f"{record['count']:,}"),
        *(record["dtype"], record["reduction"], record["mode"], record["backend"]),
        *(microseconds(record[f"{p}_us"]) for p in ("p50", "p99")),
        *(f"{record[f'{kind}_gb_per_s']:.2f}" for kind in ("algbw", "busbw")),
        f"{record['share_of_floor']:.0%}",
        f"{record['wrong_elems']:,}",
        comparison(record),
        "+".join(record["algorithms"]),
    ]


def device_table(records: list[Record], subject: str) -> Table:
    """What a sweep on devices found."""
    headers = ["op", "bytes", "count", "type", "redop", "mode", "backend", "p50 µs", "p99 µs"]
    headers += ["algbw GB/s", "busbw GB/s", "of floor", "#wrong", f"time over {subject}'s"]
    clocks = {"events": "events between calls", "host": "the host's clock around a synchronize"}
    said = ", ".join(clocks[name] for name in sorted({record["clock"] for record in records}))
    caption = (
        f"Clock: {said}. Floor: bytes over the speed of a copy in this run. Buffers rotate past L2."
        f" * others used more than {MAX_OTHERS_PERCENT:.0f} % of the machine."
    )
    return table_of([*headers, "algorithm"], caption, records, _row, ("bytes", "mode"))


def _curves(records: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    """By backend and mode, in ascending order of bytes."""
    curves: dict[tuple[str, str], list[Record]] = {}
    for record in sorted(records, key=lambda record: int(record["bytes"])):
        curves.setdefault((record["backend"], record["mode"]), []).append(record)
    return curves


def _panel(axes: Any, records: list[Record]) -> None:
    """Bandwidth by size: a line per backend and mode, and the floor's."""
    curves = _curves(records)
    names = list(dict.fromkeys(backend for backend, _ in curves))
    for (backend, mode), points in curves.items():
        color = COLORS[names.index(backend) % len(COLORS)]
        sizes = [record["bytes"] for record in points]
        speeds = [record["busbw_gb_per_s"] for record in points]
        style = {"linestyle": LINES[mode], "linewidth": 1.2, "marker": "."}
        axes.plot(sizes, speeds, color=color, label=f"{backend}, {mode}", **style)
    floor = {r["bytes"]: r["busbw_gb_per_s"] / r["share_of_floor"] for r in records}
    sizes = sorted(floor)
    axes.plot(sizes, [floor[size] for size in sizes], color="black", linewidth=1.0, label="floor")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sizes[:: max(1, len(sizes) // 6)]
    axes.set_xticks(ticks, map(byte_count, ticks), fontsize=7)
    axes.minorticks_off()
    axes.set(xlabel="bytes", title=f"{records[0]['op']}, {records[0]['dtype']}")
    axes.grid(color="#dddddd", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)


def draw(records: list[Record], path: Path, title: str) -> None:
    """Writes a picture of bus bandwidths: a panel per operation and type.

    Raises:
        OSError: the file cannot be written.
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    ordered = sorted((r for r in records if r["bytes"]), key=lambda r: (r["op"], r["dtype"]))
    panels = [list(group) for _, group in groupby(ordered, key=lambda r: (r["op"], r["dtype"]))]
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4.6 * len(panels), 3.8), squeeze=False, layout="constrained"
    )
    for one, panel in zip(axes[0], panels, strict=True):
        _panel(one, panel)
    axes[0][0].set_ylabel("bus bandwidth, GB/s")
    axes[0][-1].legend(fontsize=7, frameon=False)
    figure.suptitle(title, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
