"""Scripts of which each has a Triton of its own, which runs PTX on this CPU or only compiles."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from rank_programs import run_command

HERE = Path(__file__).resolve().parent

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed: its kernels are neither compiled nor run",
)
runs_ptx = [
    needs_triton,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="PTX runs on x86-64 only"),
]
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def start(
    script: str, *arguments: str, timeout_s: float = 900, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a script to its end, whatever that is."""
    env = {"PYTHONPATH": os.pathsep.join(sys.path), **variables}
    command = (sys.executable, "-W", "ignore", script, *arguments)
    return run_command(*command, timeout_s=timeout_s, env=env, cwd=HERE)


def run(script: str, *arguments: str, timeout_s: float = 900, **variables: str) -> str:
    """What a script prints."""
    done = start(script, *arguments, timeout_s=timeout_s, **variables)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def work_through(check: Callable[[str], None], names: Iterable[str]) -> None:
    """Runs cases by the PTX of the kernels that they launch, and prints what is wrong as JSON.

    The script's arguments are the GPU's architecture, such as 90, a variant of the PTX
    (triton_variants.py), and the names of cases, all without any. Where the machine ends the
    process, its last words are the case's name and why.
    """
    import triton_launch
    from triton_variants import VARIANTS

    arch, variant, *wanted = sys.argv[1:]
    triton_launch.install(int(arch), VARIANTS[variant])
    said = {}
    for name in wanted or names:
        print(name, file=sys.stderr, flush=True)
        try:
            check(name)
            said[name] = ""
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    json.dump(said, sys.stdout)
