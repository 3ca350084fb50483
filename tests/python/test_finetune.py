"""examples/finetune.py in small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

SCRIPT = Path(__file__).parents[2] / "examples" / "finetune.py"


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def test_curves_memory_and_picture(tmp_path: Path) -> None:
    small = ["--steps", "12", "--rows", "2", "--context", "32", "--hidden", "32", "--layers", "1"]
    done = run(*small, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in (tmp_path / "finetune.jsonl").read_text().splitlines()]
    for name in ("adamw", "lomo", "adalomo"):
        losses = [
            line["held_out_nats"] for line in lines if line["optimizer"] == name and "step" in line
        ]
        assert losses[-1] < losses[0] - 0.1
    memory = {line["optimizer"]: line["memory"] for line in lines if "memory" in line}
    assert sum(memory["lomo"].values()) < sum(memory["adamw"].values())
    assert memory["lomo"]["Optstate"] < 1024  # none of the size of weights
    assert (tmp_path / "finetune.png").stat().st_size > 1000


def test_bad_input(tmp_path: Path) -> None:
    assert "multiple of 8" in run("--hidden", "30").stderr
    empty = tmp_path / "empty.txt"
    empty.touch()
    done = run("--text", str(empty))
    assert done.returncode == 2
    assert "nothing to learn" in done.stderr
