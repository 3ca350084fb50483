"""Devices, from a table of data sheets or a JSON file, and their links.

Sources, quoted from memory: products without sparsity and one direction of a link.

- h100, h200 (SXM), a100 (80GB SXM) and l4: NVIDIA's data sheets, with network cards as in DGX.
- 4090: the Ada architecture paper, appendix A, with float32 sums and 100 Gb/s per host of eight.
- cpu-core: AVX2 at 3 GHz, two products and sums of eight floats per cycle.
- utilisation: published trainings, 44 to 52 % of A100s (arXiv 2104.04473) and 38 to 43 % of H100s
  (arXiv 2407.21783).
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ringcomm.cost_model import Machine
from ringcomm.planner.models import read_object
from ringcomm.screen import counted, in_gib
from ringcomm.tuning import Tuning

Precision = Literal["bf16", "fp32"]


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A device and its host. Rates are per device, bytes per second in one direction.

    Raises ValueError for a number out of its range.
    """

    name: str  # shown in reports
    peak_flops: Mapping[str, float]  # per second, by precision
    memory_bytes: int
    memory_rate: float
    inside_rate: float  # between devices of a host
    outside_rate: float  # between devices of different hosts
    host_rate: float  # to host memory
    inside_alpha_s: float  # latency per hop
    outside_alpha_s: float
    disk_rate: float = 5e9  # to all disks of a host
    per_host: int = 8  # devices per host
    host_memory_bytes: int = 2 << 40
    reserved_bytes: int = 1 << 30  # the driver's and its libraries' part of memory_bytes
    utilisation: float = 0.45  # the share of the peak that layers reach
    overlap: float = 1.0  # share of communication hidden by computing; 0 if the CPU copies bytes
    call_s: float = 0.0  # latency per collective, besides its hops
    is_host: bool = False  # whether the device uses host memory
    new_memory_rate: float = 0.0  # of first writes to new pages; 0 with a caching allocator
    machine: Machine | None = None  # of collectives inside a host, if they run in shared memory

    def __post_init__(self) -> None:
        peaks, what = self.peak_flops, f"hardware {self.name}"
        if not isinstance(peaks, Mapping) or not {"bf16", "fp32"} <= set(peaks):
            raise ValueError(f"{what}: peak_flops must be an object with bf16 and fp32")
        for name, value in {**vars(self), **peaks}.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            is_in_range = is_number and value >= (0 if name in _MAY_BE_ZERO else 1e-30)
            if not is_in_range and name not in ("name", "peak_flops", "is_host", "machine"):
                raise ValueError(f"{what}: {name} must be a positive number, got {value!r}")
        if self.utilisation > 1 or self.overlap > 1:
            raise ValueError(f"{what}: utilisation and overlap must be fractions up to 1")


_MAY_BE_ZERO = (
    *("reserved_bytes", "overlap", "call_s", "new_memory_rate"),
    *("inside_alpha_s", "outside_alpha_s"),
)
# Seconds per hop: NCCL's tuner, Simple protocol (src/graph/tuning.cc).
_NVLINK_HOP_S, _PCIE_HOP_S, _NETWORK_HOP_S = 3.4e-6, 5.7e-6, 14e-6
# Payload's share of the line rate. NVLink and PCIe: NCCL's src/graph/topo.h. Network cards:
# 24 of 25 GB/s (github.com/NVIDIA/nccl-tests/issues/119).
_NVLINK4, _NVLINK3, _PCIE, _NIC = 0.82, 0.80, 0.76, 0.96
_GB = 1e9


def _gpu(name: str, bf16: float, fp32: float, memory_bytes: int, **rest: Any) -> Hardware:
    """With peaks in TFLOP/s and other rates in GB/s; PCIe for devices without NVLink."""
    rates = {key: rest.pop(key) * _GB for key in [*rest] if key.endswith("_rate")}
    if "inside_rate" not in rates:
        # Two devices behind one switch take turns; eight share a network card of 100 Gb/s.
        rates |= {"inside_rate": 32 * _GB * _PCIE / 2, "outside_rate": 12.5 * _GB * _NIC / 8}
        rest["inside_alpha_s"] = _PCIE_HOP_S
    peaks = {"bf16": bf16 * 1e12, "fp32": fp32 * 1e12}
    hops = {"inside_alpha_s": _NVLINK_HOP_S, "outside_alpha_s": _NETWORK_HOP_S}
    return Hardware(name, peaks, memory_bytes, **{**hops, **rates, **rest})


