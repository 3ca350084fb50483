"""A job that torchrun restarts from a checkpoint after the death of a rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support import report

REQUIREMENTS = ()
RANKS = 1  # which starts two jobs of two ranks
IS_SHORT = False

JOB = Path(__file__).with_name("restart_job.py")
# Otherwise the restarted ranks share the store of the first ones, and Gloo connects to addresses of
# dead processes that it finds there: without it, torch 2.13 hung or failed in three of five runs.
ENV = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
LIMIT_S = 200.0
JOB_LIMIT_S = 80.0


def run(folder: Path, what: str) -> dict[str, Any]:
    """The report of a job, of which a rank is killed or which is not disturbed."""
    folder.mkdir()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    options = ["--nproc-per-node", "2", "--max-restarts", "1", str(JOB), str(folder), what]
    subprocess.run(
        [*launcher, *options], env={**os.environ, **ENV}, check=True, timeout=JOB_LIMIT_S
    )
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))


def main(folder: Path, source: Path | None) -> dict[str, list[float]]:
    dist.init_process_group("gloo")
    undisturbed, restarted = (run(folder / what, what) for what in ("lives", "dies"))
    assert undisturbed["is_first"]
    assert not restarted["is_first"]
    assert restarted["losses"] == undisturbed["losses"]
    world: Any = dist.group.WORLD
    real = world._get_backend(torch.device("cpu")).name()
    assert {undisturbed["real"], restarted["real"]} == {real}
    return {"losses": restarted["losses"]}


if __name__ == "__main__":
    report(main)
