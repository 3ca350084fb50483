"""Faults of csrc: the C++ tests of `make test`, and Python tests with the extension.

The copy is built once, with a unit for each source of the engine, so that a fault in a source
compiles that source. A fault in a header first compiles what includes it of the engine and of the
nearest test files, each alone; the other tests only if none of these notices it. Objects are kept
for the way back.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import sys
from pathlib import Path

from tests.judge.backends import python
from tests.judge.bounded import Done, run_bounded
from tests.judge.table import Fault, FaultError, Verdict

_TESTS = Path("tests", "cpp")
NEAREST = "tests/cpp: the nearest files"  # in place of tests/cpp: the others do not run
_PROGRAM = Path("build", "cpp", "plain", "ringcomm_tests")
_CCACHE = "/usr/lib/ccache"
_NUM_NEAR = 4
_NEAR_LIMIT_S = 150.0
_TRIES = 3
# What has noticed, if not a case of the C++ tests.
_NO_CASES = ("time", "static_assert", "pytest", "tests/python/", _PROGRAM.name)
_CASE = re.compile(r"^TEST CASE:\s*(.+)$", re.MULTILINE)
_STATIC_ASSERT = re.compile(r".*tests/cpp/\S+: error: static assertion failed.*")
_ERROR = re.compile(r"(?:FATAL )?ERROR: (.*)")
_WORD = re.compile(r"[A-Za-z]\w{4,}")


class _AssertionError(Exception):
    """A static_assert of a test fails."""


def judge(fault: Fault, scratch: Path, limit_s: float) -> Verdict:
    """Runs the nearest C++ tests, all of them, then the Python tests of the row, until one fails.

    A failure counts if the test fails again by itself. Without the fault it must pass.
    """
    tree = scratch / "tree"
    python.copy(fault.root, tree)
    before = _objects(tree, fault.file)
    source = tree / fault.file
    source.write_text(fault.changed(), "utf-8")
    try:
        found = _verdict(fault, tree, limit_s)
    except _AssertionError as error:
        found = Verdict(True, "static_assert", 0.0, str(error))
    finally:
        source.write_text((fault.root / fault.file).read_text("utf-8"), "utf-8")
        for path in _objects(tree, fault.file):
            if path in before:
                path.write_bytes(before[path])  # newer than the source
            else:
                path.unlink()
    is_case = found.noticed and not found.by.startswith(_NO_CASES)
    if is_case and fault.new != fault.old and not _passes(tree, found.by, limit_s):
        raise FaultError(f"{found.by} fails without the fault {fault.id}")
    return found


def _objects(tree: Path, file: str) -> dict[Path, bytes]:
    """The objects of the C++ tests that the file is part of."""
    found = (tree / _PROGRAM).parent.rglob("*.d")
    objects = [path.with_suffix(".o") for path in found if f"/{file}" in path.read_text("utf-8")]
    return {path: path.read_bytes() for path in objects if path.exists()}


def _verdict(fault: Fault, tree: Path, limit_s: float) -> Verdict:
    found = Verdict(False, "", 0.0, "")
    if {NEAREST, str(_TESTS)} & {*fault.tests}:
        found = _near(fault, tree)
        if not found.noticed and NEAREST not in fault.tests:
            found = _all(fault, tree, limit_s, found.seconds)
    files = [name for name in fault.tests if name not in (NEAREST, str(_TESTS))]
    if files and not found.noticed:
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        seconds = found.seconds + _build(fault, tree, command, limit_s)
        found = python.verdict(fault, tree, limit_s, files)
        found = Verdict(found.noticed, found.by, found.seconds + seconds, found.said)
    return found


def _near(fault: Fault, tree: Path) -> Verdict:
    files = nearest(fault, tree)
    units: list[str] = []
    if fault.file.endswith(".h"):
        all_files = sorted((tree / _TESTS).glob("test_*.cc"))
        # The linker's flags name functions of these.
        wrappers = [file for file in all_files if "__wrap_" in file.read_text("utf-8")]
        needed = dict.fromkeys([*files, *wrappers])
        places = [(all_files.index(file) + 1) % len(all_files) for file in needed]
        tests = " ".join(f"tests_{place}_of_{len(all_files)}" for place in places)
        engine = " ".join(f"engine_{idx}" for idx in range(_num_engine(tree)))
        units = [f"NUM_TEST_UNITS={len(all_files)}", f"UNITS={tests} {engine} gpu"]
        (tree / _PROGRAM).unlink(missing_ok=True)
    seconds = _build(fault, tree, _make(tree, *units, str(tree / _PROGRAM)), 1800)
    if units:
        (tree / _PROGRAM).rename(tree / "near_tests")
    program = str(tree / "near_tests" if units else tree / _PROGRAM)
    names = ",".join(f"*{file.name}" for file in files)
    return _judged(tree, program, [program, "-aa=1", f"-sf={names}"], _NEAR_LIMIT_S, seconds)


def _all(fault: Fault, tree: Path, limit_s: float, seconds: float) -> Verdict:
    """What make test runs: at each level of SIMD, too."""
    seconds += _build(fault, tree, _make(tree, "build"), 3600)
    program = str(tree / _PROGRAM)
    return _judged(tree, program, _make(tree, "run"), limit_s, seconds)


def _judged(
    tree: Path, program: str, command: list[str], limit_s: float, seconds: float
) -> Verdict:
    """A case that fails must fail again by itself; otherwise the others run without it."""
    passed_later: list[str] = []
    for _ in range(_TRIES):
        left_out = [f"-tce={','.join(map(_pattern, passed_later))}"] if passed_later else []
        if command[0] == "make":
            left_out = [f"ARGS=-aa=1 {shlex.join(left_out)}"]
        done = _run(tree, [*command, *left_out], limit_s)
        seconds += done.seconds
        if done.status is None:
            return Verdict(True, "time", seconds, f"no end after {done.seconds:.0f} s")
        if done.status == 0:
            break
        error = _ERROR.search(done.output)
        said = error[0] if error else done.output.strip().rsplit("\n", 1)[-1]
        end = error.start() if error else len(done.output)
        cases = [
            name
            for name in _CASE.findall(done.output, 0, end)
            if not name.startswith("child: ")  # of a program that a case has started
        ]
        if not cases:  # the program ended before it could say which
            return Verdict(True, _PROGRAM.name, seconds, said)
        case = cases[-1].strip()
        again = _run(tree, [program, "-aa=1", f"-tc={_pattern(case)}"], _NEAR_LIMIT_S)
        seconds += again.seconds
        if again.status != 0:
            return Verdict(True, case, seconds, said)
        passed_later.append(case)
    said = f"passed when run again: {', '.join(passed_later)}" if passed_later else ""
    return Verdict(False, "", seconds, said)


@functools.cache
def _passes(tree: Path, case: str, limit_s: float) -> bool:
    _run(tree, _make(tree, "build"), 3600)
    return _run(tree, [str(tree / _PROGRAM), f"-tc={_pattern(case)}"], limit_s).status == 0


def _pattern(case: str) -> str:
    return case.replace(",", "?").replace("'", "?")  # a comma would begin another pattern


def _build(fault: Fault, tree: Path, command: list[str], limit_s: float) -> float:
    done = _run(tree, command, limit_s)
    if done.status != 0:
        if failed := _STATIC_ASSERT.search(done.output):
            raise _AssertionError(failed[0])
        lines = [line for line in done.output.splitlines() if "error" in line] or [done.output]
        raise FaultError(f"{fault.id} does not compile: {lines[0][-300:]}")
    return done.seconds


def _make(tree: Path, *arguments: str) -> list[str]:
    units = f"NUM_ENGINE_UNITS={_num_engine(tree)}"
    return ["make", "-s", "-j3", "-C", str(tree / _TESTS), units, "RINGCOMM_WERROR=0", *arguments]


def _num_engine(tree: Path) -> int:
    folders = ("core", "host", "collectives", "transport", "communicator")
    return sum(len(list((tree / "csrc" / name).rglob("*.cc"))) for name in folders)


def _run(tree: Path, command: list[str], limit_s: float) -> Done:
    env = {
        **os.environ,
        "PATH": f"{_CCACHE}:{os.environ['PATH']}",
        "RINGCOMM_MAX_JOBS": "3",
        "OMP_NUM_THREADS": "1",
    }
    return run_bounded(command, tree, limit_s, env)


def nearest(fault: Fault, tree: Path) -> list[Path]:
    """The test files that share most words with the file: words of few test files count more."""
    files = [path for path in sorted((tree / _TESTS).glob("test_*.cc")) if "_gpu_" not in path.name]
    stem = Path(fault.file).stem
    words = {path: _words(path) for path in files}
    score = {path: 3.0 * (stem in path.stem) for path in files}
    for word in set(_WORD.findall((fault.root / fault.file).read_text("utf-8"))):
        having = [path for path in files if word in words[path]]
        for path in having:
            score[path] += 10 / len(having) / len(words[path]) ** 0.5
    return sorted(files, key=lambda path: (-score[path], path))[:_NUM_NEAR]


@functools.cache
def _words(path: Path) -> set[str]:
    return set(_WORD.findall(path.read_text("utf-8")))
