"""docs/reliability.md: each promise names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reliability.md"
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
    rows = promises(PAGE.read_text(encoding="utf-8"))
    assert len(rows) >= 20
    assert missing(rows) == []


def test_a_test_that_is_not_there_is_found() -> None:
    here = "tests/python/programs/test_reliability.py"
    rows = [f"| a | `{here}::test_each_promise_has_its_tests` |", f"| b | `{here}::test_b` |"]
    assert missing([*rows, "| c | |"]) == ["| c | |", f"{here}::test_b"]
