"""A build without ringcomm._cuda: tensors of the CPU work, those of GPUs are refused by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from emulated_gpu import build, needs_emulated_gpu

HERE = Path(__file__).parent
PROGRAM = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: (
    None if name == "ringcomm._cuda" else find_spec(name, *more))
import torch, torch.distributed as dist
import ringcomm, emulated_gpu
assert "ringcomm._cuda" not in sys.modules
emulated_gpu.load()
store = dist.FileStore(sys.argv[1], 1)
dist.init_process_group("ringcomm", store=store, rank=0, world_size=1)
ours = torch.ones(4)
dist.all_reduce(ours)
assert ours.tolist() == [1, 1, 1, 1]
dist.all_reduce(torch.ones(4, device="emugpu"))
"""


@needs_emulated_gpu
def test_a_build_without_gpus_refuses_their_tensors(tmp_path: Path) -> None:
    build()  # in this process, whose time has no limit here
    paths = [str(HERE), str(HERE.parent / "support"), str(HERE.parents[2] / "tools")]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "store")],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert "ValueError: ringcomm: this build has no CUDA support" in done.stderr
    assert "RINGCOMM_CUDA=1" in done.stderr
