"""tools/build_backend.py: a plain `pip install .` builds for the torch that is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import buildconfig
import pytest

TIMEOUT_S = 120
# In place of setuptools: its hooks say whether they could import torch.
BUILD_META = """
import importlib.util
def _found(*_): return "torch" if importlib.util.find_spec("torch") else "no torch"
def get_requires_for_build_wheel(settings=None): return ["ninja"]
get_requires_for_build_editable = get_requires_for_build_sdist = get_requires_for_build_wheel
prepare_metadata_for_build_wheel = prepare_metadata_for_build_editable = _found
build_wheel = build_editable = build_sdist = _found
"""
HOOKS = """
import build_backend as backend
for name in ("get_requires_for_build_wheel", "get_requires_for_build_editable"):
    print(*getattr(backend, name)())
print(backend.prepare_metadata_for_build_wheel("folder"))
print(backend.build_wheel("folder", None, "folder"))
print(backend.build_editable("folder"))
"""


def said_by_hooks(python: str, folder: Path) -> list[str]:
    """In an interpreter isolated as pip does it: PYTHONPATH, and none of its own packages."""
    (folder / "setuptools").mkdir()
    (folder / "setuptools" / "__init__.py").write_text("")
    (folder / "setuptools" / "build_meta.py").write_text(BUILD_META)
    path = os.pathsep.join([str(folder), str(buildconfig.ROOT / "tools")])
    env = {**os.environ, "PYTHONPATH": path, "PYTHONNOUSERSITE": "1"}
    command = [python, "-S", "-c", HOOKS]
    done = subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_torch_is_that_of_the_environment(tmp_path: Path) -> None:
    assert said_by_hooks(sys.executable, tmp_path) == [*["ninja"] * 2, *["torch"] * 3]


def test_torch_is_required_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # whose packages might have one
    venv.create(tmp_path / "env", symlinks=True)
    python = str(tmp_path / "env" / "bin" / "python")
    wanted = f"ninja {buildconfig.TORCH}"
    assert said_by_hooks(python, tmp_path) == [*[wanted] * 2, *["no torch"] * 3]