_H100: dict[str, Any] = {"inside_rate": 450 * _NVLINK4, "outside_rate": 50 * _NIC}
_H100 |= {"host_rate": 64 * _PCIE, "utilisation": 0.40}
_PCIE4: dict[str, Any] = {"host_rate": 32 * _PCIE}
_A100 = _PCIE4 | {"inside_rate": 300 * _NVLINK3, "outside_rate": 25 * _NIC}
_KNOWN = (
    _gpu("h100", 989, 67, 80 << 30, memory_rate=3350, **_H100),
    _gpu("h200", 989, 67, 141 * 10**9, memory_rate=4800, **_H100),
    _gpu("a100", 312, 19.5, 80 << 30, memory_rate=2040, host_memory_bytes=1 << 40, **_A100),
    _gpu("4090", 165, 83, 24 << 30, memory_rate=1010, host_memory_bytes=1 << 39, **_PCIE4),
    _gpu("l4", 121, 30, 24 << 30, memory_rate=300, host_memory_bytes=1 << 38, **_PCIE4),
    Hardware(
        "cpu-core",
        {"bf16": 48e9, "fp32": 96e9},
        memory_bytes=4 << 30,
        memory_rate=10e9,
        inside_rate=5e9,
        outside_rate=1.25e9,
        host_rate=10e9,
        disk_rate=1e9,
        inside_alpha_s=0.2e-6,
        outside_alpha_s=30e-6,
        per_host=64,
        host_memory_bytes=1 << 38,
        reserved_bytes=0,
        utilisation=0.6,
        overlap=0.0,
        call_s=3e-6,
        is_host=True,
        new_memory_rate=4e9,
        machine=Machine(64),
    ),
)
HARDWARE = {hardware.name: hardware for hardware in _KNOWN}


def find_hardware(name: str) -> Hardware:
    """A device by its name in HARDWARE, or from a JSON file with the fields of Hardware.

    With the field `like`, a name in HARDWARE, the file holds only the fields that differ. Raises
    ValueError if neither exists, or for a wrong field.
    """
    if name in HARDWARE:
        return HARDWARE[name]
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"{name!r} is neither a file nor one of {', '.join(HARDWARE)}")
    content = read_object(path)
    like = content.pop("like", None)
    if like is not None and like not in HARDWARE:
        raise ValueError(f"{path}: like must be one of {', '.join(HARDWARE)}, got {like!r}")
    content = {"name": path.stem, **content}
    try:
        return dataclasses.replace(HARDWARE[like], **content) if like else Hardware(**content)
    except TypeError as error:  # a field is missing or unknown
        raise ValueError(f"{path}: {error}") from None


@dataclasses.dataclass(frozen=True)
class Link:
    """A link between ranks: latency of a hop in seconds, bytes per second in one direction."""

    alpha_s: float
    rate: float

    def seconds(self, num_hops: float, num_bytes: float) -> float:
        """Seconds of hops one after the other, with so many bytes in all."""
        return num_hops * self.alpha_s + num_bytes / self.rate


