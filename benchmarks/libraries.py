#!/usr/bin/env python3
"""Times collectives over all libraries for CPUs at hand, on the same buffers in turn.

    python benchmarks/libraries.py [--ops all_reduce] [--worlds 2,4,8,16] [--runs 3]
                                   [--dtype float32] [--mpi PYTHON,PYTHON]
                                   [--deepspeed FILE] [--vllm FILE]

PYTHON is of an environment with mpi4py and an MPI, whose mpiexec is beside it; each MPI has runs of
its own, in random order with the others. FILE is a project's shared-memory operators, compiled
alone: DeepSpeed's `deepspeed_shm_comm` extension, or a library that registers vLLM's
`torch.ops._C.shm_allreduce`. all_reduce is in place. "torch alone" is the call over torch's backend
that moves nothing: the part of a call that is torch's own. "torch copy" is a copy by each rank.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import harness  # before torch: it sets the number of threads
import torch
import torch.distributed as dist
from groups import MPI, MPI_ENVIRONMENT, labelled, open_groups
from harness import Bench, Options, flag
from operations import OPERATIONS, Buffers, Place
from report import Report
from torch import Tensor
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

from _ringcomm.values import byte_counts, several, whole, words
from ringcomm import ops
from ringcomm.measure.ranks import Team, joined_world_size, mpi_world_size
from ringcomm.measure.timing import Contender
from ringcomm.torch_names import all_gather_single, reduce_scatter_single

OPS, ALONE, COPY = "ringcomm.ops", "torch alone", "torch copy"
# By the name of a way, the backend of its group of torch.distributed.
OVER_TORCH = {"torch.distributed over ringcomm": "ringcomm", ALONE: "fake", "Gloo": "gloo"}
# With an input and an output of their own.
APART = {"all_gather": all_gather_single, "reduce_scatter": reduce_scatter_single}
Calls = dict[str, Callable[[], object]]
Reduce = Callable[[Tensor], object]
# The ranks that vLLM's shm.h has room for.
MAX_VLLM_RANKS = 8
FLAGS = [
    flag("--deepspeed", Path, None, "DeepSpeed's shared-memory extension", metavar="FILE"),
    flag("--vllm", Path, None, "a library of vLLM's shared-memory operators", metavar="FILE"),
]
DTYPES = ("float32", "bfloat16")
SIZES = "1k,8k,64k,256k,1m,16m"
# Of one run of one number of ranks: some seconds a size, and more while it is disturbed.
LIMIT_S = 600.0


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


def mpi_name(version: str) -> str:
    """The library of a version's line."""
    return next((name for name in ("Open MPI", "MPICH") if name in version), "Intel MPI")


def calls_of(op: str, groups: dict[str, Any], x: Buffers) -> Calls:
    """By each library, what makes the call."""
    calls: Calls = {}
    if op == "all_reduce":
        calls[OPS] = partial(ops.all_reduce, x.output, group=groups["ringcomm"], out=x.output)
        over_torch = partial(dist.all_reduce, x.output)
    else:
        over_torch = partial(APART[op], x.output, x.input)
    for way, name in OVER_TORCH.items():
        calls[way] = partial(over_torch, group=groups[name])
    calls[COPY] = partial(torch.empty_like(x.output).copy_, x.output)
    if mpi := groups.get(MPI):
        source = mpi.in_place if op == "all_reduce" else x.input_array
        calls[mpi_name(mpi.version)] = partial(getattr(mpi, op), source, x.output_array)
    return calls


def run_rank(bench: Bench, options: Options) -> None:
    """Each size in turn; rank 0 reports."""
    team = bench.team
    names = [*OVER_TORCH.values(), *([MPI] if mpi_world_size() else [])]
    groups = open_groups(team, labelled(names))
    operators = open_operators(team, options)
    version = {"mpi": groups[MPI].version} if MPI in groups else {}
    align = partial(dist.barrier, groups["ringcomm"])
    for op, size in itertools.product(options.ops, options.sizes):
        operation = OPERATIONS[op]
        dtype = getattr(torch, options.dtype)
        num_elems = operation.num_elems(size, dtype, team.world_size)
        place = Place(team.rank, team.world_size, num_elems, dtype, bench.device)
        x = operation.setup(place)
        calls = calls_of(op, groups, x)
        if op == "all_reduce":
            calls |= {name: partial(reduce, x.output) for name, reduce in operators.items()}
        wrong = {
            way: 0 if way in (ALONE, COPY) else sum(team.share(operation.verify(call, x, team)))
            for way, call in calls.items()
        }
        x.clear()
        timed = {way: Contender(call, align) for way, call in calls.items()}
        facts = {"op": op, "bytes": num_elems * dtype.itemsize, "dtype": options.dtype, **version}
        bench.report(bench.race(timed, next(iter(calls)), wrong, by_block=True, **facts))


def _run_under(python: str, world_size: int, options: Options) -> None:
    """A run of this script under the mpiexec beside ``python``, which adds records to the file."""
    command = [str(Path(python).parent / "mpiexec"), "-n", str(world_size), python, *sys.argv]
    command += ["--worlds", str(world_size), "--runs", "1", "--json", str(options.json)]
    subprocess.run(command, env={**os.environ, **MPI_ENVIRONMENT}, check=True, timeout=LIMIT_S)


def measure(options: Options, report: Report) -> None:
    """All numbers of ranks in random order, and again for each run, with and without an MPI."""
    if joined_world_size() is not None or not options.mpi:
        for _ in range(options.runs):
            PROGRAM.run_worlds(options, report)
        return
    jobs = [(world, python) for world in options.worlds for python in options.mpi]
    for _ in range(options.runs):
        for world, python in random.sample(jobs, len(jobs)):
            _run_under(python, world, options)


def check(options: Options) -> None:
    """Raises ValueError where an MPI would get a type that numpy, and so mpi4py, lacks."""
    if options.dtype == "bfloat16" and (options.mpi or mpi_world_size() is not None):
        raise ValueError("--dtype bfloat16 is not for --mpi: mpi4py has no such type")


PROGRAM = harness.Program(
    doc=__doc__,
    kind="libraries",
    check=check,
    rank=run_rank,
    measure=measure,
    seconds=3.0,
    per="size",
    repeats=1,
    flags=[
        flag("--ops", words, "all_reduce", "collectives", known=("all_reduce", *APART)),
        flag("--worlds", several(whole(2)), "2,4,8,16", "numbers of ranks"),
        flag("--sizes", byte_counts, SIZES, "bytes of the buffer"),
        flag("--dtype", str, "float32", "bfloat16 without an MPI, which has none", choices=DTYPES),
        flag("--runs", whole(1), 1, "how often everything is measured"),
        flag("--mpi", words, [], "Pythons with mpi4py, mpiexec beside them", metavar="PYTHON"),
        *FLAGS,
    ],
)

if __name__ == "__main__":
    PROGRAM.run_script()
