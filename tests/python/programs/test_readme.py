"""README is short and has the figures of the tables; pages that tests compare with the code."""

from __future__ import annotations

import html
import re
from dataclasses import fields
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import buildconfig
import numpy as np
import pytest
import site_pages
from ranks import run_ranks
from sequence_side import MOVED, REDUCED, Call
from sequences import POOLS, WAIT_S, WORLD, Case, run_case

from ringcomm import Options, as_gloo
from ringcomm.options import known_variables, unknown_variables

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
READS = re.compile(r'(?:environ(?:\.get\(|\.pop\(|\[)|getenv\()\s*"(RINGCOMM_\w+)"')
VARIABLES = ROOT / "docs" / "reference" / "environment.md"


def test_it_is_short_and_its_links_exist() -> None:
    assert len(re.sub(r"```.*?```", "", README, flags=re.S).split()) <= 1400  # two to four minutes
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", README):
        assert (ROOT / target).exists(), target


def test_its_numbers_are_those_of_the_tables() -> None:
    source = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    name = SimpleNamespace(file=SimpleNamespace(src_uri="benchmarks.md"))
    page = site_pages.on_page_markdown(source, name)
    sections = {
        re.sub(r"[^a-z -]", "", title.lower()).replace(" ", "-"): text
        for title, text in re.findall(r"^## (.+?)$(.*?)(?=^## |\Z)", page, re.M | re.S)
    }
    rows = re.findall(r"^\| \[.*?\]\(docs/benchmarks\.md#([a-z-]+)\).*? \| (.*) \|$", README, re.M)
    assert len(rows) == 5
    for section, cells in rows:
        figures = re.findall(r"\d[\d,.]*", cells)
        assert figures
        known = set(re.findall(r"\d[\d,.]*", sections[section]))
        assert set(figures) <= known, section
    # The ranges over several runs are the picture's, and hold the last run's.
    two_ranks = sections["collectives"].split("\n4 ranks")[0]
    picture = (ROOT / "docs" / "design" / "speed-light.svg").read_text(encoding="utf-8")
    ranges = re.findall(r"([\d.]+)× to ([\d.]+)× (?:as fast as Gloo's )?for\s(\d+ .iB)", README)
    assert len(ranges) == 3
    for low, high, size in ranges:
        ratio = re.search(rf"(?m)^\| `all_reduce` \| {size} .*?([\d.]+)× ", two_ranks)
        assert ratio is not None
        assert float(low) <= float(ratio[1]) <= float(high), size
        assert f"({low}× to {high}× in " in picture, size


def test_its_errors_are_those_of_the_picture() -> None:
    block = README.partition("<!-- errors: begin -->")[2].partition("<!-- errors: end -->")[0]
    picture = (ROOT / "docs" / "design" / "errors.svg").read_text(encoding="utf-8")
    drawn = html.unescape("".join(re.findall(r"<text[^>]*>([^<]*)</text>", picture)))
    faults = block.replace("```", "").strip().split("\n\n")
    assert len(faults) == 3
    for title, said in (fault.split("\n", 1) for fault in faults):
        for text in (title, said):  # without blanks, as lines are broken elsewhere
            assert "".join(text.split()) in "".join(drawn.split())


def test_it_has_the_line_that_says_that_ringcomm_runs(capsys: pytest.CaptureFixture[str]) -> None:
    as_gloo.say_once.__wrapped__()
    assert f"```\n{capsys.readouterr().err}```" in README


def test_its_bibtex_is_the_citation() -> None:
    fields = dict(re.findall(r"(\w+) = \{+(.*?)\}+,", README))
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    named = dict(re.findall(r'(?m)^(?:  - )?([\w-]+): "?(.+?)"?$', citation))
    wanted = {"title": "title", "author": "name", "version": "version", "license": "license"}
    assert {key: fields[key] for key in wanted} == {k: named[name] for k, name in wanted.items()}
    assert fields["version"] == buildconfig.public_version()


def test_the_home_page_has_the_parts_of_readme() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    shown = site_pages.on_page_markdown(index, page)
    assert "<!-- README" not in shown.replace("<!-- README and", "")
    for part in ("init_process_group", "as fast as Gloo's", "## Status", "## When not to use it"):
        assert shown.count(part) >= 1, part
    assert "](docs/" not in shown
    assert site_pages.on_config({})["repo_url"] == (buildconfig.address() or None)
    assert shown.count("#only-dark") == shown.count("#only-light") == 2
    assert README.count("<picture>") == 3
    assert "](design/errors.svg)" in shown
    for theme in ("light", "dark"):  # a phone gets another picture of the same theme
        narrow = f'<source media="{site_pages.NARROW}" srcset="design/speed-narrow-{theme}.svg">'
        assert f"{narrow}![" in shown
        assert f"](design/speed-{theme}.svg#only-{theme})</picture>" in shown


def test_its_two_commands_are_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^make ([\w-]+)", README, re.M)
    assert targets == ["train", "test"]
    for target in targets:
        assert re.search(rf"^{target}:.*##", makefile, re.M)


