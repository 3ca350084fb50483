"""What a sweep over collectives, types and sizes measures."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from groups import MPI
from operations import OPERATIONS

from ringcomm.measure.ranks import joined_world_size, mpi_world_size
from ringcomm.tuning import MAX_WORLD_SIZE

# The kind of records of a sweep on devices.
DEVICE_KIND = "collective_on_device"
DEFAULT_SIZES = "1k,16k,256k,4m,64m"
DTYPES = ("float32", "float64", "bfloat16", "float16", "int32", "int64")
AVAILABLE: dict[str, Callable[[], bool]] = {
    "gloo": dist.is_gloo_available,
    "mpi": dist.is_mpi_available,
    "nccl": dist.is_nccl_available,
    "ucc": dist.is_ucc_available,
}


def points(options: argparse.Namespace) -> Iterator[tuple[str, torch.dtype, int]]:
    """Operation, type and bytes of what is measured, in order."""
    for name in options.op.split(","):
        for dtype in options.dtype:
            for num_bytes in options.sizes if OPERATIONS[name].has_data else [0]:
                yield name, getattr(torch, dtype), num_bytes


def check(options: argparse.Namespace) -> None:
    """Raises ValueError for options that cannot be measured here; devices are looked for later."""
    if not 1 <= options.world_size <= MAX_WORLD_SIZE:
        raise ValueError(f"the world size must be 1 to {MAX_WORLD_SIZE}, got {options.world_size}")
    if min(options.sizes) < 1:
        raise ValueError("sizes must be 1 byte or more")
    if options.seconds < 0 or options.repeats < 0:
        raise ValueError("seconds and repeats must not be negative")
    if "sendrecv" in options.op.split(",") and options.world_size == 1:
        raise ValueError("sendrecv needs at least two ranks")
    for name in set(options.dtype) - set(DTYPES):
        raise ValueError(f"unknown type {name!r}: choose from {', '.join(DTYPES)}")
    if options.device == "cpu":
        _check_on_cpu(options)
    for name in set(options.backends) - {MPI}:
        if name not in dist.Backend.backend_list:
            raise ValueError(f"torch has no backend {name!r}")
    if options.device != "cpu":
        _check_on_devices(options)
        return
    for name in options.backends:
        if not AVAILABLE.get(name, lambda: True)():
            raise ValueError(f"this torch was built without {name}")


def _check_on_cpu(options: argparse.Namespace) -> None:
    if options.mps or options.graph or options.plot:
        raise ValueError("--mps, --graph and --plot are for GPUs only: add --device cuda")
    if "nccl" in options.backends:
        raise ValueError("nccl does not support CPU tensors: add --device cuda")
    if MPI in options.backends and mpi_world_size() is None:
        raise ValueError(f"{MPI} needs ranks that mpiexec has started: mpiexec -n 2 python ...")


def _check_on_devices(options: argparse.Namespace) -> None:
    if options.graph < 0 or (options.graph and options.device != "cuda"):
        raise ValueError("--graph must be 0 or more calls, and needs --device cuda")
    if options.mps and options.device != "cuda":
        raise ValueError("--mps is for CUDA devices only")
    if options.mps and joined_world_size() is not None:
        raise ValueError(
            "--mps cannot be used under a launcher, which would have to start MPS itself:"
            " leave it out"
        )
