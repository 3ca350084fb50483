"""The table of seeded faults: faults/<kind>.toml, one row for each fault.

A row has these keys:

    id       unique over the tables of all kinds
    file     the file of the product, from the root of the checkout
    old      text that occurs exactly once in it
    new      what replaces it
    tests    the folders, files or cases of the quick tests that must notice
    origin   "hand", or "drawn" by a mutation tool with a fixed seed
    equivalent   optional: why no test can notice, because the program does the same
    edits    optional: further changes that belong to the fault, tables of file, old and new
    detail   optional: a table of what the back end of the kind needs besides
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest requires it there

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("python", "engine", "operators", "ptx", "triton")


class FaultError(Exception):
    """A row that cannot be applied; the message names the row."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """One change to one file of the product."""

    id: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    origin: str
    equivalent: str = ""
    edits: tuple[dict[str, str], ...] = ()
    detail: dict[str, str] = dataclasses.field(default_factory=dict, hash=False)
    root: Path = dataclasses.field(default=ROOT, compare=False)  # of the checkout that is judged

    def check(self) -> None:
        """Raises FaultError if the row is incomplete or its text does not occur exactly once."""
        if self.origin not in ("hand", "drawn"):
            raise FaultError(f"fault {self.id}: origin is {self.origin!r}, not hand or drawn")
        if not self.tests:
            raise FaultError(f"fault {self.id}: it names no tests")
        if self.old == self.new:
            raise FaultError(f"fault {self.id}: new is old")
        self.changed()

    def changed(self) -> str:
        """The text of the file with the fault."""
        return self.texts()[self.file]

    def texts(self) -> dict[str, str]:
        """The texts of all files that the fault changes."""
        texts: dict[str, str] = {}
        own = {"file": self.file, "old": self.old, "new": self.new}
        for edit in (own, *self.edits):
            path = self.root / edit["file"]
            if not path.is_file():
                raise FaultError(f"fault {self.id}: there is no file {edit['file']}")
            text = texts.get(edit["file"]) or path.read_text("utf-8")
            count = text.count(edit["old"])
            if count != 1:
                raise FaultError(
                    f"fault {self.id}: its text occurs {count} times in {edit['file']}, not once; "
                    f"update the row:\n{edit['old']}"
                )
            texts[edit["file"]] = text.replace(edit["old"], edit["new"])
        return texts

    def control(self) -> Fault:
        """The same row without its change: its tests pass."""
        return dataclasses.replace(self, id=f"control of {self.id}", new=self.old, edits=())

    def digest(self) -> str:
        """Of all that decides the verdict except the rest of the checkout."""
        row: list[object] = [self.file, self.old, self.new, self.tests]
        row += [more for more in (self.edits, self.detail) if more]
        return hashlib.sha256(json.dumps(row).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a back end's judge(fault, scratch, limit_s) returns."""

    noticed: bool
    by: str  # the test that failed; "time" if the tests did not end; "" if none noticed
    seconds: float
    said: str  # the test's message in one line, for readers


def load(kind: str, root: Path = ROOT) -> list[Fault]:
    """All rows of a kind, checked."""
    path = root / "tests" / "judge" / "faults" / f"{kind}.toml"
    rows = tomllib.loads(path.read_text("utf-8")).get("fault", [])
    faults = [_fault(row, root, path) for row in rows]
    seen: set[str] = set()
    for fault in faults:
        if fault.id in seen:
            raise FaultError(f"fault {fault.id}: the id occurs twice in {path.name}")
        seen.add(fault.id)
        fault.check()
    return faults


def _fault(row: dict[str, Any], root: Path, path: Path) -> Fault:
    names = {field.name for field in dataclasses.fields(Fault)} - {"root"}
    optional = {"equivalent", "edits", "detail"}
    wrong = sorted({*row} - names) + sorted(names - optional - {*row})
    if wrong:
        raise FaultError(f"fault {row.get('id')} of {path.name}: missing or unknown {wrong}")
    lists: dict[str, Any] = {name: tuple(row[name]) for name in ("tests", "edits") if name in row}
    return Fault(**(row | lists), root=root)


def drawn_fault(
    name: str, place: tuple[Path, str], texts: tuple[str, str], tests: Mapping[str, Iterable[str]]
) -> Fault:
    """A fault that was drawn, checked.

    Args:
        place: the root and the file.
        texts: the old one and the new one.
        tests: below the folder tests, by beginnings of files; those of the longest are taken.
    """
    root, file = place
    longest = max((begin for begin in tests if file.startswith(begin)), key=len)
    chosen = tuple(f"tests/{each}" for each in tests[longest])
    fault = Fault(name, file, *texts, tests=chosen, origin="drawn", root=root)
    fault.check()
    return fault


def row(fault: Fault) -> str:
    """As TOML: literal texts of several lines begin after the first line's end."""
    tests = ", ".join(f'"{name}"' for name in fault.tests)
    for text in (fault.old, fault.new):
        assert "'''" not in text
    return (
        f'\n[[fault]]\nid = "{fault.id}"\nfile = "{fault.file}"\n'
        f"old = '''\n{fault.old}'''\nnew = '''\n{fault.new}'''\n"
        f'tests = [{tests}]\norigin = "drawn"\n'
    )
