#!/usr/bin/env python3
"""Draws the plots of the pages, and of `ringcomm bench OP --plot`.

    python benchmarks/plot.py [--out docs/design] [FILE.jsonl ...]
    python benchmarks/plot.py --adapt FILE.svg  # one that an example has drawn

Takes the records that table.py would, of the machine that was measured last, and writes the files
of PLOTS, the same bytes for the same records and matplotlib. Plots without records, or without
matplotlib, are skipped with a message. In docs/design it also renews README's sentence of ranges.
SVGs are drawn on white paper, and a rule in them makes it dark where the page is.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import harness
from cells import GREY, LIBRARIES, Record, Run, colors_of, title_of
from front_door import DEFAULT_SIZES
from layouts import LAYOUTS, Layout
from table import SHOWN_WORLDS, machine_of, newest, read_results

from _ringcomm.status import EXIT_OK, run_main
from _ringcomm.values import byte_counts
from ringcomm.screen import COLORS, byte_count, counted, factor, in_seconds

DESIGN = harness.ROOT / "docs" / "design"
README = harness.ROOT / "README.md"
LINE_STYLES = {"eager": ":", "graph": "-"}
# Text stays text, and the output is deterministic.
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "ringcomm", "font.size": 9}
# The colour scheme of a picture is that of the page that shows it.
ON_DARK_PAGES = (
    "@media (prefers-color-scheme: dark) { svg:root { filter: invert(0.88) hue-rotate(180deg) } }"
)


class Lines(NamedTuple):
    """A picture of times: what it is of, and the fields of lines, panels and sizes."""

    title: str
    field: str
    panel: str = "world_size"
    size: str = "bytes"
    corner: str = "lower right"


def adapt(path: Path) -> None:
    """Makes an SVG that was drawn on white paper dark on pages that are."""
    text = path.read_text(encoding="utf-8")
    if ON_DARK_PAGES not in text:
        path.write_text(text.replace("</style>", f"{ON_DARK_PAGES}</style>", 1), encoding="utf-8")


def of_last_machine(usual: list[Record], layout: Layout) -> list[Run]:
    """The points, in order, of the machine that was measured last."""
    last = max(usual, key=lambda record: record["date"], default=None)
    return newest([r for r in usual if last and machine_of(r) == machine_of(last)], layout)


@contextmanager
def _drawn(
    path: Path, num_rows: int, num_columns: int, size: Any, source: str = "", **shared: Any
) -> Iterator[Any]:
    """Rows of axes to draw on, whose figure is then written, with its source as the last line.

    Raises:
        OSError: the file cannot be written.
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(num_rows, num_columns, figsize=size, squeeze=False, **shared)
        yield axes
        figure.text(0.01, 0.01, source, fontsize=8, color=GREY)
        figure.tight_layout(rect=(0, 0.05 if source else 0, 1, 1))
        path.parent.mkdir(parents=True, exist_ok=True)
        how: Any = {"metadata": {"Date": None}} if path.suffix == ".svg" else {"dpi": 120}
        figure.savefig(path, **how)
        if path.suffix == ".svg":
            adapt(path)
        pyplot.close(figure)


def source_of(record: Record) -> str:
    """Where the points were measured, in one line."""
    machine = record["machine"]
    state = "otherwise idle" if record["quiet"] else "beside other programs"
    return (
        f"{counted(machine['cores'], 'core')} of {machine['cpu']}, {state}; {record['date'][:10]}"
    )


def _plain(axes: Any) -> None:
    """A light grid, and no frame above and at the right."""
    axes.grid(color="#dddddd", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)


