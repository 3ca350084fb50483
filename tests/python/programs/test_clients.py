"""Other libraries, in two processes: losses, tokens and saved weights are those of Gloo and DDP."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import sys
from functools import cache
from pathlib import Path
from typing import Any

import client_files
import client_runs
import program_job
import pytest
import torch
from ranks import run_ranks

PROGRAM = Path(__file__).with_name("program_job.py")
CLIENTS = {client.name: client for client in client_files.read_all()}
# Libraries want one; a file takes its place.
ADDRESS = {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
SYSTEMS = ("DDP", "zero 2", "zero 3", "Lomo")
BACKENDS = importlib.metadata.entry_points(group="torch.backends")
IS_INSTALLED = "ringcomm" in BACKENDS.names


def report(value: float, real: str) -> dict[str, Any]:
    return {"real": real, "series": {"losses": [0.5, value]}}


def test_what_differs_is_said() -> None:
    client = next(iter(CLIENTS.values()))

    def judged(gloo: dict[str, Any], ours: dict[str, Any], **changed: Any) -> tuple[str, str]:
        found = {"gloo": [gloo], "ringcomm": [ours]}
        return client_runs.judge(dataclasses.replace(client, **changed), found)

    same, other = report(1.0, "gloo"), report(1.0 + 2**-20, "ringcomm")
    assert judged(same, report(1.0, "ringcomm"))[0] == client_runs.EQUAL
    status, text = judged(same, other)
    assert (status, "losses[1] of rank 0" in text) == (client_runs.DIFFERENT, True)
    assert judged(same, other, tolerance=(1e-5, "sums"))[0] == client_runs.CLOSE
    assert judged(same, same)[0] == client_runs.FAILED  # it has not run over ringcomm
    assert judged(report(float("nan"), "gloo"), other)[0] == client_runs.FAILED
    assert judged(same, other, fails_on_gloo="no such operation")[0] == client_runs.FAILED
    fewer = {"real": "ringcomm", "series": {"losses": [0.5]}}
    assert judged(same, fewer)[0] == client_runs.DIFFERENT


@pytest.mark.skipif(not IS_INSTALLED, reason="only an installed ringcomm is found by torch")
def test_the_backend_by_name_and_optimizers_that_reduce(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    env = [{"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", **ADDRESS} for rank in "01"]
    how: dict[str, Any] = {"backend": None, "fresh": True, "env": env, "timeout_s": 180.0}
    for report in run_ranks(2, program_job.by_name, tmp_path, **how):
        assert report.pop("backend") == "ringcomm"
        is_wrapped, expected = report.pop("DDP")
        assert is_wrapped
        for system, (is_wrapped, weights) in report.items():
            assert not is_wrapped, system
            torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)


@cache
def program(system: str, backend: str, folder: Path) -> list[dict[str, Any]]:
    """What each rank reports of Trainer with checkpoints."""
    folder.mkdir()
    command: list[str | Path] = [PROGRAM, system, backend, folder]
    return client_runs.launch(Path(sys.executable), command, 2, folder, limit_s=240.0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_training_that_is_saved_and_resumed_is_that_with_gloo(system: str, base: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    oracle = program("DDP", "gloo", base / "gloo")
    for mine, expected in zip(program(system, "ringcomm", base / system), oracle, strict=True):
        assert "losses" in mine
        for key in mine:
            if system == "DDP":
                assert mine[key] == expected[key], key
            else:
                assert mine[key] == pytest.approx(expected[key], rel=1e-4), key
        assert mine.get("resumed", mine["losses"]) == mine["losses"]
        assert mine.get("saved") == mine.get("kept")
