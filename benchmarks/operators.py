"""all_reduces of other projects on CPUs, in place, from libraries that were compiled alone."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm.measure.ranks import Team

Reduce = Callable[[Tensor], object]
# The ranks that vLLM's shm.h has room for.
MAX_VLLM_RANKS = 8


def deepspeed_all_reduce(team: Team, file: Path) -> Reduce:
    """Of DeepSpeed's `deepspeed_shm_comm` extension, with names from variables.

    Needs the default group.
    """
    host, port = "127.0.0.1", str(team.agree(os.getpid()))
    os.environ.update(LOCAL_SIZE=str(team.world_size), MASTER_ADDR=host, MASTER_PORT=port)
    spec: Any = importlib.util.spec_from_file_location("deepspeed_shm_comm", file)
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.initialize(team.world_size, team.rank)
    dist.barrier()  # all have mapped the buffer of each, which the extension never removes
    Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_{host}_{port}_{team.rank}").unlink()
    call: Reduce = torch.ops.deepspeed.inference_all_reduce_
    return call


def vllm_all_reduce(team: Team, file: Path) -> Reduce:
    """Of a library that registers vLLM's `torch.ops._C.shm_allreduce`. Needs the default group."""
    torch.ops.load_library(file)
    library: Any = torch.ops._C
    name = f"benchmark-{team.agree(os.getpid())}"
    handle = library.init_shm_manager(name, team.world_size, team.rank, 1)
    dist.barrier()
    library.join_shm_manager(handle, name)
    dist.barrier()
    return partial(library.shm_allreduce, handle)