def _over_sizes(axes: Any, ticks: list[int], title: str, label: Callable[[int], str]) -> None:
    """Both axes logarithmic, and sizes along the lower one, of buffers or of vocabularies."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, map(label, ticks), fontsize=9)
    axes.minorticks_off()
    what = "size of the buffer" if label is byte_count else "classes"
    axes.set(xlabel=what, title=title)
    _plain(axes)


def _plot_panel(axes: Any, records: list[Record], lines: Lines, colors: dict[str, str]) -> None:
    """A line per name, from the 10 to the 90 % point shaded."""
    for name, color in colors.items():
        points = [record for record in records if record[lines.field] == name]
        sizes = [record[lines.size] for record in points]
        low, middle, high = ([r[f"{p}_us"] for r in points] for p in ("p10", "p50", "p90"))
        axes.fill_between(sizes, low, high, color=color, alpha=0.15, linewidth=0)
        label = title_of(name)
        axes.plot(sizes, middle, color=color, marker=".", linewidth=1.4, label=label)
    if (limit := records[0].get("one_shot_max_bytes", 1)) > 1:
        axes.axvline(limit, color="grey", linewidth=0.8, linestyle=":")
    axes.legend(framealpha=1, edgecolor="none", loc=lines.corner)  # over dotted lines
    title = str(records[0][lines.panel])
    if lines.size == "bytes":
        _over_sizes(axes, byte_counts(DEFAULT_SIZES), f"{title} ranks", byte_count)
    else:
        _over_sizes(axes, sorted({r[lines.size] for r in records}), title, "{:,}".format)


def draw_lines(runs: list[Run], path: Path, lines: Lines) -> None:
    """A panel per value of a field, a line per value of another one."""
    records = [record for run in runs for record in run]
    panels = [list(group) for _, group in groupby(records, key=lambda r: r[lines.panel])]
    colors = colors_of(list(dict.fromkeys(record[lines.field] for record in records)))
    size = (4.4 * len(panels), 4.0)
    with _drawn(path, 1, len(panels), size, source_of(records[-1]), sharey=True) as axes:
        for one, panel in zip(axes[0], panels, strict=True):
            _plot_panel(one, panel, lines, colors)
        axes[0][0].set_ylabel("µs per call (lower is better)")
        axes[0][0].figure.suptitle(f"{lines.title}: median, shaded from 10 to 90 %")


def _panel(axes: Any, records: list[Record]) -> None:
    """Bandwidth by size: a line per backend and mode, and the floor's."""
    curves: dict[tuple[str, str], list[Record]] = {}
    for record in sorted(records, key=lambda record: int(record["bytes"])):
        curves.setdefault((record["backend"], record["mode"]), []).append(record)
    colors = colors_of(list(dict.fromkeys(backend for backend, _ in curves)))
    for (backend, mode), points in curves.items():
        sizes = [record["bytes"] for record in points]
        speeds = [record["busbw_gb_per_s"] for record in points]
        style = {"linestyle": LINE_STYLES[mode], "linewidth": 1.2, "marker": "."}
        label = f"{title_of(backend)}, {mode}"
        axes.plot(sizes, speeds, color=colors[backend], label=label, **style)
    floor = {r["bytes"]: r["busbw_gb_per_s"] / r["share_of_floor"] for r in records}
    sizes = sorted(floor)
    axes.plot(sizes, [floor[size] for size in sizes], color="black", linewidth=1.0, label="floor")
    ticks = sizes[:: max(1, len(sizes) // 6)]
    _over_sizes(axes, ticks, f"{records[0]['op']}, {records[0]['dtype']}", byte_count)


def draw_bandwidths(records: list[Record], path: Path, title: str) -> None:
    """Writes a picture of bus bandwidths: a panel per operation and type."""
    ordered = sorted((r for r in records if r["bytes"]), key=lambda r: (r["op"], r["dtype"]))
    panels = [list(group) for _, group in groupby(ordered, key=lambda r: (r["op"], r["dtype"]))]
    with _drawn(path, 1, len(panels), (4.6 * len(panels), 3.8)) as axes:
        for one, panel in zip(axes[0], panels, strict=True):
            _panel(one, panel)
        axes[0][0].set_ylabel("bus bandwidth, GB/s")
        axes[0][-1].legend(fontsize=7, frameon=False)
        axes[0][0].figure.suptitle(title, fontsize=9)


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


def draw_systems(records: list[Record], path: Path) -> None:
    """Bars of a step's time on the left, of the parts of memory on the right."""
    names = [record["system"] for record in records]
    with _drawn(path, 1, 2, (10, 1.2 + 0.35 * len(names)), sharey=True) as [[left, right]]:
        times = [record["p50_us"] / 1e3 for record in records]
        late = [(record["p99_us"] - record["p50_us"]) / 1e3 for record in records]
        left.barh(names, times, xerr=[[0.0] * len(late), late], color=COLORS["blue"], capsize=2)
        left.set(xlabel="step, ms: p50, and up to p99")
        left.invert_yaxis()
        begin = [0.0] * len(names)
        # As in `ringcomm show memory`.
        parts = {"param": "blue", "grad": "orange", "state": "green"}
        for part, color in parts.items():
            sizes = [record[f"{part}_bytes"] / 2**20 for record in records]
            right.barh(names, sizes, left=begin, label=f"{part}s", color=COLORS[color])
            begin = [a + b for a, b in zip(begin, sizes, strict=True)]
        right.set(xlabel="MiB of a rank")
        right.legend()


# ---- README's bars, and its sentence

CALL = {"kind": "collective", "op": "all_reduce", "dtype": "float32", "device": "cpu"}
STEP_TITLE = "DDP training step"
BACKENDS = ("ringcomm", "gloo", "mpi4py")
# By title: the fields of the records, and by the name in a record the library that it is of.
BARS: dict[str, tuple[dict[str, Any], str, dict[str, str]]] = {
    f"all_reduce, {byte_count(size)}": (
        CALL | {"bytes": size},
        "backend",
        {name: name for name in BACKENDS},
    )
    for size in (1 << 10, 4 << 20, 64 << 20)
}
BARS[STEP_TITLE] = (
    {"kind": "systems", "rows_per_rank": 4, "tokens_per_row": 128},
    "system",
    {"ddp": "ringcomm", "ddp on gloo": "gloo"},
)


class Bars(NamedTuple):
    """The records of the newest run by library, and the speed-up over Gloo in each quiet run."""

    records: dict[str, Record]
    speed_ups: list[float]

    def span(self) -> str:
        """``76× to 116×``: the least and the largest speed-up, rounded outwards."""
        low, high = min(self.speed_ups), max(self.speed_ups)
        digits = 0 if low >= 10 else 1 if low >= 2 else 2
        unit = 10**-digits
        ends = (math.floor(low / unit) * unit, math.ceil(high / unit) * unit)
        return " to ".join(f"{end:.{digits}f}×" for end in ends)


def bars_of(records: list[Record]) -> dict[str, Bars]:
    """By title the bars of two ranks; those without records are left out."""
    found = {}
    for title, (fields, name, libraries) in BARS.items():
        usual = [r for r in records if ({"world_size": 2} | fields).items() <= r.items()]
        runs = of_last_machine(usual, LAYOUTS[fields["kind"]])
        newest_run = {record[name]: record for run in runs for record in run}
        shown = {libraries[one]: newest_run[one] for one in libraries if one in newest_run}
        if shown:
            machine = machine_of(next(iter(shown.values())))
            told = [
                ratio["p50"]
                for r in usual
                if libraries.get(r[name]) == "gloo" and machine_of(r) == machine and r["quiet"]
                if (ratio := r.get("over_ringcomm") or r["ratio"])
            ]
            found[title] = Bars(shown, told)
    return found


def with_sentence(page: str, bars: dict[str, Bars]) -> str:
    """README with the ranges of the speed-ups."""
    calls = {title: one for title, one in bars.items() if title != STEP_TITLE}
    told = [f"{one.span()} for {title.split(', ')[1]}" for title, one in calls.items()]
    told[0] = told[0].replace(" for ", " as fast as Gloo's for ")
    step, num_runs = bars[STEP_TITLE], len(next(iter(calls.values())).speed_ups)
    said = (
        f"In {num_runs} recorded runs of 2 ranks on 2 otherwise idle CPU cores,"
        f" ringcomm's all_reduce is {', '.join(told[:-1])} and {told[-1]}."
        f" A DDP training step is {step.span()} as fast in {counted(len(step.speed_ups), 'run')},"
        " because little of it is communication. These are the medians of each run."
    )
    said = textwrap.fill(said, 120, break_on_hyphens=False)
    return re.sub(r"(?ms)^In \d+ recorded runs of .*?$(?=\n\n)", said, page)


def draw_bars(records: list[Record], path: Path) -> bool:
    """Medians by library; each row has its own scale, to its longest bar."""
    found = bars_of(records)
    if not found:
        return False
    first = next(iter(next(iter(found.values())).records.values()))
    source = f"Shorter is faster. Medians of 2 ranks, float32. {source_of(first)}"
    with _drawn(path, len(found), 1, (7.0, 1.05 * len(found)), source) as axes:
        for one, (title, (shown, speed_ups)) in zip(axes[:, 0], found.items(), strict=True):
            times = [record["p50_us"] for record in shown.values()]
            drawn = one.barh([*map(title_of, shown)], times, color=[LIBRARIES[n] for n in shown])
            one.bar_label(drawn, [in_seconds(time * 1e-6) for time in times], padding=4)
            one.set_title(title, loc="left", fontsize=9, fontweight="bold")
            gloo = shown.get("gloo", {})
            if speed_ups and (ratio := gloo.get("over_ringcomm") or gloo.get("ratio")):
                runs = f"{found[title].span()} in {counted(len(speed_ups), 'run')}"
                said = f"{factor(ratio['p50'])}× as fast as Gloo ({runs})"
                one.set_title(said, loc="right", fontsize=8, color=GREY)
            one.invert_yaxis()
            one.set(xticks=[], xlim=(0, 1.15 * max(times)))
            one.tick_params(left=False)
            one.spines[:].set_visible(False)
    return True


# ---- the pages' plots


def draw_points(
    lines: Lines, fields: dict[str, Any], layout: Layout, records: list[Record], path: Path
) -> bool:
    """A plot of the newest points of the records with these fields."""
    usual = [r for r in records if fields.items() <= r.items()]
    runs = of_last_machine([r for r in usual if r["world_size"] in (1, *SHOWN_WORLDS)], layout)
    if runs:
        draw_lines(runs, path, lines)
    return bool(runs)


def draw_algorithms(_: list[Record], path: Path) -> bool:
    """A plot of the newest file of `ringcomm tune`."""
    tuning = json.loads(sorted(harness.RESULTS.glob("*-tuning.json"))[-1].read_text("utf-8"))
    runs = [
        [{**tuning, **world, **point} for point in world["points"]]
        for world in tuning["worlds"]
        if world["world_size"] in SHOWN_WORLDS
    ]
    title = "all_reduce by algorithm, float32"
    draw_lines(runs, path, Lines(title, "algorithm", corner="center left"))
    return True


LOSSES = {"kind": "cross_entropy", "world_size": 1, "device": "cpu"}
OF_CALLS = Lines("all_reduce by backend, float32", "backend")
OF_LOSSES = Lines("cross-entropy, forward and backward", "way", "dtype", "vocab_size", "upper left")
# By file what draws it of all records; False where it finds none.
PLOTS: dict[str, Callable[[list[Record], Path], bool]] = {
    "all_reduce": partial(draw_points, OF_CALLS, CALL, LAYOUTS["collective"]),
    "algorithms": draw_algorithms,
    "cross_entropy": partial(draw_points, OF_LOSSES, LOSSES, LAYOUTS["cross_entropy"]),
    "speed": draw_bars,
}


def main(argv: list[str]) -> int:
    """Draws all plots that have records; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--out", type=Path, default=harness.RESULTS, metavar="FOLDER")
    parser.add_argument("--adapt", type=Path, metavar="FILE.svg", help="only change this picture")
    options = parser.parse_args(argv)
    if options.adapt:
        adapt(options.adapt)
        return EXIT_OK
    records = read_results(options.files)
    for name, draw in PLOTS.items():
        path = options.out / f"{name}.svg"
        try:
            print(f"drawn: {path}" if draw(records, path) else f"no records to draw {name} from")
        except ModuleNotFoundError as error:
            print(f"{name} is not drawn: pip install {error.name}")
    if options.out.resolve() == DESIGN:
        page = README.read_text(encoding="utf-8")
        README.write_text(with_sentence(page, bars_of(records)), encoding="utf-8")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(run_main("plot.py", main))
