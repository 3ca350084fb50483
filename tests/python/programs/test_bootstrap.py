"""tools/bootstrap.py: what it says before it fetches torch, and the active environment's torch."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import bootstrap
import buildconfig
import cuda_kernels
import pytest

FOR_CPUS = ["torch", "filelock", "sympy"]
FOR_CUDA = [*FOR_CPUS, "nvidia-cublas", "cuda-bindings"]


def test_what_comes_with_torch_is_said_before_it_is_fetched(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A stand-in of pip, which fetches nothing, reports packages and is then asked to install."""
    pip = tmp_path / "python"
    report = json.dumps({"install": [{"metadata": {"name": name}} for name in FOR_CUDA]})
    pip.write_text(f"#!/bin/sh\necho \"$@\" >> {tmp_path}/calls\necho '{report}'\n")
    pip.chmod(0o755)
    monkeypatch.setattr(cuda_kernels, "has_driver", lambda: False)
    monkeypatch.setattr(bootstrap, "run_step", lambda _, *command: subprocess.check_call(command))
    monkeypatch.setenv("RINGCOMM_TORCH_INDEX", "https://index.example/cpu")
    bootstrap.install_torch(str(pip))
    said = capfd.readouterr().out.partition("\n{")[0]
    assert f"fetching {buildconfig.TORCH} for CUDA and 4 packages: about 5 GB" in said
    assert "set RINGCOMM_TORCH_INDEX=URL" in said
    asked, installed = (tmp_path / "calls").read_text().splitlines()
    assert "--dry-run" in asked
    assert "--dry-run" not in installed
    for call in (asked, installed):
        assert call.endswith(f"{buildconfig.TORCH} --index-url https://index.example/cpu")


def test_a_build_for_cpus_needs_no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "RINGCOMM_TORCH_INDEX" not in bootstrap.described(FOR_CPUS)
    monkeypatch.setattr(cuda_kernels, "has_driver", lambda: True)
    assert "RINGCOMM_TORCH_INDEX" not in bootstrap.described(FOR_CUDA)
    assert "RINGCOMM_TORCH=active takes torch 2." in bootstrap.described(FOR_CUDA)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The Python of a .venv that is empty."""
    venv.create(tmp_path / ".venv", symlinks=True)
    monkeypatch.setattr(bootstrap, "VENV", tmp_path / ".venv")
    return str(tmp_path / ".venv" / "bin" / "python")


def test_the_torch_of_the_active_environment(
    environment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_called(*_: Any) -> None:
        raise AssertionError("pip is not needed")

    monkeypatch.setattr(bootstrap, "run_step", not_called)
    monkeypatch.setenv("RINGCOMM_TORCH", "active")
    for _ in range(2):  # again, as the next make does
        bootstrap.install_requirements(environment, [], needs_torch=True)
    code = "import importlib.util as util; print(util.find_spec('torch').origin)"
    found = subprocess.check_output([environment, "-c", code], text=True, timeout=60)
    expected = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60)
    assert found == expected


def test_what_is_wrong_with_the_wish_for_another_torch(
    environment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGCOMM_TORCH", "2.12")
    with pytest.raises(buildconfig.BuildProblem, match=r"must be 'active' or unset, got '2.12'"):
        bootstrap.install_requirements(environment, [], needs_torch=True)
    monkeypatch.setenv("RINGCOMM_TORCH", "active")
    monkeypatch.setattr(sys, "executable", environment)
    with pytest.raises(buildconfig.BuildProblem, match=r"has no torch >= 2\.11"):
        bootstrap.install_requirements(environment, [], needs_torch=True)
    has_both = bootstrap.Python(environment)
    has_both.found = {"torch": "2.13.0", "ringcomm": "0.1.0"}
    with monkeypatch.context() as patch:
        patch.setattr(bootstrap, "Python", lambda _: has_both)
        with pytest.raises(buildconfig.BuildProblem, match="would hide this checkout"):
            bootstrap.install_requirements(environment, [], needs_torch=True)
    (own,) = (Path(environment).parents[1] / "lib").glob("python*/site-packages")
    (own / "torch").mkdir()
    with pytest.raises(buildconfig.BuildProblem, match=r"a torch of its own.* make distclean"):
        bootstrap.install_requirements(environment, [], needs_torch=True)


def test_the_active_environment_is_used_by_wish(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what it has; what it needs is named, and what it may lack."""
    monkeypatch.setenv("RINGCOMM_USE_ENV", "1")
    active = bootstrap.Python(sys.executable)
    active.found = {"torch": "2.13.0", "ninja": "1", "setuptools": "90", "numpy": "2", "rich": "1"}
    monkeypatch.setattr(bootstrap, "Python", lambda _: active)
    assert bootstrap.choose_python(["build", "train"], True) == sys.executable
    assert "goes without what is not installed there: wheel, matplotlib" in capsys.readouterr().out
    del active.found["rich"], active.found["torch"]
    with pytest.raises(
        buildconfig.BuildProblem, match=r"lacks rich, 'torch>=2.11': .* install rich"
    ):
        bootstrap.choose_python(["build", "train"], True)
