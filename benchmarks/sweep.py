"""What a sweep over collectives, types and sizes measures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from groups import MPI
from mps import Mps, find_control
from operations import OPERATIONS
from placement import count_devices

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


@dataclass(frozen=True)
class Sweep:
    """What to measure.

    Attributes:
        ops: names of ``OPERATIONS``.
        backends: c10d's backends, ringcomm first; one may be given twice.
        sizes: bytes of the larger buffer of a rank.
        dtypes: torch's names.
        seconds: per size and operation, for all backends together.
        repeats: the maximum number of repeats of a point while the machine is disturbed.
        device: "cpu", or torch's name of another type.
        layout: one of ``LAYOUTS``; like the following, only for devices that are not the CPU.
        clock: of ``CLOCKS``.
        graph: calls per CUDA graph, measured besides the eager ones; 0 for none.
        mps: start NVIDIA's Multi-Process Service for the ranks.
        plot: the file for a plot of the bandwidths.
        html: the file for a page of all points.
    """

    ops: list[str]
    backends: list[str]
    world_size: int
    sizes: list[int]
    dtypes: list[str]
    seconds: float
    repeats: int
    device: str = "cpu"
    layout: str = "all"
    clock: str = "events"
    graph: int = 0
    mps: bool = False
    plot: Path | None = None
    html: Path | None = None

    def points(self) -> Iterator[tuple[str, torch.dtype, int]]:
        """Operation, type and bytes of what is measured, in order."""
        for name in self.ops:
            for dtype in self.dtypes:
                for num_bytes in self.sizes if OPERATIONS[name].has_data else [0]:
                    yield name, getattr(torch, dtype), num_bytes

    def check(self) -> None:
        """Raises ValueError for options that cannot be measured here."""
        if not 1 <= self.world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"the world size must be 1 to {MAX_WORLD_SIZE}, got {self.world_size}")
        if not self.sizes or min(self.sizes) < 1:
            raise ValueError("sizes must be 1 byte or more")
        if self.seconds < 0 or self.repeats < 0:
            raise ValueError("seconds and repeats must not be negative")
        if "sendrecv" in self.ops and self.world_size == 1:
            raise ValueError("sendrecv needs at least two ranks")
        for name in set(self.ops) - set(OPERATIONS):
            raise ValueError(f"unknown operation {name!r}: choose from {', '.join(OPERATIONS)}")
        for name in set(self.dtypes) - set(DTYPES):
            raise ValueError(f"unknown type {name!r}: choose from {', '.join(DTYPES)}")
        if self.device == "cpu":
            self._check_on_cpu()
        else:
            self._check_on_devices()

    def _check_on_cpu(self) -> None:
        if self.mps or self.graph or self.plot:
            raise ValueError("--mps, --graph and --plot are for GPUs only: add --device cuda")
        if "nccl" in self.backends:
            raise ValueError("nccl does not support CPU tensors: add --device cuda")
        if MPI in self.backends and mpi_world_size() is None:
            raise ValueError(f"{MPI} needs ranks that mpiexec has started: mpiexec -n 2 python ...")
        self._check_names()
        for name in self.backends:
            if not AVAILABLE.get(name, lambda: True)():
                raise ValueError(f"this torch was built without {name}")

    def _check_on_devices(self) -> None:
        self._check_names()
        if self.graph < 0 or (self.graph and self.device != "cuda"):
            raise ValueError("--graph must be 0 or more calls, and needs --device cuda")
        if self.mps and self.device != "cuda":
            raise ValueError("--mps is for CUDA devices only")
        if self.mps and joined_world_size() is not None:
            raise ValueError(
                "--mps cannot be used under a launcher, which would have to start MPS itself:"
                " leave it out"
            )
        if count_devices(self.device) == 0:
            raise ValueError(f"this torch finds no {self.device} device here")
        if self.mps and find_control() is None:
            Mps()  # which says what is missing

    def _check_names(self) -> None:
        for name in set(self.backends) - {MPI}:
            if name not in dist.Backend.backend_list:
                raise ValueError(f"torch has no backend {name!r}")
