"""Wheels for several versions of torch: which are built, and which extension is loaded."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import buildconfig
import check_packaging
import compat
import pytest
import pythons
import torch
import wheels

ROOT = Path(__file__).resolve().parents[3]
MINOR = ".".join(torch.__version__.split(".")[:2])
TIMEOUT_S = 60


@pytest.mark.parametrize(
    ("minors", "allowed"),
    [
        (["2.13"], ">=2.13,<2.14"),
        (["2.13", "2.14", "2.15"], ">=2.13,<2.16"),
        (["2.11", "2.13", "2.15"], ">=2.11,<2.16,!=2.12.*,!=2.14.*"),
    ],
)
def test_a_wheel_requires_a_torch_that_it_serves(minors: list[str], allowed: str) -> None:
    assert wheels.requirement(minors) == f"Requires-Dist: torch{allowed}"


def test_wheels_are_merged(tmp_path: Path) -> None:
    parts = {}
    for minor in ("2.13", "2.14"):
        parts[minor] = tmp_path / minor
        (parts[minor] / "ringcomm").mkdir(parents=True)
        (parts[minor] / "ringcomm" / "_C.cpython-311.so").write_text(minor)
        info = parts[minor] / f"ringcomm-0.1.0+torch{minor}.dist-info"
        info.mkdir()
        text = f"Name: ringcomm\nVersion: 0.1.0+torch{minor}\nRequires-Dist: torch=={minor}.*\n"
        (info / "METADATA").write_text(f"{text}Requires-Dist: numpy\n\nVersion: of the readme\n")
    merged = wheels.merge(parts)
    for minor, name in (("2.13", "torch_2_13"), ("2.14", "torch_2_14")):
        assert (merged / "ringcomm" / name / "_C.cpython-311.so").read_text() == minor
    assert not list(merged.glob("ringcomm/*.so"))
    (info,) = merged.glob("*.dist-info")
    version = info.name.removeprefix("ringcomm-").removesuffix(".dist-info")
    lines = (info / "METADATA").read_text().splitlines()
    assert lines[1:4] == [
        f"Version: {version}",
        "Requires-Dist: torch>=2.13,<2.15",
        "Requires-Dist: numpy",
    ]
    assert "+" not in version


@pytest.mark.parametrize("has_own", [True, False])
def test_the_extension_of_this_torch_is_loaded(has_own: bool, tmp_path: Path) -> None:
    package = tmp_path / "ringcomm"
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "ringcomm", package, ignore=ignored)
    for name in ("torch_2_9", f"torch_{MINOR.replace('.', '_')}")[: 1 + has_own]:
        (package / name).mkdir()
        for extension in (ROOT / "ringcomm").glob("*.so"):
            shutil.copy(extension, package / name)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport torch, ringcomm\n"
    code += "print(ringcomm._C.__file__, ringcomm._kernels.__file__)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if has_own:
        folders = {Path(name).parent for name in done.stdout.split()}
        assert folders == {package / f"torch_{MINOR.replace('.', '_')}"}, done.stderr
    else:
        said = done.stderr.splitlines()[-1]
        assert f"{package} has those for torch 2.9 ({EXTENSION_SUFFIXES[0]}). Build it" in said
        assert said.endswith("Or install a torch that is served: pip install 'torch==2.9.*'")


def write_python(path: Path, says: str) -> None:
    """A program in place of a Python, which prints something whatever it is asked."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{says}\n")
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with Pythons of which some are no good, and a pyenv."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'shims'}{os.pathsep}{tmp_path / 'bin'}")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    for minor in (9, 30, 31):  # pyenv has one of its programs for each version, on or not
        write_python(tmp_path / "shims" / f"python3.{minor}", "exit 127")
    write_python(tmp_path / "bin" / "python3.30", 'echo \'["3.30", ""]\'')
    write_python(tmp_path / "bin" / "python3.30-config", "exit 1")
    write_python(tmp_path / "bin" / "python3.32", 'echo \'["3.32", "no headers"]\'')
    write_python(tmp_path / "bin" / "python3.33", 'echo \'["3.12", ""]\'')
    versions = tmp_path / "pyenv" / "versions"
    write_python(versions / "3.31.2" / "bin" / "python3.31", 'echo \'["3.31", ""]\'')
    return tmp_path


