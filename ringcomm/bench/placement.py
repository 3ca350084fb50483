"""Which device each rank of a measurement is on, and what is known of those devices."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

import torch

from ringcomm.bench.fork import fork

# "all": rank i on device i mod their number; "one": all ranks on the first.
LAYOUTS = ("all", "one")
NVIDIA_SMI_TIMEOUT_S = 60.0
# Of the process that counts, so that its failure (status 1) is not one device.
COUNTED = 100


def count_devices(kind: str) -> int:
    """How many devices of a type there are; counted in a process that does nothing else.

    Whoever has asked CUDA's driver for anything cannot fork processes that use it.
    """
    if kind == "cpu":
        return 1
    module: Any = getattr(torch, kind, None)
    if module is None:
        return 0
    pid = fork(lambda: COUNTED + min(module.device_count(), 100))
    return max(0, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) - COUNTED)


@dataclass(frozen=True)
class Placement:
    """Ranks on devices of one type.

    Attributes:
        kind: torch's name of the type.
        num_devices: that are there.
        layout: one of ``LAYOUTS``.
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

    def take(self, rank: int) -> torch.device:
        """The same as ``device_of``, which is this process's current device from now on."""
        device = self.device_of(rank)
        if not self.is_cpu:
            torch.get_device_module(device).set_device(device)
        return device


def facts(placement: Placement) -> dict[str, Any]:
    """The fields of a record that tell where its ranks were; of GPUs their name and driver too."""
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
    tool = shutil.which("nvidia-smi")
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
