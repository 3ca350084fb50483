#!/usr/bin/env python3
"""Draws the pictures of README and of the site's home, in light and dark.

    python benchmarks/pictures.py [--only speed ring errors] [--out docs/design]

`speed` is bars of the newest records in benchmarks/results: calls and a training step over each
library, also as narrow as a phone, and a sentence of README, with the same ranges over all records.
`ring` and `errors` start ranks: `ring` draws the fastest of some recorded all_reduces, `errors`
what ranks and `ringcomm doctor` say of three jobs, which README gets as text, too.
"""

from __future__ import annotations

import argparse
import html
import math
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import harness
import sample_jobs
from palette import LIBRARIES, title_of
from plot import ON_DARK_PAGES, of_last_machine, source_of
from table import LAYOUTS, Record, machine_of, read_results

from _ringcomm.status import EXIT_FAILED, EXIT_OK, run_main
from ringcomm.measure.machine import usable_cores
from ringcomm.screen import COLORS, counted, factor, in_seconds
from ringcomm.show import Ring

DESIGN = harness.ROOT / "docs" / "design"
README = harness.ROOT / "README.md"
MARKS = ("<!-- errors: begin -->", "<!-- errors: end -->")
WIDTH, NARROW = 680, 380  # the latter for phones
# Ink and faint ink on the page's own ground.
THEMES = {"light": ("#1f2328", "#59636e"), "dark": ("#e6edf3", "#9198a1")}
CALL = {"kind": "collective", "op": "all_reduce", "dtype": "float32", "device": "cpu"}
STEP = {"kind": "systems", "rows_per_rank": 4, "tokens_per_row": 128}
STEP_TITLE = "DDP training step"
# By title: the fields of the records, and the name in each record of what is compared.
ROWS: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "all_reduce, 1 KiB": (CALL | {"bytes": 1 << 10}, "backend", ("ringcomm", "gloo", "mpi4py")),
    "all_reduce, 4 MiB": (CALL | {"bytes": 4 << 20}, "backend", ("ringcomm", "gloo", "mpi4py")),
    "all_reduce, 64 MiB": (CALL | {"bytes": 64 << 20}, "backend", ("ringcomm", "gloo", "mpi4py")),
    STEP_TITLE: (STEP, "system", ("ddp", "ddp on gloo")),
}


class Bar(NamedTuple):
    """A library's time in one row."""

    library: str
    record: Record


class Row(NamedTuple):
    """The bars of the newest run, and the speed-up over Gloo in each run on an idle machine."""

    bars: list[Bar]
    speed_ups: list[float]

    def span(self) -> str:
        """``76× to 116×``: the least and the largest speed-up, rounded outwards."""
        low, high = min(self.speed_ups), max(self.speed_ups)
        digits = 0 if low >= 10 else 1 if low >= 2 else 2
        unit = 10**-digits
        ends = (math.floor(low / unit) * unit, math.ceil(high / unit) * unit)
        return " to ".join(f"{end:.{digits}f}×" for end in ends)


def rows_of(records: list[Record]) -> dict[str, Row]:
    """The rows of `speed`, of two ranks; those without records are left out."""
    rows = {}
    for title, (fields, name, wanted) in ROWS.items():
        usual = [r for r in records if ({"world_size": 2} | fields).items() <= r.items()]
        runs = of_last_machine(usual, LAYOUTS[fields["kind"]])
        found = {record[name]: record for run in runs for record in run}
        bars = [Bar(_library(one), found[one]) for one in wanted if one in found]
        if bars:
            machine = machine_of(bars[0].record)
            told = [
                ratio["p50"]
                for r in usual
                if _library(r[name]) == "gloo" and machine_of(r) == machine and r["quiet"]
                if (ratio := r.get("over_ringcomm") or r["ratio"])
            ]
            rows[title] = Row(bars, told)
    return rows


def with_sentence(page: str, rows: dict[str, Row]) -> str:
    """README with the ranges of the rows."""
    calls = [row for title, row in rows.items() if "KiB" in title or "MiB" in title]
    sizes = [title.split(", ")[1] for title in rows if ", " in title]
    told = [f"{row.span()} for {size}" for row, size in zip(calls, sizes, strict=True)]
    told[0] = told[0].replace(" for ", " as fast as Gloo's for ")
    step = rows[STEP_TITLE]
    said = (
        f"In {len(calls[0].speed_ups)} recorded runs of 2 ranks on 2 otherwise idle CPU cores,"
        f" ringcomm's all_reduce is {', '.join(told[:-1])} and {told[-1]}."
        f" A DDP training step is {step.span()} as fast in {counted(len(step.speed_ups), 'run')},"
        " because little of it is communication. These are the medians of each run."
    )
    said = textwrap.fill(said, 120, break_on_hyphens=False)
    return re.sub(r"(?ms)^In \d+ recorded runs of .*?$(?=\n\n)", said, page)


