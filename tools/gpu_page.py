"""The tables of docs/gpu-verification.md, and what a run leaves in its folder for them.

The first table has a row for each command. The table under "## What the driver answers" has a row
for each question of benchmarks/gpu/probe. The last cell of a row is the result of its last run.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_aims import HEADING

ROWS = "rows.jsonl"  # the result of each row
ANSWERS = "probe.jsonl"  # lines of benchmarks/gpu/probe


@dataclass(frozen=True)
class Row:
    """A row of the first table: a shell command, or why there is none; seconds; what it needs.

    That is "MPS", "2 GPUs", a module, a program, or a file that `make` has built.
    """

    name: str
    how: str
    limit_s: float
    needs: tuple[str, ...]

    @property
    def command(self) -> str:
        """The command, "" where there is none."""
        return self.how.strip("`") if self.how.startswith("`") else ""


def read_rows(page: Path) -> list[Row]:
    """The first table of the page."""
    table = page.read_text(encoding="utf-8").partition(HEADING)[0]
    lines = [line for line in table.splitlines() if line[:2] == "| "]
    rows = []
    for line in lines[1:]:
        name, _, how, limit, needs, _ = (cell.strip() for cell in line.strip("|").split("|"))
        rows.append(Row(name, how, float(limit or 0), tuple(needs.split(", ")) if needs else ()))
    return rows


def write_row(page: Path, name: str, found: str) -> None:
    """Replaces the last cell of a row, of whichever table has it."""
    pattern = rf"^(\| {re.escape(name)} \|.*\| )[^|]*( \|)$"
    text = page.read_text(encoding="utf-8")
    text = re.sub(pattern, rf"\g<1>{found}\g<2>", text, count=1, flags=re.M)
    page.write_text(text, encoding="utf-8")


def note(out: Path, name: str, found: str) -> None:
    """Keeps the result of a row for take()."""
    with (out / ROWS).open("a", encoding="utf-8") as output:
        print(json.dumps({"row": name, "found": found}), file=output)


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file of JSON; a line that was cut off is left out."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)


def answers_in(out: Path) -> dict[str, str]:
    """The driver's answer to each question, under MPS and without if both were asked."""
    said: dict[str, dict[str, str]] = {}
    for line in lines_of(out / ANSWERS):
        mode = "MPS" if line["mps"] else "no MPS"
        said.setdefault(line["question"], {})[mode] = line["answer"].replace("|", "/")
    return {
        question: "; ".join(f"{mode}: {answer}" for mode, answer in modes.items())
        for question, modes in said.items()
    }


def write_answers(page: Path, out: Path) -> None:
    """Writes the answers that a run has found into the page."""
    for question, text in answers_in(out).items():
        write_row(page, question, text)


def take(out: Path, page: Path) -> dict[str, str]:
    """Writes the results of a run, possibly interrupted, into the page; returns those of rows."""
    found = {line["row"]: line["found"] for line in lines_of(out / ROWS)}
    for name, text in found.items():
        write_row(page, name, text)
    write_answers(page, out)
    return found
