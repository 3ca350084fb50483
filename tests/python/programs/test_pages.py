"""Pages whose tables a user relies on: environment variables, promises, calls and their dtypes."""

from __future__ import annotations

import re
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks
from sequence_side import MOVED, REDUCED, Call
from sequences import POOLS, WAIT_S, WORLD, Case, run_case

from ringcomm import Options
from ringcomm.options import known_variables, unknown_variables

ROOT = Path(__file__).resolve().parents[3]
READS = re.compile(r'(?:environ(?:\.get\(|\.pop\(|\[)|getenv\()\s*"(RINGCOMM_\w+)"')
VARIABLES = ROOT / "docs" / "reference" / "environment.md"


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


def test_a_group_warns_of_a_mistyped_variable_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*known_variables(), "RINGCOMM_ALGO"):
        monkeypatch.setenv(name, "1")
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
