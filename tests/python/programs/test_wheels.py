"""Wheels for several versions of torch: what is put together, and which extension is loaded."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

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
        assert f"{package} has those for torch 2.9. Build it" in done.stderr.splitlines()[-1]
