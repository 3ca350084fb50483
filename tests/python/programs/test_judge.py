"""The judge of tests/judge: what it says of a package of two functions, of which one is tested."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rank_programs import run_command

ROOT = Path(__file__).parents[3]
PACKAGE = "def twice(x):\n    return 2 * x\n\n\ndef thrice(x):\n    return 3 * x\n"
TESTS = "from package import twice\n\n\ndef test_twice():\n    assert twice(3) == 6\n"
ROW = """
[[fault]]
id = "{id}"
file = "package.py"
old = "{old}"
new = "x"
tests = ["tests"]
origin = "hand"
"""


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = (sys.executable, "-m", "tests.judge.run", *arguments)
    return run_command(*words, cwd=ROOT, timeout_s=300)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A checkout with a table of two faults."""
    faults = tmp_path / "tests" / "judge" / "faults"
    faults.mkdir(parents=True)
    rows = ROW.format(id="seen", old="2 * x") + ROW.format(id="unseen", old="3 * x")
    (faults / "python.toml").write_text(rows)
    (tmp_path / "package.py").write_text(PACKAGE)
    (tmp_path / "tests" / "test_package.py").write_text(TESTS)
    return tmp_path


def results_in(project: Path) -> dict[str, Any]:
    lines = (project / "tests/judge/results/python.jsonl").read_text().splitlines()
    return {line["id"]: line for line in map(json.loads, lines)}


@pytest.mark.slow
def test_a_fault_is_noticed_and_one_that_no_test_sees_is_said(project: Path) -> None:
    done = run("--root", project, "--kind", "python")
    assert done.returncode == 1, done.stderr
    results = results_in(project)
    assert results["seen"]["noticed"]
    assert results["seen"]["by"] == "tests/test_package.py::test_twice"
    assert not results["unseen"]["noticed"]
    assert "unseen: NOT NOTICED" in done.stdout
    assert "| all | 2 | 0 | 2 | 1 | 1 | 50 |" in done.stdout
    assert (project / "package.py").read_text() == PACKAGE
    # What has a result is not run again; a row that has changed has none.
    assert run("--root", project, "--kind", "python").returncode == 0
    table = project / "tests/judge/faults/python.toml"
    table.write_text(table.read_text().replace("seen", "again", 1))
    assert "| all | 2 | 0 | 1 | 0 | 0 | 0 |" in run("--root", project, "--dry").stdout


@pytest.mark.slow
def test_nothing_is_judged_by_tests_that_fail_without_a_fault(project: Path) -> None:
    (project / "tests/test_package.py").write_text(TESTS.replace("== 6", "== 7"))
    done = run("--root", project, "--kind", "python")
    assert done.returncode == 1
    assert "without a fault tests/test_package.py::test_twice fails" in done.stderr
    assert not (project / "tests/judge/results").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("2 * x", "4 * x", "fault seen: its text occurs 0 times in package.py, not once"),
        ("2 * x", "x):", "fault seen: its text occurs 2 times"),
        ("package.py", "other.py", "fault seen: there is no file other.py"),
        ('"hand"', '"luck"', "fault seen: origin is 'luck', not hand or drawn"),
        ('["tests"]', "[]", "fault seen: it names no tests"),
        ('new = "x"', 'new = "2 * x"', "fault seen: new is old"),
        ("old =", "odd =", "fault seen of python.toml: missing or unknown ['odd', 'old']"),
        ('"unseen"', '"seen"', "fault seen: the id occurs twice"),
    ],
)
def test_a_row_that_cannot_be_applied_is_named(
    project: Path, old: str, new: str, message: str
) -> None:
    table = project / "tests/judge/faults/python.toml"
    table.write_text(table.read_text().replace(old, new, 1))
    done = run("--root", project, "--kind", "python", "--dry")
    assert done.returncode == 1
    assert message in done.stderr


def test_every_row_can_be_applied() -> None:
    done = run("--dry")
    assert done.returncode == 0, done.stderr
