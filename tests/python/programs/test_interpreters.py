"""What ringcomm starts where sys.executable is an application and not an interpreter."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from rank_programs import run_command

from ringcomm import backend
from ringcomm.process import interpreter
from ringcomm.testing import run_ranks

# As launchers give to a rank; with what acts on every process that imports torch.
OF_A_RANK = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "PMI_SIZE", "PMIX_NAMESPACE", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"),
    *("PALS_RANKID", "MV2_COMM_WORLD_LOCAL_SIZE", "RINGCOMM_TRACE", "RINGCOMM_AS_GLOO"),
}


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("name", ["python", "python3", "python3.12", "python3.13t", "python3-dbg"])
def test_an_interpreter(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert interpreter() == sys.executable
    monkeypatch.setattr(sys, "executable", program(tmp_path / name, "true"))
    assert interpreter() == sys.executable


@pytest.mark.parametrize("how", ["frozen", "compiled", "missing", "", None, "blender", "pythonapp"])
def test_an_application(how: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/pyinstaller/pyinstaller/issues/8254 and
    https://github.com/Nuitka/Nuitka/issues/3672
    """
    if how == "frozen":
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    elif how == "compiled":
        monkeypatch.setattr(sys.modules["__main__"], "__compiled__", (), raising=False)
    elif how == "missing":
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python3"))
    else:
        path = program(tmp_path / how, "true") if how else how
        monkeypatch.setattr(sys, "executable", path)
    assert interpreter() is None
    with pytest.raises(RuntimeError, match="run_ranks\\(\\) starts Python interpreters"):
        run_ranks(2, print)


def doctor_of(monkeypatch: pytest.MonkeyPatch) -> str:
    """The shell command with which a rank would ask the doctor."""
    told: list[str] = []
    monkeypatch.setattr(backend._C, "set_doctor", told.append)
    monkeypatch.setenv("CI", "1")
    for name in OF_A_RANK:
        monkeypatch.setenv(name, "1")
    undecorated: Any = backend._let_the_doctor_come
    undecorated.__wrapped__(7)
    (command,) = told
    return command


def run(command: str) -> str:
    done = run_command("sh", "-c", command)
    assert (done.returncode, done.stdout) == (0, "")
    return done.stderr


def test_the_doctor_is_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/pyinstaller/pyinstaller/issues/4067"""
    python = program(tmp_path / "python3", f'env > "{tmp_path}/env"; echo "$@" >&2')
    monkeypatch.setattr(sys, "executable", python)
    monkeypatch.setenv("PYTHONPATH", "/kept")
    said = run(doctor_of(monkeypatch))
    assert said.startswith("-c ")
    assert said.endswith("doctor --job 7 --verdict\n")
    names = {line.partition("=")[0] for line in (tmp_path / "env").read_text().splitlines()}
    assert names & OF_A_RANK == set()
    assert {"PATH", "PYTHONPATH", "CI"} <= names


def test_an_application_says_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/borgbackup/borg/issues/9331"""
    app = program(tmp_path / "it's an app", f'touch "{tmp_path}/started"')
    monkeypatch.setattr(sys, "executable", app)
    said = run(doctor_of(monkeypatch))
    assert said.startswith(f"ringcomm: {app} is not a Python interpreter")
    assert "type `ringcomm doctor --job 7` in" in said
    assert not os.path.exists(tmp_path / "started")
