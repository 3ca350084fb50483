"""Scripts of which each has a Triton of its own: interpreting, or compiling for a GPU elsewhere."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).resolve().parent

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
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def interpreted(script: str) -> dict[str, str]:
    """What is wrong with each case of a script that calls `interpret`."""
    version = importlib.metadata.version("triton").split(".")
    if tuple(map(int, version[:2])) < (3, 7):
        pytest.skip("the interpreter of Triton 3.6 fails with NumPy 2.4")
    said: dict[str, str] = json.loads(run(script, TRITON_INTERPRET="1"))
    return said


def interpret(names: Iterable[str], check: Callable[[str], None]) -> None:
    """Prints what is wrong with each case under the interpreter, as JSON."""
    from triton.runtime.interpreter import TensorHandle

    def set_attr(handle: Any, key: str, values: list[int]) -> None:
        """The interpreter trusts multiple_of; a GPU that gets a wrong one faults."""
        assert key == "tt.divisibility"
        remainders = handle.data.astype("int64") % values[0]
        assert not remainders.any(), f"no multiple of {values[0]}"

    TensorHandle.set_attr = set_attr
    said = {}
    for name in names:
        try:
            check(name)
            said[name] = ""
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    json.dump(said, sys.stdout)
