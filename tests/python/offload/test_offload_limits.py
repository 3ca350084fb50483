"""Training that memory does not hold, and training that is killed: processes of their own."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

JOB = Path(__file__).with_name("offload_job.py")
TIMEOUT_S = 120
# glibc would keep what is freed, by a threshold that grows, and count it against the limit.
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}


def start(folder: Path, *options: Any, rank: int = 0, world_size: int = 1) -> subprocess.Popen[str]:
    common = ["--store", folder, "--rank", rank, "--world-size", world_size]
    command = [sys.executable, JOB, *common, *options]
    return subprocess.Popen(
        [str(word) for word in command],
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(*jobs: subprocess.Popen[str]) -> list[list[dict[str, Any]]]:
    """Their lines; raises where one failed."""
    found = []
    try:
        for job in jobs:
            out, err = job.communicate(timeout=TIMEOUT_S)
            assert job.returncode == 0, err
            found.append([json.loads(line) for line in out.splitlines()])
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    return found


def losses(lines: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in lines if "loss" in line]


# ---- memory

LAYERS, WIDTH = 24, 640
NUM_WEIGHTS = LAYERS * WIDTH * WIDTH
STATE_BYTES = 16 * NUM_WEIGHTS  # weights, gradients, two moments
SIZES = ("--layers", LAYERS, "--width", WIDTH)


@pytest.mark.slow
def test_four_times_the_memory_trains_to_the_same_losses(tmp_path: Path) -> None:
    """By threads, which every build has, and whose stacks count against the limit."""
    limit = ("--limit-bytes", STATE_BYTES // 4)
    nvme = ("--to", "nvme", "--path", tmp_path / "files", "--engine", "threads")
    (plain,) = finish(start(tmp_path / "store1", *SIZES))
    (limited,) = finish(start(tmp_path / "store2", *SIZES, *limit, *nvme))
    assert len(losses(limited)) == 3
    assert losses(limited) == pytest.approx(losses(plain), rel=1e-5)


@pytest.mark.slow
def test_the_same_without_offload_dies_of_it(tmp_path: Path) -> None:
    job = start(tmp_path / "store", *SIZES, "--limit-bytes", STATE_BYTES // 4)
    _, err = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode != 0
    assert "can't allocate memory" in err


# ---- crashes


def train(
    folder: Path, name: str, world_size: int, steps: int, *options: Any
) -> list[subprocess.Popen[str]]:
    return [
        start(
            *(folder / f"store-{name}", "--steps", steps, "--digest"),
            *("--to", "nvme", "--path", folder / "files", *options),
            rank=rank,
            world_size=world_size,
        )
        for rank in range(world_size)
    ]


@pytest.mark.slow
def test_killed_runs_end_as_if_they_had_not_been(tmp_path: Path) -> None:
    world_size, steps = 2, 12
    whole = tmp_path / "whole"
    whole.mkdir()
    expected = finish(*train(whole, "all", world_size, steps))
    generator = random.Random(2)
    options: tuple[Any, ...] = ()
    for kill in range(2):
        jobs = train(tmp_path, f"{kill}", world_size, steps, *options)
        try:
            for job in jobs:
                assert job.stdout is not None
                job.stdout.readline()  # a step is done
            for job in generator.sample(jobs, world_size):
                time.sleep(generator.uniform(0, 0.05))
                job.send_signal(signal.SIGKILL)
        finally:
            for job in jobs:
                job.kill()
                job.communicate(timeout=TIMEOUT_S)
        options = ("--resume",)
    found = finish(*train(tmp_path, "last", world_size, steps, "--resume"))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine[-1] == theirs[-1]  # the digests
        done = [line for line in mine if "loss" in line]
        assert done == theirs[-1 - len(done) : -1]
