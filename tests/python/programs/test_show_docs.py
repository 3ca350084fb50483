"""The pages of `ringcomm show` on the site, and docs/show: the data of one, and pictures of them.

RINGCOMM_WRITE_SHOW=1 pytest tests/python/programs/test_show_docs.py  # writes docs/show
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pictures
import plot
import pytest
import site_pages
from browsers import data_of, opened

from _ringcomm import start as cli
from ringcomm import show

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "docs" / "show"
IS_WRITING = bool(os.environ.get("RINGCOMM_WRITE_SHOW"))
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


def written(page: str, *options: str, path: Path) -> Path:
    assert cli.run(["show", page, *options, "-o", str(path)]) == 0
    return path


def compare(path: Path, made: str) -> None:
    if IS_WRITING:
        path.parent.mkdir(exist_ok=True)
        path.write_text(made, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == made, f"{path} is old; see {Path(__file__).name}"


def test_the_data_of_memory_is_the_planners(tmp_path: Path) -> None:
    data = data_of(written("memory", path=tmp_path / "page.html"))
    rows = ",\n".join(map(json.dumps, data.pop("rows")))
    compare(site_pages.MEMORY, f'{json.dumps(data)[:-1]}, "rows": [\n{rows}\n]}}\n')


WITHOUT_TORCH = """
import sys
from pathlib import Path

sys.modules["torch"] = None  # import torch raises ImportError
import site_pages

for name in site_pages.SHOWN:
    Path(f"{name}.html").write_text(site_pages.show_page(name), encoding="utf-8")
"""


def test_the_site_has_the_pages_as_the_command_writes_them(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT / "tools")}
    subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], cwd=tmp_path, env=env, check=True, timeout=60
    )
    names = sorted(path.stem for path in tmp_path.glob("*.html"))
    assert names == sorted({*show.TITLES} - {"trace"})  # which is of a user's own file
    for name in names:
        made = written(name, path=tmp_path / "made.html").read_text(encoding="utf-8")
        assert (tmp_path / f"{name}.html").read_text(encoding="utf-8") == made, name


def on_the_site(path: Path) -> str:
    page = SimpleNamespace(file=SimpleNamespace(src_uri=str(path.relative_to(ROOT / "docs"))))
    return site_pages.on_page_markdown(path.read_text(encoding="utf-8"), page)


def test_links_in_the_docs_lead_to_rows_of_the_list_and_on_the_site_to_pages() -> None:
    """A code host has no pages."""
    the_list = ROOT / "docs" / "reference" / "command.md"
    text = the_list.read_text(encoding="utf-8")
    assert sorted(re.findall(r'<a id="(\w+)"></a>', text)) == site_pages.SHOWN
    assert sorted(re.findall(r"\[`\w+`\]\(\.\./show/(\w+)\.html\)", on_the_site(the_list))) == (
        site_pages.SHOWN
    )
    linked = set()
    for path in (ROOT / "docs").rglob("*.md"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"show/\w+\.html", text), f"{path} links a page, which is not a file"
        found = site_pages.SHOW_LINK.findall(text)
        if found:
            assert re.findall(r"show/(\w+)\.html\)", on_the_site(path)) == found, path
        linked |= {*found}
    assert linked == {*site_pages.SHOWN}


@pytest.mark.slow
@pytest.mark.parametrize("theme", pictures.THEMES)
def test_texts_of_the_picture_for_phones_are_inside_it(browser: Any, theme: str) -> None:
    ends = "all => all.map(one => [one.getBBox().x, one.getBBox().x + one.getBBox().width])"
    path = ROOT / "docs" / "design" / f"speed-narrow-{theme}.svg"
    page = browser.new_page()
    page.goto(path.as_uri())
    for begin, end in page.locator("text").evaluate_all(ends):
        assert begin >= 0
        assert end <= pictures.NARROW
    page.close()


def test_pictures_on_pages_follow_their_colours() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    files = {
        path.parent / name
        for path in pages
        for name in re.findall(r"!\[[^\]]*\]\(([^)#]+)", path.read_text(encoding="utf-8"))
    }
    assert len(files) > 5
    for file in {file.resolve() for file in files if file.name != "errors.svg"}:  # a dark terminal
        assert plot.ON_DARK_PAGES in file.read_text(encoding="utf-8"), (
            f"python benchmarks/plot.py --adapt {file.relative_to(ROOT)}"
        )


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


@pytest.mark.slow
@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_those_of_the_pages(name: str, browser: Any, tmp_path: Path) -> None:
    picture = PICTURES[name]
    path = written(picture.page, *picture.options, path=tmp_path / "page.html")
    parts = []
    with opened(browser, path) as page:
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
    compare(FOLDER / f"{name}.svg", standalone(parts))
