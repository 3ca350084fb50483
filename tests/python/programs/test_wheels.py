"""Wheels for several versions of torch: which are built, and which extension is loaded."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import buildconfig
import pytest
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
    required = ["Requires-Dist: torch>=2.13,<2.15", "Requires-Dist: numpy"]
    assert lines[1:4] == [f"Version: {version}", *required]
    assert "+" not in version


def test_the_extension_of_this_torch_is_loaded(tmp_path: Path) -> None:
    """Without one: test_mistakes.py."""
    package = tmp_path / "ringcomm"
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "ringcomm", package, ignore=ignored)
    own = f"torch_{MINOR.replace('.', '_')}"
    for name in ("torch_2_9", own):
        (package / name).mkdir()
        for extension in (ROOT / "ringcomm").glob("*.so"):
            shutil.copy(extension, package / name)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport torch, ringcomm\n"
    code += "print(ringcomm._C.__file__, ringcomm._kernels.__file__)"
    said = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=TIMEOUT_S)
    assert {Path(name).parent for name in said.split()} == {package / own}


def test_a_wheel_is_tried_with_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[Sequence[str], dict[str, str]]] = []

    def run(command: Sequence[str], **options: Any) -> None:
        if command[2] == "venv":
            (tmp_path / "env" / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
        else:
            ran.append((command, options["env"]))

    monkeypatch.setattr(wheels.subprocess, "run", run)
    wheels.try_wheel(sys.executable, tmp_path / "a.whl", ["/packages"], tmp_path)
    (path,) = tmp_path.glob("env/lib/python*/site-packages/*.pth")
    assert path.read_text() == "/packages\n"
    assert [command[1] for command, _ in ran] == ["-m", "-c", "-c", "doctor", "bench"]
    assert {command[3] for command, _ in ran if command[1] == "-c"} == {"0", "1"}
    for _, env in ran:
        assert all(shutil.which(name, path=env["PATH"]) is None for name in ("cc", "g++", "ninja"))
        monkeypatch.setenv("CXX", env["CXX"])
        with pytest.raises(buildconfig.BuildProblem, match="no C\\+\\+ compiler: '/nonexistent'"):
            buildconfig.check_compiler()


def test_a_release_builds_a_wheel_for_each_python() -> None:
    yaml = pytest.importorskip("yaml")
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    workflow = yaml.safe_load(text)
    job = workflow["jobs"]["wheels"]
    metadata = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = re.findall(r'Programming Language :: Python :: (3\.\d+)"', metadata)
    assert job["strategy"]["matrix"]["python"] == named
    (made, *_) = [step["run"] for step in job["steps"] if "run" in step]
    assert made == 'make wheels PYTHON=python ARGS="--python ${{ matrix.python }}"'
    text = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    assert f"PYTHONS = {named}".replace("'", '"') in text
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