@dataclasses.dataclass(frozen=True)
class Group:
    """Ranks that communicate, with the same number on every host."""

    per_host: int
    num_hosts: int
    inside: Link  # between ranks of a host
    outside: Link  # between hosts
    call_s: float = 0.0  # latency per collective; 0 for one rank
    machine: Machine | None = None  # if a host's ranks share memory: their collectives
    ranks_of_host: int = 0  # that share its cores, in this group and others like it

    @property
    def num_ranks(self) -> int:
        """Ranks on all hosts."""
        return self.per_host * self.num_hosts

    def all_reduce(self, num_bytes: float) -> float:
        """Seconds, by the fastest of ring, levels and trees; in shared memory what runs there."""
        if self._in_memory:
            return self._in_shared("all_reduce", num_bytes)
        halves = 2 * min(self.ring(num_bytes), self.levels(num_bytes))
        return min(halves, self.trees(num_bytes)) + self.call_s

    def half(self, num_bytes: float) -> float:
        """Seconds of a reduce-scatter or an all-gather; bytes of the whole buffer."""
        if self._in_memory:
            names = ("reduce_scatter", "all_gather")
            return sum(self._in_shared(name, num_bytes) for name in names) / 2
        return min(self.ring(num_bytes), self.levels(num_bytes)) + self.call_s

    @property
    def _in_memory(self) -> bool:
        return self.machine is not None and self.num_hosts == 1

    def _in_shared(self, op: str, num_bytes: float, num_ranks: int = 0) -> float:
        """Seconds of a collective of a host's ranks, or of so many of them, in its memory."""
        assert self.machine is not None
        num_ranks = num_ranks or self.per_host
        sharing = max(num_ranks, self.per_host, self.ranks_of_host)
        return self.machine.microseconds(op, num_bytes, num_ranks, 1, sharing) * 1e-6

    def ring(self, num_bytes: float) -> float:
        """Seconds of half an all_reduce in one ring; between hosts all ranks carry a share."""
        steps = self.num_ranks - 1
        sent = num_bytes * steps / self.num_ranks
        if self.num_hosts == 1:
            return self.inside.seconds(steps, sent)
        # As many rings run as a host has network links, and one hop in each host leaves it.
        rate = min(self.inside.rate, self.outside.rate * self.per_host)
        crossings = min(self.num_hosts, steps)
        latency = self.inside.alpha_s * (steps - crossings) + self.outside.alpha_s * crossings
        return latency + sent / rate

    def levels(self, num_bytes: float) -> float:
        """Half of an all_reduce in levels: rings inside hosts, rings between them."""
        n = self.num_hosts
        share = num_bytes / self.per_host
        return self._inside(num_bytes) + self.outside.seconds(n - 1, share * (n - 1) / n)

    def trees(self, num_bytes: float) -> float:
        """An all_reduce in levels: rings inside hosts, trees between them."""
        between = 0.0
        if self.num_hosts > 1:
            hops = 2 * math.ceil(math.log2(self.num_hosts))
            between = self.outside.seconds(hops, 2 * num_bytes / self.per_host)
        return 2 * self._inside(num_bytes) + between

    def _inside(self, num_bytes: float) -> float:
        """A reduce-scatter among the ranks of a host."""
        if self.machine is not None:
            return self._in_shared("reduce_scatter", num_bytes)
        k = self.per_host
        return self.inside.seconds(k - 1, num_bytes * (k - 1) / k)

    def all_to_all(self, num_bytes: float) -> float:
        """Seconds in which each rank sends so many bytes, evenly, to the others."""
        if self._in_memory:
            whole = num_bytes * self.num_ranks / max(1, self.num_ranks - 1)
            return self._in_shared("all_to_all", whole)
        away = (self.num_ranks - self.per_host) / max(1, self.num_ranks - 1)
        inside = self.inside.seconds(self.per_host - 1, num_bytes * (1 - away))
        outside = self.outside.seconds(self.num_ranks - self.per_host, num_bytes * away)
        return max(inside, outside) + self.call_s

    def hop(self, num_bytes: float) -> float:
        """Seconds of a message to the neighbour, over the slowest link there is."""
        if self._in_memory:
            return self._in_shared("broadcast", num_bytes, 2)
        link = self.inside if self.num_hosts == 1 else self.outside
        return link.seconds(1, num_bytes) + self.call_s


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Devices of one kind.

    Raises:
        ValueError: a number is out of its range, devices do not fill hosts, or the hardware is not
            known.
    """

    num_gpus: int  # on all hosts; whole hosts, or less than one
    hardware: Any = "h100"  # a name of HARDWARE, a JSON file's, or a Hardware, which it becomes
    memory_bytes: int = 0  # per device; 0: the hardware's
    per_host: int = 0  # devices per host; 0: the hardware's, or fewer if there are fewer

    def __post_init__(self) -> None:
        if self.num_gpus < 1 or min(self.memory_bytes, self.per_host) < 0:
            raise ValueError("gpus, memory and gpus per host must be positive")
        hardware = self.hardware
        if not isinstance(hardware, Hardware):
            hardware = find_hardware(str(hardware))
        vars(self).update(
            hardware=hardware,
            memory_bytes=self.memory_bytes or hardware.memory_bytes,
            per_host=self.per_host or min(hardware.per_host, self.num_gpus),
        )
        if self.num_gpus % self.per_host:
            raise ValueError(
                f"{self.num_gpus} gpus are not a whole number of hosts of {self.per_host}: set"
                " the number per host (--per-host)"
            )
        if self.usable_bytes < 1:
            raise ValueError(
                f"{in_gib(self.memory_bytes)} of memory are less than the"
                f" {in_gib(hardware.reserved_bytes)} that the driver uses"
            )

    @property
    def usable_bytes(self) -> int:
        """Memory of a device, without what its driver takes."""
        return self.memory_bytes - self.hardware.reserved_bytes

    def tuned(self, tuning: Tuning) -> "Cluster":
        """The same with the collectives inside a host as `ringcomm tune` has measured them."""
        if not self.hardware.is_host:
            raise ValueError(f"a tuning file is of CPUs, and the hardware is {self.hardware.name}")
        name = f"{self.hardware.name} (tuned on {counted(tuning.machine['cores'], 'core')})"
        hardware = dataclasses.replace(self.hardware, name=name, machine=tuning.host)
        return dataclasses.replace(self, hardware=hardware)

    def group(self, size: int, stride: int) -> Group:
        """Every stride-th rank, `size` of them."""
        hardware = self.hardware
        on_host = max(1, min(size, self.per_host // stride))
        # The largest number that divides the group, so that all hosts have as many.
        per_host = next(k for k in range(on_host, 0, -1) if size % k == 0)
        return Group(
            per_host,
            size // per_host,
            Link(hardware.inside_alpha_s, hardware.inside_rate),
            Link(hardware.outside_alpha_s, hardware.outside_rate),
            hardware.call_s if size > 1 else 0.0,
            hardware.machine,
            self.per_host,
        )