def test_pythons_are_those_on_the_path_and_of_pyenv(machine: Path) -> None:
    good, bad = pythons.find()
    assert [(one.minor, Path(one.path).parent.name) for one in good] == [
        ("3.30", "bin"),
        ("3.31", "bin"),
    ]
    assert good[1].path.startswith(str(machine / "pyenv"))
    folder = machine / "bin"
    own = f"3.{sys.version_info.minor}"
    assert sorted(bad) == [
        f"Python {own}: /nonexistent/python: it does not run",
        f"Python 3.32: {folder}/python3.32: no headers",
        f"Python 3.33: {folder}/python3.33: it is Python 3.12",
    ]


@pytest.mark.parametrize(
    ("minor", "message"),
    [
        ("3.32", "Python 3.32: .*/bin/python3.32: no headers"),
        ("3.40", "no python3.40 on PATH or of pyenv"),
    ],
)
def test_a_python_that_is_named_must_be_good(minor: str, message: str, machine: Path) -> None:
    assert [one.minor for one in pythons.find(["3.31"])[0]] == ["3.31"]
    with pytest.raises(buildconfig.BuildProblem, match=message):
        pythons.find(["3.31", minor])


def test_the_running_python_is_good_if_its_headers_are_here() -> None:
    one = pythons.Python(f"3.{sys.version_info.minor}", sys.executable)
    header = Path(sysconfig.get_path("include"), "Python.h")
    assert pythons.fault_of(one) == "" or not header.exists()


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Two Pythons and pip's torches in place of those that are here; what would be run."""
    ran: list[str] = []
    torches = {"3.30": ["2.13.0", "2.14.1"], "3.31": ["2.14.1"], "3.32": []}

    def find(self: compat.Environments, wanted: str) -> str:
        minor = self.home.name.removeprefix("python")
        found = [one for one in torches[minor] if one.startswith(f"{wanted}.")]
        if not found:
            raise compat.Offline(f"no torch=={wanted}.*")
        return found[0]

    def build_for(python: Path, folder: Path) -> Path:
        ran.append(f"build {python.relative_to(wheels.HOME)}")
        return folder

    def pack(unpacked: Path, folder: Path) -> Path:
        ran.append("pack")
        return folder / "ringcomm.whl"

    def run(*command: str, **_: str) -> None:
        ran.append(f"run {Path(command[0]).relative_to(wheels.HOME)} {command[1]}")

    chosen = [pythons.Python(minor, str(tmp_path / "home" / minor)) for minor in torches]
    bad = ["Python 3.33: no headers"]
    monkeypatch.setattr(wheels, "HOME", tmp_path / "home")
    monkeypatch.setattr(pythons, "find", lambda wanted: (chosen, [] if wanted else bad))
    monkeypatch.setattr(compat.Environments, "find", find)
    for name, stand_in in (("build_for", build_for), ("pack", pack), ("run", run)):
        monkeypatch.setattr(wheels, name, stand_in)
    monkeypatch.setattr(wheels, "merge", lambda parts: next(iter(parts.values())))
    return ran


def main_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["wheels.py", *arguments])
    return wheels.main()


