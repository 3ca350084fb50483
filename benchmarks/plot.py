#!/usr/bin/env python3
"""Draws times by size: all_reduce over the backends and with ringcomm's algorithms; cross-entropy.

    python benchmarks/plot.py [--out docs/design] [FILE.jsonl ...]

Takes the records that table.py would, of the machine that was measured last, and writes
all_reduce.svg, algorithms.svg and cross_entropy.svg, the same bytes for the same records and
matplotlib. Plots without records, or without matplotlib, are skipped with a message. Of GPUs
it draws the bus bandwidths of the last run of each layout: bandwidth-w2-one.png and its like.
`ringcomm bench OP --plot` draws its own records with the functions here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import harness
from sweep import DEFAULT_SIZES, DEVICE_KIND
from table import LAYOUTS, SHOWN_WORLDS, Layout, Record, Run, machine_of, newest, read_results

from ringcomm.measure.ranks import run_main
from ringcomm.screen import EXIT_OK, byte_count, byte_counts

ALGORITHMS = Layout("Algorithms", "algorithm", ("world_size",), ("bytes",), lambda runs: [])
# Okabe and Ito's, which most people can tell apart.
LABELS = {"gloo": "Gloo", "mpi4py": "MPI"}
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
LINES = {"eager": ":", "graph": "-"}
# Text stays text, and the output is deterministic.
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "ringcomm", "font.size": 9}


def all_reduce_runs(records: list[Record]) -> list[Run]:
    """In place, in the usual type."""
    usual = {"op": "all_reduce", "dtype": "float32", "device": "cpu"}
    found = [r for r in records if r["kind"] == "collective" and usual.items() <= r.items()]
    return _runs(found, LAYOUTS["collective"])


def algorithm_runs(records: list[Record]) -> list[Run]:
    """Records that compare the algorithms."""
    return _runs([r for r in records if r["kind"] == ALGORITHMS.kind], ALGORITHMS)


def loss_runs(records: list[Record]) -> list[Run]:
    """Cross-entropy in one process, compared with other libraries."""
    found = [r for r in records if r["kind"] == "cross_entropy" and r["world_size"] == 1]
    return _of_last_machine(found, LAYOUTS["cross_entropy"])


def _runs(records: list[Record], layout: Layout) -> list[Run]:
    """The points of the usual numbers of ranks."""
    usual = [record for record in records if record["world_size"] in SHOWN_WORLDS]
    return _of_last_machine(usual, layout)


def _of_last_machine(usual: list[Record], layout: Layout) -> list[Run]:
    """The points, in order, of the machine that was measured last."""
    last = max(usual, key=lambda record: record["date"], default=None)
    return newest([r for r in usual if last and machine_of(r) == machine_of(last)], layout)


def _pyplot() -> Any:
    """matplotlib's, which draws into files. Raises ModuleNotFoundError."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _plain(axes: Any) -> None:
    """A light grid, and no frame above and at the right."""
    axes.grid(color="#dddddd", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)


def _over_bytes(axes: Any, ticks: list[int], title: str) -> None:
    """Both axes logarithmic, and sizes along the lower one."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, map(byte_count, ticks), fontsize=7)
    axes.minorticks_off()
    axes.set(xlabel="bytes", title=title)
    _plain(axes)


def _plot_world(axes: Any, runs: list[Run], field: str, names: list[str]) -> None:
    """One number of ranks: a line per name, from the 10 to the 90 % point shaded."""
    for color, name in zip(COLORS, names, strict=False):
        points = [record for run in runs for record in run if record[field] == name]
        sizes = [record["bytes"] for record in points]
        low, middle, high = ([r[f"{p}_us"] for r in points] for p in ("p10", "p50", "p90"))
        axes.fill_between(sizes, low, high, color=color, alpha=0.15, linewidth=0)
        axes.plot(
            sizes, middle, color=color, marker=".", linewidth=1.2, label=LABELS.get(name, name)
        )
    for change in runs[-1][0].get("changes", []):
        axes.axvline(change["bytes"], color="grey", linewidth=0.8, linestyle=":")
        is_shared = change["op"] != "all_reduce"
        text = f"{change['algorithm']} from {byte_count(change['bytes'] // 1024 * 1024)}"
        place = {"rotation": 90, "va": "top", "ha": "left" if is_shared else "right"}
        style = {"fontsize": 7, "color": "grey", "transform": axes.get_xaxis_transform()}
        axes.text(change["bytes"], 0.99, f" {text} ", **place, **style)
    _over_bytes(axes, byte_counts(DEFAULT_SIZES), f"{runs[0][0]['world_size']} ranks")


def _worlds_figure(pyplot: Any, runs: list[Run], field: str) -> Any:
    """A panel per number of ranks, a line per value of ``field``."""
    worlds = [list(group) for _, group in groupby(runs, key=lambda run: run[0]["world_size"])]
    names = list(dict.fromkeys(record[field] for run in runs for record in run))
    figure, axes = pyplot.subplots(
        1, len(worlds), figsize=(4.2 * len(worlds), 3.6), sharey=True, squeeze=False
    )
    for one, world in zip(axes[0], worlds, strict=True):
        _plot_world(one, world, field, names)
    axes[0][0].set_ylabel("µs per call (lower is better)")
    axes[0][-1].legend(fontsize=9, frameon=False, loc="lower right")
    return figure


def _plot_losses(axes: Any, records: list[Record], field: str, scale: float) -> None:
    """A line per way, over the number of classes."""
    ways = list(dict.fromkeys(record["way"] for record in records))
    for color, way in zip(COLORS, ways, strict=False):
        points = [record for record in records if record["way"] == way]
        sizes = [record["vocab_size"] for record in points]
        if field == "extra_bytes" and way == "copy":
            continue
        values = [record[field] * scale for record in points]
        axes.plot(sizes, values, color=color, marker=".", linewidth=1.2, label=way)
    ticks = sorted({record["vocab_size"] for record in records})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=7)
    axes.set_ylim(bottom=0)
    _plain(axes)


def _losses_figure(pyplot: Any, runs: list[Run]) -> Any:
    """Time above, memory below; a column per type."""
    records = [record for run in runs for record in run]
    dtypes = list(dict.fromkeys(record["dtype"] for record in records))
    figure, axes = pyplot.subplots(
        2, len(dtypes), figsize=(4.2 * len(dtypes), 5.6), sharex=True, squeeze=False
    )
    for column, dtype in enumerate(dtypes):
        found = [record for record in records if record["dtype"] == dtype]
        _plot_losses(axes[0][column], found, "p50_us", 1e-3)
        _plot_losses(axes[1][column], found, "extra_bytes", 2**-20)
        axes[0][column].set_title(f"{dtype}, {found[0]['num_tokens']:,} tokens")
        axes[1][column].set_xlabel("classes")
    axes[0][0].set_ylabel("ms, forward and backward: median")
    axes[1][0].set_ylabel("MiB beyond the logits")
    axes[0][-1].legend(fontsize=7, frameon=False, loc="upper left")
    return figure


@dataclass(frozen=True)
class Plot:
    """Which records a figure is of, and how it is drawn with matplotlib's pyplot."""

    runs: Callable[[list[Record]], list[Run]]
    figure: Callable[[Any, list[Run]], Any]


