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
from harness import Options, flag
from torch import Tensor

from ringcomm.measure.ranks import Team

Reduce = Callable[[Tensor], object]
# The ranks that vLLM's shm.h has room for.
MAX_VLLM_RANKS = 8
FLAGS = [
    flag("--deepspeed", Path, None, "DeepSpeed's shared-memory extension", metavar="FILE"),
    flag("--vllm", Path, None, "a library of vLLM's shared-memory operators", metavar="FILE"),
]


def open_operators(team: Team, options: Options) -> dict[str, Reduce]:
    """The all_reduces of the files that the options name. Collective; needs the default group."""
    operators = {}
    if options.deepspeed:
        operators["DeepSpeed"] = _deepspeed(team, options.deepspeed)
    if options.vllm and team.world_size <= MAX_VLLM_RANKS:
        operators["vLLM"] = _vllm(team, options.vllm)
    return operators


def _deepspeed(team: Team, file: Path) -> Reduce:
    """Of DeepSpeed's `deepspeed_shm_comm` extension, with names from variables."""
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


def _vllm(team: Team, file: Path) -> Reduce:
    """Of a library that registers vLLM's `torch.ops._C.shm_allreduce`."""
    torch.ops.load_library(file)
    library: Any = torch.ops._C
    name = f"benchmark-{team.agree(os.getpid())}"
    handle = library.init_shm_manager(name, team.world_size, team.rank, 1)
    dist.barrier()
    library.join_shm_manager(handle, name)
    dist.barrier()
    return partial(library.shm_allreduce, handle)
