"""How tests ended; and the results over each backend for each torch minor, kept in files.

A file begins with a line that says when they were made. Then it has one line per test that was run:
mode, test, pass or fail, and for a failure what it said, separated by tabs. Tests that are skipped
depend on their decorators alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "FAIL",
    "PASS",
    "SKIP",
    "KeptResults",
    "Outcome",
    "cause",
    "kept_file",
    "made_on",
    "read_kept",
    "write_kept",
]

PASS, FAIL, SKIP = "pass", "fail", "skip"
Key = tuple[str, str]  # (mode, test)
KeptResults = dict[Key, tuple[str, str]]  # (status, cause of a failure)

# A report starts with the rank that failed first, up to the next rank's or the ranks' output.
FIRST_RANK = re.compile(r"\Arank \d+: (.*?)(?=^rank|^----|\Z)", re.DOTALL | re.MULTILINE)
# The closing line of a traceback: not indented, and an exception's name in front of the colon.
RAISED = re.compile(
    r"^(?:\w+\.)*[A-Z]\w*(?:Error|Exit|Exception|Interrupt|Warning)\b.*$", re.MULTILINE
)
MAX_CAUSE_CHARS = 160


@dataclass(frozen=True)
class Outcome:
    """How a test ended; `text` is the reason of a skip, or a failure's whole report."""

    mode: str
    test: str
    status: str
    text: str = ""
    seconds: float = 0.0

    @property
    def key(self) -> Key:
        return self.mode, self.test


def cause(report: str) -> str:
    """What the rank that failed first raised last; or the report's first line, who did not end."""
    first = FIRST_RANK.search(report)
    raised = RAISED.findall(first.group(1)) if first else []
    lines = [line for line in report.splitlines() if line.strip()]
    text = " ".join((raised or lines or ["no report"])[-1 if raised else 0].split())
    return text if len(text) <= MAX_CAUSE_CHARS else text[: MAX_CAUSE_CHARS - 1] + "…"


def kept_file(backend: str, torch_version: str) -> Path:
    """Where the results over a backend with this torch are kept."""
    minor = ".".join(torch_version.split(".")[:2])
    return Path(__file__).parent / f"{backend}-{minor}.txt"


def made_on(path: Path) -> str:
    """The date and the commit of kept results."""
    return path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def read_kept(path: Path) -> KeptResults:
    """(status, cause) by (mode, test); nothing where there is no such file."""
    if not path.exists():
        return {}
    _, *rows = path.read_text(encoding="utf-8").splitlines()
    lines = [row.split("\t") for row in rows]
    return {(mode, test): (status, "".join(why)) for mode, test, status, *why in lines}


def write_kept(path: Path, made: str, outcomes: Iterable[Outcome]) -> None:
    """Puts results in the place of earlier ones of the same tests; the others stay."""
    merged = read_kept(path)
    for outcome in outcomes:
        merged.pop(outcome.key, None)
        if outcome.status != SKIP:
            why = cause(outcome.text) if outcome.status == FAIL else ""
            merged[outcome.key] = outcome.status, why
    lines = ["\t".join([*key, *filter(None, merged[key])]) for key in sorted(merged)]
    path.write_text("\n".join([f"# {made}", *lines]) + "\n", encoding="utf-8")
