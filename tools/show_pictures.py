#!/usr/bin/env python3
"""Writes docs/show: the data of a page of `ringcomm show` that takes torch, and pictures of pages.

    python tools/show_pictures.py [NAME ...]

Pictures need playwright and Chromium. Without names it writes all; `memory.json` is the data.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / name) for name in ("", "benchmarks")]

import plot  # noqa: E402
from site_pages import MEMORY  # noqa: E402

from _ringcomm import start  # noqa: E402
from _ringcomm.command import PAGES  # noqa: E402
from ringcomm import show  # noqa: E402

# A picture on white paper; the rules are page.html's, whose variables a file of its own lacks.
STYLE = (
    "text { fill: #1b1f24; font: 13px system-ui, sans-serif } .faint { fill: #5b6470 }"
    f" .said {{ font-size: 15px }} {plot.ON_DARK_PAGES}"
)
COLORS = {"--ink": "#1b1f24", "--faint": "#5b6470", "--line": "#d6dae0", "--ground": "#fff"}
COLORS["--empty"] = "#eef0f3"
PART = """() => {
  const svg = document.querySelector("#picture svg"), box = svg.viewBox.baseVal;
  const colors = [...document.querySelectorAll(".legend b")];
  return {
    said: document.querySelector("#title, #idle").innerText,
    width: box.width, height: box.height,
    inside: [...svg.children].map(one => new XMLSerializer().serializeToString(one)).join("\\n"),
    legend: colors.map(one => [one.nextSibling.textContent.trim(), one.style.color]),
  };
}"""


@dataclass(frozen=True)
class Picture:
    """A page with its options, and what is set in it."""

    page: str
    options: tuple[str, ...]
    frames: tuple[dict[str, str], ...]  # values of inputs, one frame below the other


PICTURES = {
    "ring": Picture("ring", ("--ranks", "2"), tuple({"#step": str(at)} for at in range(3))),
    "ring-4": Picture("ring", ("--ranks", "4"), ({"#step": "1"}, {"#step": "3"}, {"#step": "6"})),
    "memory": Picture("memory", (), ({"#ranks": "1"},)),
    "lomo": Picture("lomo", (), ({},)),
    "tensor": Picture("tensor", ("--ranks", "2"), ({"#step": "18"},)),
    "pipeline": Picture(
        *("pipeline", ("--ranks", "2", "--micro-batches", "4")),
        ({"#schedule": "gpipe"}, {"#schedule": "1f1b"}, {"#schedule": "interleaved"}),
    ),
}


def memory_text() -> str:
    """The data of the page `memory` without options, a row of its table in a line."""
    data = show.memory(*PAGES["memory"].values())
    rows = ",\n".join(map(json.dumps, data.pop("rows")))
    return f'{json.dumps(data)[:-1]}, "rows": [\n{rows}\n]}}\n'


def standalone(parts: list[dict[str, Any]]) -> str:
    """One SVG of several: captions above, one legend."""
    width = max(max(part["width"], 9 * len(part["said"])) for part in parts)
    lines, y = [], 0
    if legend := max((part["legend"] for part in parts), key=len):
        x = 0
        for name, color in legend:
            lines.append(f'<rect x="{x}" y="4" width="12" height="12" fill="{color}"/>')
            lines.append(f'<text x="{x + 18}" y="15">{name}</text>')
            x += 40 + 8 * len(name)
        y = 28
    for part in parts:
        lines.append(f'<text class="said" x="0" y="{y + 18}">{part["said"]}</text>')
        place = f'x="0" y="{y + 30}" width="{part["width"]}" height="{part["height"]}"'
        lines += [f"<svg {place}>", part["inside"], "</svg>"]
        y += 50 + int(part["height"])
    text = "\n".join(lines)
    text = re.sub(r"<title>.*?</title>| xmlns=\"[^\"]*\"| data-[\w-]+=\"[^\"]*\"", "", text)
    text = re.sub(r"var\((--\w+)\)", lambda found: COLORS[found[1]], text)
    text = re.sub(r"\d+\.\d\d+", lambda found: f"{float(found[0]):.1f}", text)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-10 -6 {width + 20:g} {y:g}"'
        f' width="{width + 20:g}">\n<style>{STYLE}</style>\n'
        f'<rect x="-10" y="-6" width="100%" height="100%" fill="#fff"/>\n{text}\n</svg>\n'
    )


def drawn(browser: Any, picture: Picture, path: Path) -> str:
    """The picture of a page, which it writes to a path."""
    start.run(["show", picture.page, *picture.options, "-o", str(path)])
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.goto(path.as_uri())
    parts = []
    for frame in picture.frames:
        for field, value in frame.items():
            if page.locator(field).evaluate("field => field.tagName") == "SELECT":
                page.locator(field).select_option(value)
            else:
                page.locator(field).fill(value)
        part = page.evaluate(PART)
        if "#schedule" in frame:
            idle = part["said"].partition("; in the picture")[0]
            part["said"] = f"{frame['#schedule']}. {idle}"
        parts.append(part)
    page.close()
    return standalone(parts)


def main(names: list[str]) -> None:
    """Writes the files of these names, or all."""
    if not names or MEMORY.name in names:
        MEMORY.write_text(memory_text(), encoding="utf-8")
    chosen = {name: one for name, one in PICTURES.items() if not names or name in names}
    if not chosen:
        return
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as started, tempfile.TemporaryDirectory() as folder:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, picture in chosen.items():
            text = drawn(browser, picture, Path(folder, "page.html"))
            MEMORY.with_name(f"{name}.svg").write_text(text, encoding="utf-8")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1:])
