"""Other libraries, in two processes: losses, tokens and saved weights are those of Gloo and DDP."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "client_job.py"
PROGRAMS = PROGRAM.with_name("program_job.py")
SYSTEMS = ("DDP", "zero 2", "zero 3", "Lomo")
REFUSED = {
    ("zero 3", "predict_with_generate"): "use zero.shard() at stage 1 or 2, or predict_with",
    ("zero 3", "EMA"): "FSDP does not support deepcopy",
}
IS_INSTALLED = "ringcomm" in [
    e.name for e in importlib.metadata.entry_points(group="torch.backends")
]


def train(client: str, as_gloo: str, folder: Path) -> list[dict[str, Any]]:
    return launch([str(PROGRAM), client], folder, RINGCOMM_AS_GLOO=as_gloo)


def launch(program: list[str], folder: Path, **env: str) -> list[dict[str, Any]]:
    """What two ranks of a program have written to a folder."""
    folder.mkdir()
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, *program, str(folder)],
        env={
            **os.environ,
            **env,
            "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": "1",
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.skipif(not IS_INSTALLED, reason="only an installed ringcomm is found by torch")
@pytest.mark.parametrize("client", ["transformers", "accelerate", "lightning", "deepspeed"])
def test_losses_are_those_of_gloo(client: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(client) is None:
        pytest.skip(f"{client} is not installed")
    gloo, ours = (train(client, as_gloo, tmp_path / as_gloo) for as_gloo in "01")
    assert [report["real"] for report in gloo + ours] == ["gloo"] * 2 + ["ringcomm"] * 2
    assert [report["named"] for report in ours] == [report["named"] for report in gloo]
    assert len(ours[0]["losses"]) == 6
    assert [report["losses"] for report in ours] == [report["losses"] for report in gloo]


# ---- programs that generate, save, resume, adapt and average


@cache
def programs(system: str, backend: str, folder: Path) -> list[dict[str, Any]]:
    """What each rank reports of all programs with one system."""
    return launch([str(PROGRAMS), system, backend], folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize(
    "name", ["predict_with_generate", "save and resume", "gather_for_metrics", "LoRA", "EMA"]
)
def test_programs_see_what_they_see_with_gloo(name: str, system: str, base: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    oracle = programs("DDP", "gloo", base / "gloo")
    found = programs(system, "ringcomm", base / system)
    if reason := REFUSED.get((system, name)):
        assert all(reason in report[name] for report in found)
        return
    for rank in range(2):
        mine, expected = found[rank][name], oracle[rank][name]
        assert isinstance(expected, dict), expected
        assert isinstance(mine, dict), mine
        assert "losses" in mine
        for key in mine:
            if system == "DDP" or key == "tokens":
                assert mine[key] == expected[key], key
            else:
                assert mine[key] == pytest.approx(expected[key], rel=1e-4), key
    if name == "save and resume":
        report = found[0][name]
        assert report.get("resumed", report["losses"]) == report["losses"]
        assert report.get("saved") == report.get("kept")