def with_errors(page: str, said: str) -> str:
    """README with what ranks and the doctor say, between its marks. Raises ValueError."""
    begin, end = MARKS
    head, found, rest = page.partition(begin)
    _, last, tail = rest.partition(end)
    if not (found and last):
        raise ValueError(f"the page needs a line {begin} and after it a line {end}")
    return f"{head}{begin}\n\n{said}\n\n{end}{tail}"


def _library(name: str) -> str:
    return {"ddp": "ringcomm", "ddp on gloo": "gloo"}.get(name, name)


# ---- SVG


def text(x: float, y: float, content: str, **style: Any) -> str:
    """A line of text; `style` are attributes, with _ for -."""
    return f'<text x="{x:.4g}" y="{y:.4g}"{_attributes(style)}>{html.escape(content)}</text>'


def box(x: float, y: float, width: float, height: float, **style: Any) -> str:
    """A rectangle with round corners."""
    place = f'x="{x:.4g}" y="{y:.4g}" width="{width:.4g}" height="{height:.4g}" rx="3"'
    return f"<rect {place}{_attributes(style)}/>"


def path(points: str, **style: Any) -> str:
    """A line."""
    return f'<path d="{points}" fill="none"{_attributes(style)}/>'


def _attributes(style: dict[str, Any]) -> str:
    return "".join(
        f' {key.rstrip("_").replace("_", "-")}="{value}"' for key, value in style.items()
    )


def picture(height: int, title: str, theme: str, parts: Iterable[str], width: int = WIDTH) -> str:
    """A whole file, in the fonts of the viewer."""
    ink, faint = THEMES[theme]
    adapted = ON_DARK_PAGES if theme == "light" else ""  # for pages that show only this one
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
        f' height="{height}" role="img" aria-label="{html.escape(title)}">\n'
        "<style>text{font:15px system-ui,-apple-system,'Segoe UI',sans-serif;"
        f"fill:{ink}}} .bold{{font-weight:600}} .faint{{fill:{faint};font-size:13px}}"
        f" .line{{stroke:{faint}}}{adapted}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def speed(rows: dict[str, Row], theme: str, total: int = WIDTH) -> str:
    """Bars of medians; each row has its own scale, to its longest bar.

    A narrow picture has speed-ups below their titles, and shorter lines of text.
    """
    is_narrow = total < WIDTH
    left, longest, height = (90, 214, 22) if is_narrow else (96, 430, 22)
    parts, y = [], 8.0
    for title, (bars, _) in rows.items():
        slowest_us = max(record["p50_us"] for _, record in bars)
        parts.append(text(0, y + 16, title, class_="bold"))
        if (gloo := _speed_up(rows[title])) is not None:
            y += 19 * is_narrow
            x, anchor = (0, "start") if is_narrow else (total, "end")
            parts.append(text(x, y + 16, gloo, text_anchor=anchor, class_="faint"))
        y += 26
        for library, record in bars:
            width = max(2.0, longest * record["p50_us"] / slowest_us)
            parts.append(text(left - 10, y + 15, title_of(library), text_anchor="end"))
            parts.append(box(left, y, width, height - 3, fill=LIBRARIES[library]))
            parts.append(text(left + width + 8, y + 15, in_seconds(record["p50_us"] * 1e-6)))
            y += height
        y += 12
    step = f"step: {STEP['rows_per_rank']} × {STEP['tokens_per_row']} tokens per rank"
    first = next(iter(rows.values())).bars[0].record
    said = [
        f"Shorter is faster. Medians of 2 ranks, float32; {step}.",
        "Speed-ups are medians over neighbouring blocks; ranges are of the medians of all records.",
        f"{source_of(first)}. ringcomm bench measures ringcomm and Gloo.",
    ]
    for line in textwrap.wrap(" ".join(said), 48) if is_narrow else said:
        y += 19
        parts.append(text(0, y, line, class_="faint"))
    title = "Time of all_reduce and of a training step over ringcomm and other libraries"
    return picture(round(y + 10), title, theme, parts, total)


def _speed_up(row: Row) -> str | None:
    """How many times as fast as Gloo ringcomm is, in the newest run and in all."""
    for library, record in row.bars:
        ratio = record.get("over_ringcomm") or record["ratio"]
        if library == "gloo" and ratio:
            runs = counted(len(row.speed_ups), "run")
            return f"{factor(ratio['p50'])}× as fast as Gloo ({row.span()} in {runs})"
    return None