PLOTS = {
    "all_reduce": Plot(all_reduce_runs, partial(_worlds_figure, field="backend")),
    "algorithms": Plot(algorithm_runs, partial(_worlds_figure, field="algorithm")),
    "cross_entropy": Plot(loss_runs, _losses_figure),
}


def draw(path: Path, plot: Plot, runs: list[Run]) -> None:
    """Writes the SVG."""
    pyplot = _pyplot()
    with pyplot.rc_context(STYLE):
        figure = plot.figure(pyplot, runs)
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def device_runs(records: list[Record]) -> dict[str, Run]:
    """The last run's records by file name, of each number of ranks and layout on GPUs."""
    runs: dict[str, Run] = {}
    for record in records:
        if record["kind"] == DEVICE_KIND and record["device"] == "cuda":
            name = f"bandwidth-w{record['world_size']}-{record['layout']}.png"
            runs.setdefault(name, []).append(record)
    for name, run in runs.items():
        last = max(record["date"] for record in run)
        runs[name] = [record for record in run if record["date"] == last]
    return runs


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
    ticks = sizes[:: max(1, len(sizes) // 6)]
    _over_bytes(axes, ticks, f"{records[0]['op']}, {records[0]['dtype']}")


def draw_bandwidths(records: list[Record], path: Path, title: str) -> None:
    """Writes a picture of bus bandwidths: a panel per operation and type.

    Raises:
        OSError: the file cannot be written.
        ModuleNotFoundError: matplotlib is not installed.
    """
    plt = _pyplot()
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


def check_picture(path: Path) -> None:
    """Checks before a long measurement that a plot can be drawn.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: matplotlib does not support the file's extension.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lstrip(".") not in known:
        raise ValueError(
            f"--plot {path}: the file name must end in one of .{', .'.join(sorted(known))}"
        )


def draw_systems(records: list[dict[str, Any]], path: Path) -> None:
    """Bars of a step's time on the left, of the parts of memory on the right.

    Raises:
        OSError: the file cannot be written.
    """
    plt = _pyplot()
    names = [record["system"] for record in records]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10, 1.2 + 0.35 * len(names)), sharey=True, layout="constrained"
    )
    times = [record["p50_us"] / 1e3 for record in records]
    late = [(record["p99_us"] - record["p50_us"]) / 1e3 for record in records]
    left.barh(names, times, xerr=[[0.0] * len(late), late], color="tab:blue", capsize=2)
    left.set(xlabel="step, ms: p50, and up to p99")
    left.invert_yaxis()
    begin = [0.0] * len(names)
    for part in ("param", "grad", "state"):
        sizes = [record[f"{part}_bytes"] / 2**20 for record in records]
        right.barh(names, sizes, left=begin, label=f"{part}s")
        begin = [a + b for a, b in zip(begin, sizes, strict=True)]
    right.set(xlabel="MiB of a rank")
    right.legend()
    figure.savefig(path)
    plt.close(figure)


def draw_devices(records: list[Record], folder: Path) -> None:
    """Writes a PNG for each of ``device_runs``."""
    for name, run in device_runs(records).items():
        mps = "with MPS" if run[0]["mps"] else "without MPS"
        title = f"{run[0]['world_size']} ranks, {run[0]['gpu']}, {mps}, {run[0]['date']}"
        try:
            draw_bandwidths(run, folder / name, title)
            print(f"drawn: {folder / name}")
        except ModuleNotFoundError as error:
            print(f"{name} is not drawn: pip install {error.name}")


def main(argv: list[str]) -> int:
    """Draws all plots that have records; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--out", type=Path, default=harness.RESULTS, metavar="FOLDER")
    options = parser.parse_args(argv)
    records = read_results(options.files)
    for name, plot in PLOTS.items():
        runs = plot.runs(records)
        path = options.out / f"{name}.svg"
        try:
            if runs:
                draw(path, plot, runs)
            print(f"drawn: {path}" if runs else f"no records to draw {name} from")
        except ModuleNotFoundError as error:
            if error.name != "matplotlib":
                raise
            print(f"{name} is not drawn: pip install matplotlib")
    draw_devices(records, options.out)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(run_main("plot.py", main))
