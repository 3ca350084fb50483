"""torchrun starts ranks: at a fixed address, by a rendezvous, and again after a death."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from curves import Run, mean_losses, single_process

HERE = Path(__file__).parent
WORLD = 2


def free_port() -> int:
    """Below those that the kernel gives to clients; by pid, so that two runs differ."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        with socket.socket() as trial:
            if trial.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise AssertionError("no free port")


def torchrun(
    folder: Path, *options: str, must_die: bool = False, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    program = [str(HERE / "torchrun_job.py"), str(folder), "die" if must_die else "live"]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(WORLD)]
    return subprocess.run(
        [sys.executable, *launcher, *options, *program],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(HERE.parent / "support"),
            **(env or {}),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def assert_curve(folder: Path, attempt: int, debug: str = "OFF") -> None:
    reports = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(WORLD)]
    assert [report["attempt"] for report in reports] == [attempt] * WORLD
    assert [report["backend"] for report in reports] == ["ringcomm"] * WORLD
    assert [report["debug"] for report in reports] == [debug] * WORLD
    losses = mean_losses([Run(report["losses"], {}) for report in reports])
    assert losses == pytest.approx(single_process().losses, rel=0, abs=1e-5)


@pytest.mark.slow
def test_static(tmp_path: Path) -> None:
    """With the variable that test_debug.py only imitates."""
    detail = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    address = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    done = torchrun(tmp_path, "--nnodes", "1", "--node-rank", "0", *address, env=detail)
    assert done.returncode == 0, done.stderr
    assert_curve(tmp_path, attempt=0, debug="DETAIL")


@pytest.mark.slow
def test_a_worker_dies_once(tmp_path: Path) -> None:
    """torchrun names the rank that died, not the one that missed it, and the next ones go on."""
    endpoint = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    done = torchrun(tmp_path, *endpoint, "--nnodes", "1:1", "--max-restarts", "2", must_die=True)
    assert done.returncode == 0, done.stderr
    assert "failed (exitcode: -9) local_rank: 1" in done.stderr
    assert_curve(tmp_path, attempt=1)