def ring(found: Ring, theme: str) -> str:
    """A row per rank, a column per step; an arrow is a chunk on its way to the next rank."""
    ranks = list(found.ranks)
    n = len(ranks)
    names = ["reduce_scatter first send"]
    for half in ("reduce_scatter", "all_gather"):
        names += [f"{half} step {step}" for step in range(1, n)]
    left, top, width, height, gap = 62, 62, 70, 44, 18
    colors = [*COLORS.values()]
    x = {name: left + idx * (width + gap) for idx, name in enumerate(names)}
    y = {pid: top + idx * (height + gap) for idx, pid in enumerate(ranks)}
    parts = []
    for half, first, last in (("reduce_scatter", 0, n - 1), ("all_gather", n, 2 * n - 2)):
        begin, end = x[names[first]], x[names[last]] + width
        parts.append(text((begin + end) / 2, 16, half, text_anchor="middle", class_="bold"))
        parts.append(path(f"M{begin} 30V24H{end}V30", class_="line"))
    for name in names:
        label = name.partition(" ")[2]
        parts.append(text(x[name] + width / 2, 50, label, text_anchor="middle", class_="faint"))
    for pid, name in found.ranks.items():
        parts.append(text(0, y[pid] + 27, name))
    for step in found.steps:
        column = names.index(step["name"])
        at, row = x[step["name"]], y[step["pid"]]
        chunk = step["args"]["chunk"]
        summed = min(column + 1, n) / n
        fill = {"fill": colors[chunk % len(colors)], "fill_opacity": 0.25 + 0.75 * summed}
        ink = "#fff" if summed > 0.5 else THEMES[theme][0]
        middle = {"text_anchor": "middle", "style": f"fill:{ink}"}
        parts.append(box(at, row, width, height, **fill))
        parts.append(text(at + width / 2, row + 19, f"chunk {chunk}", **middle))
        took = in_seconds(step["dur"] * 1e-6)
        small = {"text_anchor": "middle", "style": f"fill:{ink};font-size:12px"}
        parts.append(text(at + width / 2, row + 36, took, **small))
        if "to" in step["args"]:
            parts += _arrow(at + width, row + height / 2, gap, height, step["pid"] == ranks[-1])
    about = found.whole["args"]
    y_text = y[ranks[-1]] + height + gap
    for line in (
        f"A recorded all_reduce of {about['bytes'] >> 10} KiB by {n} ranks on {usable_cores()}"
        f" cores, the fastest of {sample_jobs.RING_CALLS}.",
        "A cell has the chunk that the rank receives in the step (or sends first), and the step's"
        " time with waits.",
        f"A fuller colour: more ranks are in the sum. Arrows lead to the next rank; rank {n - 1}"
        " sends to rank 0.",
    ):
        y_text += 19
        parts.append(text(0, y_text, line, class_="faint"))
    title = f"The steps of a ring all_reduce of {n} ranks, by rank"
    return picture(round(y_text + 10), title, theme, parts)


def _arrow(x: float, y: float, gap: float, height: float, is_last: bool) -> Iterator[str]:
    """From a cell to the next rank's next one; of the last rank out below, to the first one."""
    down = gap if is_last else height + gap
    end_y = y + height / 2 + 8 if is_last else y + down
    yield path(f"M{x} {y}L{x + gap} {end_y:.4g}", class_="line", stroke_width=1.3)
    yield path(f"M{x + gap - 6} {end_y - 4:.4g}L{x + gap} {end_y:.4g}l1 -7", class_="line")


def write_both(folder: Path, name: str, draw: Any, content: Any) -> None:
    """NAME-light.svg and NAME-dark.svg."""
    for theme in THEMES:
        target = folder / f"{name}-{theme}.svg"
        target.write_text(draw(content, theme), encoding="utf-8")
        print(f"drawn: {target}")


def main(argv: list[str]) -> int:
    """Draws what is asked for; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = ("speed", "ring", "errors")
    parser.add_argument("--only", nargs="+", choices=known, default=known, metavar="NAME")
    parser.add_argument("--out", type=Path, default=DESIGN, metavar="FOLDER")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    if "speed" in options.only:
        rows = rows_of(read_results([]))
        if not rows:
            print("no records to draw speed from", file=sys.stderr)
            return EXIT_FAILED
        write_both(options.out, "speed", speed, rows)
        write_both(options.out, "speed-narrow", partial(speed, total=NARROW), rows)
        if options.out == DESIGN:
            page = README.read_text(encoding="utf-8")
            README.write_text(with_sentence(page, rows), encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        if "ring" in options.only:
            write_both(options.out, "ring", ring, sample_jobs.fastest_ring(Path(name)))
        if "errors" in options.only:
            said = sample_jobs.what_is_said(Path(name))
            for file, columns in sample_jobs.PICTURES.items():
                drawn = sample_jobs.terminal(said, columns)
                (options.out / f"{file}.svg").write_text(drawn, encoding="utf-8")
            if options.out == DESIGN:
                page = README.read_text(encoding="utf-8")
                page = with_errors(page, sample_jobs.as_text(said))
                README.write_text(page, encoding="utf-8")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(run_main("pictures.py", main))
