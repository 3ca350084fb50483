"""The device of each rank, the speed of devices, and the settings that NCCL needs."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from mps import Mps, find_control, find_program

from ringcomm.measure.ranks import Team

NVIDIA_SMI_TIMEOUT_S = 60.0


def count_devices(kind: str) -> int:
    """The number of devices of a type, counted in a separate process.

    A process that has used CUDA's driver cannot fork processes that use it.
    """
    if kind == "cpu":
        return 1
    module: Any = getattr(torch, kind, None)
    if module is None:
        return 0
    context = get_context("fork")
    count = context.Value("i", 0)

    def look() -> None:
        count.value = module.device_count()

    process = context.Process(target=look)
    process.start()
    process.join()
    return int(count.value)


@dataclass(frozen=True)
class Placement:
    """Ranks on devices of one type.

    Attributes:
        kind: torch's name of the type.
        num_devices: that are there.
        layout: one of ``front_door.LAYOUTS``.
        mps: whether processes share a GPU by NVIDIA's Multi-Process Service.
    """

    kind: str = "cpu"
    num_devices: int = 1
    layout: str = "all"
    mps: bool = False

    @property
    def is_cpu(self) -> bool:
        """Whether ranks are threads of the host's cores, and nothing else."""
        return self.kind == "cpu"

    def device_of(self, rank: int) -> torch.device:
        """Where a rank's tensors are."""
        if self.is_cpu:
            return torch.device("cpu")
        return torch.device(self.kind, 0 if self.layout == "one" else rank % self.num_devices)

    def num_used(self, world_size: int) -> int:
        """How many devices have a rank."""
        return 1 if self.layout == "one" else min(self.num_devices, world_size)

    def max_ranks(self, world_size: int) -> int:
        """How many ranks the device with most of them has."""
        return -(-world_size // self.num_used(world_size))

    def share(self, world_size: int) -> float:
        """The part of the ranks that the device with most of them has."""
        return self.max_ranks(world_size) / world_size

    def take(self, rank: int) -> torch.device:
        """Like ``device_of``, and makes it this process's current device."""
        device = self.device_of(rank)
        if not self.is_cpu:
            torch.get_device_module(device).set_device(device)
        return device


def facts(placement: Placement) -> dict[str, Any]:
    """The fields of a record that tell where its ranks were; of GPUs their name and driver too."""
    if placement.is_cpu:
        return {"device": "cpu"}
    where = {
        "device": placement.kind,
        "layout": placement.layout,
        "num_devices": placement.num_devices,
        "mps": placement.mps,
    }
    if placement.kind != "cuda":
        return where
    return {**where, "cuda": torch.version.cuda, **nvidia_smi()}


def nvidia_smi() -> dict[str, Any]:
    """The first GPU's name, driver and memory as nvidia-smi tells them; None without it."""
    fields = {"gpu": "name", "driver": "driver_version", "gpu_memory": "memory.total"}
    unknown = dict.fromkeys(fields)
    tool = find_program("nvidia-smi")
    if tool is None:
        return unknown
    query = [tool, f"--query-gpu={','.join(fields.values())}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, check=True, timeout=NVIDIA_SMI_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return unknown
    values = [value.strip() for value in done.stdout.splitlines()[0].split(",")]
    return {**unknown, **dict(zip(fields, values, strict=False))}


# ---- the command line


def placement_of(options: argparse.Namespace) -> Placement:
    """Where the ranks of a command line are; on the CPU where it has no --device.

    Raises ValueError for devices that are not there, and where MPS cannot run.
    """
    kind = getattr(options, "device", "cpu")
    num_devices = count_devices(kind)
    if num_devices == 0:
        raise ValueError(f"this torch finds no {kind} device here")
    wants_mps = getattr(options, "mps", False)
    if wants_mps and find_control() is None:
        Mps()  # which says what is missing
    # A daemon that was running before has its folder in the environment too.
    has_mps = wants_mps or "CUDA_MPS_PIPE_DIRECTORY" in os.environ
    return Placement(kind, num_devices, getattr(options, "layout", "all"), has_mps)


@contextlib.contextmanager
def shared(wants_mps: bool, placement: Placement, world_size: int) -> Iterator[None]:
    """MPS if it is wanted, and what NCCL needs, where that many ranks share devices."""
    if placement.kind == "cuda":
        for name, value in nccl_variables(placement.max_ranks(world_size)).items():
            os.environ.setdefault(name, value)
    with Mps() if wants_mps else contextlib.nullcontext():
        yield


# ---- NCCL as a peer where ranks share a GPU, which it has to be asked for

# With more of them NCCL hangs where ranks share a GPU; all of those ranks together.
NCCL_CHANNELS_OF_A_GPU = 64
# The first NCCL that lets ranks share a GPU, if it is told so and MPS runs.
NCCL_THAT_SHARES = (2, 30)


def nccl_variables(ranks_of_a_gpu: int) -> dict[str, str]:
    """The environment variables that NCCL needs if ranks share a GPU; otherwise none."""
    if ranks_of_a_gpu == 1:
        return {}
    channels = max(1, NCCL_CHANNELS_OF_A_GPU // ranks_of_a_gpu)
    return {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_NCHANNELS": str(channels)}


def nccl_version() -> tuple[int, ...]:
    """Of the NCCL that this process uses, which LD_PRELOAD may have exchanged."""
    found = ctypes.c_int()
    try:  # torch tells which one it was built with
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(found))
    except (OSError, AttributeError):
        return tuple(torch.cuda.nccl.version()[:3])
    return found.value // 10000, found.value // 100 % 100, found.value % 100


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


# ---- the floor: the speed of memory, and between devices

GB = 1e9
# Many times the caches of a GPU; an emulated one has the host's memory, and its patience.
COPY_BYTES = {"cuda": 512 << 20}
OTHER_COPY_BYTES = 1 << 20
NUM_COPIES = 7


@dataclass(frozen=True)
class Speeds:
    """Bytes per second.

    Attributes:
        memory: of one device, read and written, of the slowest one.
        links: into one device from another while all others do the same; None with one device.
    """

    memory: float
    links: float | None

    def floor_us(self, num_memory_bytes: float, num_link_bytes: float) -> float:
        """The least µs for bytes that pass through a device's memory and that arrive over a link.

        With one device nothing comes over links.
        """
        links_s = num_link_bytes / self.links if self.links is not None else 0.0
        return 1e6 * max(num_memory_bytes / self.memory, links_s)

    def record(self) -> dict[str, float | None]:
        """The fields of a record."""
        links = None if self.links is None else self.links / GB
        return {"copy_gb_per_s": self.memory / GB, "link_gb_per_s": links}


def _seconds(device: torch.device, copy: Callable[[], object]) -> float:
    module: Any = torch.get_device_module(device)
    copy()
    times = []
    for _ in range(NUM_COPIES):
        begin, end = (module.Event(enable_timing=True) for _ in range(2))
        begin.record()
        copy()
        end.record()
        module.synchronize(device)
        times.append(begin.elapsed_time(end) / 1e3)
    return max(1e-9, median(times))


def measure_speeds(team: Team, placement: Placement) -> Speeds:
    """Copies within each device, then from each to the next, all devices at once. Collective.

    Of the ranks on a device one copies, and the others wait.
    """
    device = placement.device_of(team.rank)
    num_used = placement.num_used(team.world_size)
    num_bytes = COPY_BYTES.get(placement.kind, OTHER_COPY_BYTES)
    copies = team.rank < num_used
    source = torch.zeros(num_bytes if copies else 0, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    torch.get_device_module(device).synchronize(device)
    team.share(None)
    mine = 2 * num_bytes / _seconds(device, lambda: target.copy_(source)) if copies else None
    memory = min(filter(None, team.share(mine)))
    if num_used == 1:
        return Speeds(memory, None)
    if copies:
        source = source.to(placement.device_of((team.rank + 1) % num_used))
    team.share(None)
    mine = num_bytes / _seconds(device, lambda: target.copy_(source)) if copies else None
    return Speeds(memory, min(filter(None, team.share(mine))))
