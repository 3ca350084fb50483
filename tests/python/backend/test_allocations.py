"""Calls in place allocate nothing: malloc is counted by a library that is preloaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from rank_programs import run_program

SUPPORT = Path(__file__).parents[1] / "support"
NUM_CALLS = 200
# Other threads, and Python's own arenas.
FEW = 20

PROGRAM = """
import ctypes, sys
import torch
import torch.distributed as dist
from ringcomm import ops

rank, path, num_calls = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
dist.init_process_group("ringcomm", store=dist.FileStore(path, 2), rank=rank, world_size=2)
count = ctypes.CDLL(None).count_allocations
count.restype = ctypes.c_long
for num_elems in (4096, 32768):
    x, residual, weight = (torch.zeros(num_elems, dtype=torch.bfloat16) for _ in range(3))
    for call in (
        lambda: ops.all_reduce(x, out=x),
        lambda: ops.all_reduce(x, out=residual),
        lambda: ops.all_reduce_add_rms_norm_(x, residual, weight),
        lambda: ops.all_reduce(x),
    ):
        for _ in range(num_calls):
            call()
        before = count()
        for _ in range(num_calls):
            call()
        print(count() - before)
dist.destroy_process_group()
"""


@pytest.mark.skipif(os.uname().sysname != "Linux" or not shutil.which("c++"), reason="no compiler")
@pytest.mark.skipif("gnu" not in str(sysconfig.get_config_var("HOST_GNU_TYPE")), reason="no glibc")
def test_calls_in_place_allocate_nothing(tmp_path: Path) -> None:
    """Of 8 and 64 KiB of bfloat16; a call that returns a new tensor is seen."""
    library = str(tmp_path / "count_allocations.so")
    source = str(SUPPORT / "count_allocations.cc")
    subprocess.run(["c++", "-O1", "-shared", "-fPIC", source, "-o", library], check=True)
    for rank in run_program(
        PROGRAM, tmp_path / "store", NUM_CALLS, env={"LD_PRELOAD": library}, timeout_s=120
    ):
        assert rank.returncode == 0, rank.err
        counts = [int(line) for line in rank.out.split()]
        assert len(counts) == 8
        for position, num_allocations in enumerate(counts):
            if position % 4 == 3:
                assert num_allocations >= NUM_CALLS
            else:
                assert num_allocations <= FEW, (position, counts)
