"""Scripts of which each has a Triton of its own: interpreting, or compiling for a GPU elsewhere."""

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
import torch

HERE = Path(__file__).resolve().parent
ARCHS = (80, 90, 100)

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def run(script: str, *arguments: str, **variables: str) -> str:
    """What a script prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, *arguments],
        cwd=HERE,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def interpreted_cases(script: str, names: list[str]) -> dict[str, str]:
    """What is wrong with each case of a script's table."""
    version = importlib.metadata.version("triton").split(".")
    if tuple(map(int, version[:2])) < (3, 7):
        pytest.skip("the interpreter of Triton 3.6 fails with NumPy 2.4")
    said: dict[str, str] = json.loads(run(script, TRITON_INTERPRET="1"))
    assert sorted(said) == sorted(names)
    return said


def compiled_variants(script: str, arch: int, cache: Path) -> dict[str, dict[str, Any]]:
    """What the compiler made of each variant."""
    found: dict[str, dict[str, Any]] = json.loads(
        run(script, str(arch), TRITON_CACHE_DIR=str(cache))
    )
    return found