def test_a_wheel_is_built_for_each_python(
    builds: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_of(monkeypatch) == 0
    python = "venv/bin/python"
    assert [one for one in builds if not one.endswith("-m")] == [
        f"build python3.30/2.13.0/{python}",
        f"build python3.30/2.14.1/{python}",
        "pack",
        f"run python3.30/2.13.0/{python} -c",
        f"run python3.30/2.14.1/{python} -c",
        f"build python3.31/2.14.1/{python}",
        "pack",
        f"run python3.31/2.14.1/{python} -c",
    ]
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "made" in line or "left out" in line] == [
        "[wheels] made: dist/ringcomm.whl serves torch 2.13, 2.14",
        "[wheels] made: dist/ringcomm.whl serves torch 2.14",
        "[wheels] left out: Python 3.33: no headers",
        "[wheels] left out: Python 3.30 with torch 2.15: no torch==2.15.*",
        "[wheels] left out: Python 3.31 with torch 2.13: no torch==2.13.*",
        "[wheels] left out: Python 3.31 with torch 2.15: no torch==2.15.*",
        *[
            f"[wheels] left out: Python 3.32 with torch 2.{n}: no torch==2.{n}.*"
            for n in (13, 14, 15)
        ],
    ]


CONFLICT = """ERROR: Cannot install torch==2.15.* because of conflicting dependencies.
ERROR: ResolutionImpossible: for help visit a page"""


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        ("ERROR: Could not find it\nERROR: No matching distribution", "ERROR: No matching"),
        (CONFLICT, "ERROR: Cannot install torch.* Does a constraint of `pip config list` exclude"),
    ],
)
def test_the_reason_of_pip_is_said(stderr: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "stderr").write_text(stderr)
    write_python(tmp_path / "python", f"cat {tmp_path / 'stderr'} >&2; exit 1")
    with pytest.raises(compat.Offline, match=reason):
        compat.pip(tmp_path / "python", "download", "torch")


def test_what_was_asked_for_must_be_there(
    builds: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_of(monkeypatch, "2.13") == 1  # two of the Pythons have none
    assert main_of(monkeypatch, "--python", "3.30") == 1  # no torch 2.15
    assert main_of(monkeypatch, "2.9") == 1
    assert "made" not in capsys.readouterr().out.splitlines()[-1]


def test_a_build_that_fails_does_not_stop_the_others(
    builds: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build_for(python: Path, folder: Path) -> Path:
        if "3.30" in str(python):
            raise buildconfig.BuildProblem("does not compile")
        return folder

    monkeypatch.setattr(wheels, "build_for", build_for)
    assert main_of(monkeypatch) == 1
    said = capsys.readouterr().out
    assert "made: dist/ringcomm.whl serves torch 2.14\n" in said
    assert "[wheels] FAILED: Python 3.30: does not compile\n" in said


def test_a_wheel_is_tried_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    env = check_packaging.without_compiler(tmp_path)
    assert all(shutil.which(name, path=env["PATH"]) is None for name in ("cc", "g++", "ninja"))
    monkeypatch.setenv("PATH", env["PATH"])
    monkeypatch.setenv("CXX", env["CXX"])
    with pytest.raises(buildconfig.BuildProblem, match="no C\\+\\+ compiler: '/nonexistent'"):
        buildconfig.check_compiler()
    write_python(programs / "ninja", "exit 0")
    with pytest.raises(SystemExit, match="has ninja"):
        check_packaging.without_compiler(tmp_path)


def test_a_release_builds_a_wheel_for_each_python() -> None:
    yaml = pytest.importorskip("yaml")
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    workflow = yaml.safe_load(text)
    job = workflow["jobs"]["wheels"]
    metadata = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = re.findall(r'Programming Language :: Python :: (3\.\d+)"', metadata)
    assert job["strategy"]["matrix"]["python"] == named
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == [
        'make wheels PYTHON=python ARGS="--python ${{ matrix.python }}"',
        'gh release upload "$GITHUB_REF_NAME" dist/*.whl --clobber',
    ]
    assert all("timeout-minutes" in one for one in workflow["jobs"].values())
    assert "RINGCOMM_URL" in workflow["env"]


@pytest.mark.parametrize("url", ["https://example.org/project", ""])
def test_the_address_of_the_project_is_that_of_the_release(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGCOMM_URL", url)
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=TIMEOUT_S)
    text = (tmp_path / "ringcomm.egg-info" / "PKG-INFO").read_text(encoding="utf-8")
    expected = [f"Project-URL: Source, {url}"] if url else []
    assert re.findall("(?m)^Project-URL.*$", text) == expected
