"""Other libraries, two processes each, with RINGCOMM_AS_GLOO=1: the losses are those of Gloo."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "client_job.py"
IS_INSTALLED = "ringcomm" in [
    e.name for e in importlib.metadata.entry_points(group="torch.backends")
]


def train(client: str, as_gloo: str, folder: Path) -> list[dict[str, Any]]:
    folder.mkdir()
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(PROGRAM), client, str(folder)],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "RINGCOMM_AS_GLOO": as_gloo,
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
