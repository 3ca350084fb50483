"""tools/build_backend.py: a plain `pip install .` builds for the torch that is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import buildconfig
import pytest
import torch

TIMEOUT_S = 60
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
for name in ("prepare_metadata_for_build_wheel", "build_wheel", "build_editable"):
    print(getattr(backend, name)("folder"))
"""


def said_by_hooks(python: str, folder: Path) -> list[str]:
    """Of an interpreter isolated as pip does it: PYTHONPATH, and none of its own packages."""
    (folder / "folder").mkdir()
    (folder / "setuptools").mkdir()
    (folder / "setuptools" / "__init__.py").write_text("")
    (folder / "setuptools" / "build_meta.py").write_text(BUILD_META)
    tools = buildconfig.ROOT / "tools"
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{tools}", "PYTHONNOUSERSITE": "1"}
    command = [python, "-S", "-c", HOOKS]
    said = subprocess.check_output(command, env=env, cwd=folder, text=True, timeout=TIMEOUT_S)
    return said.splitlines()


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


@pytest.mark.parametrize("fits", [True, False])
def test_a_wheel_is_taken_if_it_serves_the_installed_torch(
    fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = buildconfig.public_version()
    info = f"ringcomm-{version}.dist-info"
    wheel = tmp_path / f"ringcomm-{version}-py3-none-any.whl"
    minor = "_".join(torch.__version__.split(".")[:2]) if fits else "2_9"
    texts = {
        f"ringcomm/torch_{minor}/_C.so": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: ringcomm\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in texts.items():
            archive.writestr(name, text)
    monkeypatch.setenv("RINGCOMM_WHEELS", str(tmp_path))
    said = said_by_hooks(sys.executable, tmp_path)
    # No requirement, and what comes from the wheel; editable installs are always compiled.
    expected = ["", "ninja", info, wheel.name, "torch"]
    assert said == (expected if fits else [*["ninja"] * 2, *["torch"] * 3])
    assert (tmp_path / "folder" / info / "METADATA").exists() == fits
    assert (tmp_path / "folder" / wheel.name).exists() == fits


def test_a_folder_without_wheels_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGCOMM_WHEELS", str(tmp_path / "none"))
    assert said_by_hooks(sys.executable, tmp_path) == [*["ninja"] * 2, *["torch"] * 3]