def test_the_page_lists_the_environment_variables_that_are_read() -> None:
    listed = set(re.findall(r"^\| `(RINGCOMM_\w+)`", VARIABLES.read_text(encoding="utf-8"), re.M))
    read: set[str] = set()
    read_by_build: set[str] = set()
    for folder in ("csrc", "kernels", "ringcomm"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".cc", ".h"):
                text = path.read_text(encoding="utf-8")
                read |= set(re.findall(r'getenv\("(RINGCOMM_\w+)"', text))
    for path in (*(ROOT / "ringcomm").rglob("*.py"), ROOT / "_ringcomm/autoload.py"):
        read |= set(READS.findall(path.read_text(encoding="utf-8")))
    read |= {f"RINGCOMM_{field.name.upper()}" for field in fields(Options)}
    for path in (ROOT / "setup.py", *(ROOT / "tools").glob("*.py")):
        read_by_build |= set(re.findall(r'"(RINGCOMM_\w+)"', path.read_text(encoding="utf-8")))
    assert read
    assert read_by_build
    assert listed == read | read_by_build == known_variables()


def test_groups_do_not_warn_of_variables_that_tests_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor of known ones."""
    paths = [p for top in ("tests", "benchmarks", "tools") for p in (ROOT / top).rglob("*")]
    texts = [p.read_text(encoding="utf-8") for p in paths if p.suffix in (".py", ".cc", ".h")]
    read = {name for text in texts for name in READS.findall(text)}
    assert read - known_variables()
    for name in read | known_variables():
        monkeypatch.setenv(name, "1")
    assert unknown_variables() == {}
    monkeypatch.setenv("RINGCOMM_ALGO", "ring")
    assert unknown_variables() == {"RINGCOMM_ALGO": "RINGCOMM_ALGORITHM"}


# ---- docs/reliability.md: each promise names tests that exist

TEST = re.compile(r"`(tests/[\w/.]+)::([^`]+)`")


def promises(text: str) -> list[str]:
    """The rows of the table of promises."""
    table = text.partition("## Promises")[2].partition("\n## ")[0]
    return [line for line in table.splitlines() if line.startswith("|")][2:]


def missing(rows: list[str]) -> list[str]:
    """Rows that name no test, and tests that do not exist."""
    wrong = [row for row in rows if not TEST.search(row)]
    for file, name in TEST.findall("\n".join(rows)):
        path = ROOT / file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        begin = f"def {name}(" if path.suffix == ".py" else f'TEST_CASE("{name}"'
        if begin not in text:
            wrong.append(f"{file}::{name}")
    return wrong


def test_each_promise_has_its_tests() -> None:
    rows = promises((ROOT / "docs" / "reliability.md").read_text(encoding="utf-8"))
    assert len(rows) >= 20
    assert missing(rows) == []


def test_a_test_that_is_not_there_is_found() -> None:
    here = "tests/python/programs/test_readme.py"
    rows = [f"| a | `{here}::test_each_promise_has_its_tests` |", f"| b | `{here}::test_b` |"]
    assert missing([*rows, "| c | |"]) == ["| c | |", f"{here}::test_b"]


# ---- the table of calls in docs/reference/backend.md, cell by cell

PAGE = ROOT / "docs" / "reference" / "backend.md"
DTYPES = {"numbers": REDUCED, "any": MOVED, "–": ("float32",)}
# Kinds of calls that have another name, or several names, in the table.
KINDS = {
    "all_reduce_coalesced": "coalesced",
    "send": "send_and_receive",
    "recv": "send_and_receive",
    "isend": "messages",
    "irecv": "messages",
    "batch_isend_irecv": "messages",
    "monitored_barrier": "barrier",
}


def claims() -> list[tuple[list[str], list[str], str]]:
    """Of each row: the calls, the transports that have them, the name of the dtypes."""
    text = PAGE.read_text(encoding="utf-8")
    table = text.split("<!-- support: begin -->")[1].split("<!-- support: end -->")[0]
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.split("\n") if line
    ]
    transports = header[1:-1]
    return [
        (
            re.findall(r"`(\w+)`", row[0]),
            [name for name, cell in zip(transports, row[1:-1], strict=True) if cell == "yes"],
            row[-1],
        )
        for row in rows
    ]


@pytest.mark.parametrize("transport", ["shm", "messages"])
def test_what_the_table_claims(transport: str, tmp_path: Path) -> None:
    calls = []
    for names, transports, dtypes in claims():
        for name, dtype in product(names if transport in transports else [], DTYPES[dtypes]):
            is_batch, is_monitored = name == "batch_isend_irecv", name == "monitored_barrier"
            kind = KINDS.get(name, name)
            options: dict[str, Any] = {"dtype": dtype, "size": 6, "root": 1}
            calls.append(Call(kind, **options, variety=int(is_batch), uneven=int(is_monitored)))
    assert len(calls) > 200
    np.zeros(WORLD, np.int64).tofile(tmp_path / "marks")
    args = Case(tuple(dict.fromkeys(calls)), pool=transport), 1, str(tmp_path / "marks")
    env = POOLS[transport]
    assert run_ranks(WORLD, run_case, *args, env=env, group_timeout_s=WAIT_S) == [[]] * WORLD
