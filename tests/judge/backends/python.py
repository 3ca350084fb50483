"""Faults of the Python package: the tests run in a copy of the checkout, with what is built."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.judge.bounded import ENDS_WITH_US, NICE, Done
from tests.judge.table import Fault, FaultError, Verdict

WHOLE = ("tests/python",)  # the quick tests
# What is built, downloaded or recorded; tests make anew what they need of it.
_LEFT_OUT = (".git", ".venv", ".cache", "build", "dist", "runs", "gpu-kit", "__pycache__")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", re.MULTILINE)
_WORD = re.compile(r"\w+")
_DEFINED = re.compile(r"^(?:def|class) (\w+)|^    def (\w+)|^([A-Z]\w+)\b.* =", re.MULTILINE)
_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# Of an error: it tells of a wait, or of a process that was ended.
_OF_TIME = re.compile(r"^E .*(time|late\b|wait|deadline|arriv|stuck|signal|ended)", re.M | re.I)
_NO_TESTS = 5  # pytest's exit status
_OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-m", "not slow")
_TRIES = 3


def judge(fault: Fault, scratch: Path, limit_s: float) -> Verdict:
    """Runs the tests, the nearest files first, until one fails.

    A failure that may come from a busy machine counts if the test fails again by itself.
    """
    tree = scratch / "tree"
    copy(fault.root, tree)
    source = tree / fault.file
    _replace(source, fault.changed())
    try:
        return verdict(fault, tree, limit_s, nearest(fault, tree))
    finally:
        _replace(source, (fault.root / fault.file).read_text("utf-8"))


def copy(root: Path, tree: Path) -> None:
    """Copies a checkout, unless that has been done."""
    if not tree.exists():
        shutil.copytree(root, tree, symlinks=True, ignore=shutil.ignore_patterns(*_LEFT_OUT))


def _replace(source: Path, text: str) -> None:
    """As a new file, without the compiled module, whose time may be the same second."""
    source.unlink()
    source.write_text(text, "utf-8")
    for compiled in (source.parent / "__pycache__").glob(f"{source.stem}.*.pyc"):
        compiled.unlink()


def verdict(fault: Fault, tree: Path, limit_s: float, files: list[str]) -> Verdict:
    """Of the tests, in this order, in a tree that has the fault."""
    passed_later: list[str] = []  # failed, and passed when run again
    seconds = 0.0
    for _ in range(_TRIES):
        options = [f"--deselect={name}" for name in passed_later]
        done = _pytest(tree, [*options, *files], limit_s - seconds)
        seconds += done.seconds
        said = "" if not passed_later else f"passed the second time: {', '.join(passed_later)}"
        if done.status is None:
            return Verdict(True, "time", seconds, f"no end after {limit_s:.0f} s")
        if done.status == 0:
            return Verdict(False, "", seconds, said)
        if done.status == _NO_TESTS:
            raise FaultError(f"fault {fault.id}: {fault.tests} has no test")
        failed = _FAILED.search(done.output)
        if failed is None:  # pytest itself broke, or ranks have left something behind
            return Verdict(True, "pytest", seconds, done.output.strip().rsplit("\n", 1)[-1])
        name, message = failed.group(1), failed.group(2) or ""
        if not _OF_TIME.search(done.output):
            return Verdict(True, name, seconds, message)
        second = _pytest(tree, [name], limit_s)
        seconds += second.seconds
        if second.status != 0:
            return Verdict(True, name, seconds, message)
        passed_later.append(name)
    return Verdict(False, "", seconds, f"passed the second time: {', '.join(passed_later)}")


def _pytest(tree: Path, arguments: list[str], limit_s: float) -> Done:
    scratch = tree.parent
    temporary, output = scratch / "tmp", scratch / "output"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    more = {
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(temporary),
        "COLUMNS": "300",  # pytest's summary cuts messages
    }
    request = {
        "cwd": str(tree),
        "env": {**os.environ, **more},
        "arguments": [*_OPTIONS, *arguments],
        "output": str(output),
        "limit_s": limit_s,
    }
    begin, warm = time.monotonic(), _warm(scratch)
    assert warm.stdin is not None
    assert warm.stdout is not None
    warm.stdin.write(json.dumps(request) + "\n")
    warm.stdin.flush()
    status: int | None = json.loads(warm.stdout.readline())
    return Done(status, output.read_text("utf-8", "replace"), time.monotonic() - begin)


@functools.cache
def _warm(scratch: Path) -> subprocess.Popen[str]:
    """For each copy of the checkout one process from which its runs are forked; see warm.py."""
    program = Path(__file__).parents[1] / "warm.py"
    return subprocess.Popen(
        [*ENDS_WITH_US, *NICE, sys.executable, str(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=scratch,
    )


def nearest(fault: Fault, tree: Path) -> list[str]:
    """The test files of the selection, those first that name what the fault is in.

    Names that few files have count more, and those of the changed function and its class most.
    """
    files: list[str] = []
    for selected in fault.tests:
        path = tree / selected.split("::")[0]
        if path.is_dir():
            files += [str(found.relative_to(tree)) for found in path.rglob("test_*.py")]
        else:
            files.append(selected)
    files = list(dict.fromkeys(files))
    words = {file: set(_WORD.findall((tree / file.split("::")[0]).read_text())) for file in files}
    stems = [part.strip("_") for part in Path(fault.file).with_suffix("").parts[1:]]
    score = {file: 3.0 * any(stem in Path(file).stem for stem in stems) for file in files}
    for name, weight in _names(fault).items():
        having = [file for file in files if name in words[file]]
        for file in having:
            score[file] += weight / len(having)
    return sorted(files, key=lambda file: (-score[file], file))


def _names(fault: Fault) -> dict[str, int]:
    """What the file defines, with its weight."""
    text = (fault.root / fault.file).read_text("utf-8")
    names = {name: 1 for groups in _DEFINED.findall(text) for name in groups if name}
    line = 1 + text[: text.index(fault.old)].count("\n") + fault.old.rstrip().count("\n") // 2
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _NAMED) and node.lineno <= line <= (node.end_lineno or line):
            names[node.name] = 5
    return {name: weight for name, weight in names.items() if not name.startswith("__")}
