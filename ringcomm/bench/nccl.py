"""NCCL as a peer where ranks share a GPU, which it has to be asked for."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from ringcomm.bench.placement import Placement

# With more of them NCCL hangs where ranks share a GPU; all of those ranks together.
NCCL_CHANNELS_OF_A_GPU = 64
# The first NCCL that lets ranks share a GPU, if it is told so and MPS runs.
NCCL_THAT_SHARES = (2, 30)


def nccl_variables(ranks_of_a_gpu: int) -> dict[str, str]:
    """What NCCL wants in the environment where ranks share a GPU; nothing where they do not."""
    if ranks_of_a_gpu == 1:
        return {}
    channels = max(1, NCCL_CHANNELS_OF_A_GPU // ranks_of_a_gpu)
    return {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_NCHANNELS": str(channels)}


def nccl_version() -> tuple[int, ...]:
    """Of the NCCL that this process would use, which LD_PRELOAD may have exchanged."""
    return tuple(torch.cuda.nccl.version()[:3])


def why_nccl_cannot(placement: Placement, world_size: int) -> str | None:
    """The reason why NCCL does not run with ranks placed like this, or None."""
    if not dist.is_nccl_available():
        return "this torch was built without it"
    if placement.max_ranks(world_size) == 1:
        return None
    found = ".".join(map(str, nccl_version()))
    if nccl_version() < NCCL_THAT_SHARES:
        return (
            f"ranks share a GPU, which NCCL allows from 2.30 on, and this is {found}:"
            " name a newer libnccl.so.2 by --nccl-library"
        )
    return None if placement.mps else "ranks share a GPU, which NCCL allows under MPS: add --mps"


def preload(library: Path) -> None:
    """Starts this program again with another NCCL, unless it has it.

    Raises:
        ValueError: there is no such file.
    """
    if not library.is_file():
        raise ValueError(f"--nccl-library: there is no file {library}")
    path = str(library.resolve())
    loaded = os.environ.get("LD_PRELOAD", "").split(":")
    if path in loaded:
        return
    os.environ["LD_PRELOAD"] = ":".join(filter(None, [path, *loaded]))
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
