"""What devices can do: a table of data sheets, or a JSON file; and what joins them.

Sources, of dense products without sparsity and of one direction of a link:
- H100 SXM, H200 SXM: NVIDIA H100 and H200 Tensor Core GPU data sheets (989 TFLOP/s bf16, 67 fp32,
  NVLink 900 GB/s both directions together, PCIe 5.0 x16); a NIC of 400 Gb/s per GPU as in DGX H100.
- A100 80GB SXM: NVIDIA A100 data sheet (312 TFLOP/s bf16, 19.5 fp32, NVLink 600 GB/s, PCIe 4.0
  x16); a NIC of 200 Gb/s per GPU as in DGX A100.
- RTX 4090: NVIDIA Ada GPU architecture paper, appendix A (165 TFLOP/s bf16 with sums in fp32, 83
  fp32; no NVLink, PCIe 4.0 x16); a NIC of 100 Gb/s per host of eight.
- L4: NVIDIA L4 data sheet (121 TFLOP/s bf16, 30 fp32, 300 GB/s, PCIe 4.0 x16).
- cpu-core: a core with AVX2 at 3 GHz, two products and sums of eight floats per cycle; what its
  neighbours reach through shared memory. `ringcomm tune` measures the machine at hand.

Payload gets the share of a link's line rate that NCCL counts on. A hop has the latency of NCCL's
tuner for its Simple protocol. The constants below name the source of each.
Utilisation is what published trainings reach of the peak (Narayanan et al. 2021, arXiv 2104.04473:
44 to 52 % of A100s; Grattafiori et al. 2024, arXiv 2407.21783: 38 to 43 % of H100s).

A ring over N ranks takes, for all_reduce of S bytes, 2 (N - 1) alpha + 2 (N - 1) / N S / beta. A
group that spans hosts has two ways: one ring through all, of which every host's devices carry a
share over the network, or levels: reduce-scatter inside the host, all_reduce of the shards between
hosts, all-gather inside. Between hosts that is a ring again, or two trees that share the bytes
(Sanders et al. 2009, NCCL's double binary tree): 2 log2(hosts) hops in place of 2 (hosts - 1).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ringcomm.measure.screen import in_gb
from ringcomm.tuning import World

Precision = Literal["bf16", "fp32"]
MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A device and what is around it. Rates are per device, bytes per second in one direction.

    Attributes:
        name: for people.
        peak_flops: per second, by precision.
        memory_bytes, memory_rate: of the device's memory.
        reserved_bytes: of the memory, for the driver and its libraries.
        new_memory_rate: at which new pages of the system are written; 0 with a caching allocator.
        inside_rate, outside_rate: between devices of a host, and of different hosts.
        inside_alpha_s, outside_alpha_s: latency of a hop.
        host_rate: to host memory.
        disk_rate: to all disks of a host together.
        per_host: devices of a host.
        host_memory_bytes: of a host.
        utilisation: the share of the peak that layers reach.
        overlap: the share of communication that may run beside computing; 0 where the processor
            moves the bytes itself.
        call_s: latency of a collective, besides its hops.
        is_host: whether the device's memory is the host's.

    Raises:
        ValueError: a number is out of its range.
    """

    name: str
    peak_flops: Mapping[str, float]
    memory_bytes: int
    memory_rate: float
    inside_rate: float
    outside_rate: float
    host_rate: float
    inside_alpha_s: float
    outside_alpha_s: float
    disk_rate: float = 5e9
    per_host: int = 8
    host_memory_bytes: int = 2 << 40
    reserved_bytes: int = 1 << 30
    utilisation: float = 0.45
    overlap: float = 1.0
    call_s: float = 0.0
    is_host: bool = False
    new_memory_rate: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.peak_flops, Mapping) or not {"bf16", "fp32"} <= set(self.peak_flops):
            raise ValueError(f"hardware {self.name}: peak_flops is an object with bf16 and fp32")
        numbers = dataclasses.asdict(self) | {
            f"peak_flops.{k}": v for k, v in self.peak_flops.items()
        }
        for name in ("name", "is_host", "peak_flops"):
            del numbers[name]
        may_be_zero = ("reserved_bytes", "overlap", "call_s", "new_memory_rate")
        for name, value in numbers.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            is_fine = is_number and 0 <= value < float("inf")
            if not is_fine or (not value and name not in may_be_zero and "alpha" not in name):
                raise ValueError(
                    f"hardware {self.name}: {name} is a positive number, got {value!r}"
                )
        if self.utilisation > 1 or self.overlap > 1:
            raise ValueError(f"hardware {self.name}: utilisation and overlap are shares up to 1")


# Seconds of a hop: NCCL's tuner, Simple protocol (src/graph/tuning.cc).
_NVLINK_HOP_S, _PCIE_HOP_S, _NETWORK_HOP_S = 3.4e-6, 5.7e-6, 14e-6
# Share of the line rate that payload gets. NVLink and PCIe: NCCL's src/graph/topo.h. Network cards:
# 24 of 25 GB/s (github.com/NVIDIA/nccl-tests/issues/119).
_NVLINK4, _NVLINK3, _PCIE, _NIC = 0.82, 0.80, 0.76, 0.96


def _nvlink(name: str, tera: float, **more: Any) -> Hardware:
    return Hardware(
        name,
        {"bf16": tera * 1e12, "fp32": more.pop("fp32") * 1e12},
        inside_alpha_s=_NVLINK_HOP_S,
        outside_alpha_s=_NETWORK_HOP_S,
        **more,
    )


def _pcie(name: str, tera: float, **more: Any) -> Hardware:
    return Hardware(
        name,
        {"bf16": tera * 1e12, "fp32": more.pop("fp32") * 1e12},
        inside_rate=32e9 * _PCIE / 2,  # two devices behind one switch take turns
        outside_rate=12.5e9 * _NIC / 8,
        host_rate=32e9 * _PCIE,
        inside_alpha_s=_PCIE_HOP_S,
        outside_alpha_s=_NETWORK_HOP_S,
        **more,
    )


_H100: dict[str, Any] = {
    "fp32": 67,
    "inside_rate": 450e9 * _NVLINK4,
    "outside_rate": 50e9 * _NIC,
    "host_rate": 64e9 * _PCIE,
    "utilisation": 0.40,
}
_KNOWN = (
    _nvlink("h100", 989, memory_bytes=80 << 30, memory_rate=3.35e12, **_H100),
    _nvlink("h200", 989, memory_bytes=141 * 10**9, memory_rate=4.8e12, **_H100),
    _nvlink(
        "a100",
        312,
        fp32=19.5,
        memory_bytes=80 << 30,
        memory_rate=2.04e12,
        inside_rate=300e9 * _NVLINK3,
        outside_rate=25e9 * _NIC,
        host_rate=32e9 * _PCIE,
        host_memory_bytes=1 << 40,
    ),
    _pcie(
        "4090", 165, fp32=83, memory_bytes=24 << 30, memory_rate=1.01e12, host_memory_bytes=1 << 39
    ),
    _pcie("l4", 121, fp32=30, memory_bytes=24 << 30, memory_rate=3e11, host_memory_bytes=1 << 38),
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
    ),
)
HARDWARE = {hardware.name: hardware for hardware in _KNOWN}


def find_hardware(name: str) -> Hardware:
    """A device by its name in HARDWARE, or from a JSON file with the fields of Hardware.

    With the field `like`, a name in HARDWARE, the file holds only the fields that differ.

    Raises:
        ValueError: there is neither, or a field is wrong; the message names it.
    """
    if name in HARDWARE:
        return HARDWARE[name]
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"{name!r} is no file and none of {', '.join(HARDWARE)}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    fields = [field.name for field in dataclasses.fields(Hardware)]
    if not isinstance(content, dict):
        raise ValueError(f"{path}: hardware is an object with {', '.join(fields)}")
    like = content.pop("like", None)
    if like is not None and like not in HARDWARE:
        raise ValueError(f"{path}: like is one of {', '.join(HARDWARE)}, got {like!r}")
    unknown = sorted(set(content) - set(fields))
    if unknown:
        raise ValueError(f"{path}: unknown {', '.join(unknown)}; known are {', '.join(fields)}")
    content = {"name": path.stem, **content}
    try:
        return (
            Hardware(**content) if like is None else dataclasses.replace(HARDWARE[like], **content)
        )
    except TypeError as error:
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
    """Ranks that communicate, as many on every host."""

    per_host: int
    num_hosts: int
    inside: Link  # between ranks of a host
    outside: Link  # between hosts
    call_s: float = 0.0  # latency of every collective

    @property
    def num_ranks(self) -> int:
        """Ranks on all hosts."""
        return self.per_host * self.num_hosts

    def all_reduce(self, num_bytes: float) -> float:
        """Seconds, by the fastest of ring, levels and trees."""
        if self.num_ranks == 1:
            return 0.0
        halves = 2 * min(self.ring(num_bytes), self.levels(num_bytes))
        return min(halves, self.trees(num_bytes)) + self.call_s

    def half(self, num_bytes: float) -> float:
        """Seconds of a reduce-scatter or an all-gather; bytes of the whole buffer."""
        if self.num_ranks == 1:
            return 0.0
        return min(self.ring(num_bytes), self.levels(num_bytes)) + self.call_s

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
        k = self.per_host
        return self.inside.seconds(k - 1, num_bytes * (k - 1) / k)

    def all_to_all(self, num_bytes: float) -> float:
        """Seconds in which each rank sends so many bytes, evenly, to the others."""
        if self.num_ranks == 1:
            return 0.0
        away = (self.num_ranks - self.per_host) / (self.num_ranks - 1)
        inside = self.inside.seconds(self.per_host - 1, num_bytes * (1 - away))
        outside = self.outside.seconds(self.num_ranks - self.per_host, num_bytes * away)
        return max(inside, outside) + self.call_s

    def hop(self, num_bytes: float) -> float:
        """Seconds of a message to the neighbour, over the slowest link there is."""
        link = self.inside if self.num_hosts == 1 else self.outside
        return link.seconds(1, num_bytes) + self.call_s


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Devices of one kind.

    Attributes:
        num_gpus: devices of all hosts; whole hosts, or less than one.
        hardware: of each: a name such as "h100", "a100", "4090", "l4" or "cpu-core", the path of a
            JSON file (see find_hardware()), or a Hardware.
        memory_bytes: of a device; 0 for the hardware's.
        per_host: devices of a host; 0 for the hardware's, or fewer if there are fewer.
        host_memory_bytes: of a host; 0 for the hardware's.

    Raises:
        ValueError: a number is out of its range, devices do not fill hosts, or the hardware is not
            known.
    """

    num_gpus: int
    hardware: Any = "h100"  # a Hardware once it is made
    memory_bytes: int = 0
    per_host: int = 0
    host_memory_bytes: int = 0

    def __post_init__(self) -> None:
        if self.num_gpus < 1 or min(self.memory_bytes, self.per_host, self.host_memory_bytes) < 0:
            raise ValueError("gpus, memory and gpus per host are positive")
        hardware = self.hardware
        if not isinstance(hardware, Hardware):
            hardware = find_hardware(str(hardware))
        values = {
            "hardware": hardware,
            "memory_bytes": self.memory_bytes or hardware.memory_bytes,
            "per_host": self.per_host or min(hardware.per_host, self.num_gpus),
            "host_memory_bytes": self.host_memory_bytes or hardware.host_memory_bytes,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        if self.num_gpus % self.per_host:
            raise ValueError(
                f"{self.num_gpus} gpus are no whole number of hosts of {self.per_host}: say how"
                " many a host has (--per-host)"
            )
        if self.usable_bytes < 1:
            raise ValueError(
                f"{in_gb(self.memory_bytes)} of memory are less than the driver's"
                f" {in_gb(hardware.reserved_bytes)}"
            )

    @property
    def usable_bytes(self) -> int:
        """Memory of a device, without what its driver takes."""
        return self.memory_bytes - self.hardware.reserved_bytes

    def tuned(self, worlds: Sequence[World]) -> Cluster:
        """The same with alpha and beta inside a host as `ringcomm tune` has measured them.

        Of the measured numbers of ranks, the one nearest to a host's devices counts.
        """
        world = min(worlds, key=lambda w: (abs(w.world_size - self.per_host), w.world_size))
        hardware = dataclasses.replace(
            self.hardware,
            name=f"{self.hardware.name} (tuned with {world.world_size} ranks)",
            inside_alpha_s=world.alpha_us * 1e-6,
            inside_rate=MIB / max(world.beta_us_per_mib, 1e-9) * 1e6,
            call_s=world.overhead_us * 1e-6,
        )
        return dataclasses.replace(self, hardware=hardware)

    def group(self, size: int, stride: int) -> Group:
        """Every stride-th rank, `size` of them."""
        hardware = self.hardware
        on_host = max(1, min(size, self.per_host // stride))
        # The largest number that divides the group: hosts have as many each.
        per_host = next(k for k in range(on_host, 0, -1) if size % k == 0)
        return Group(
            per_host,
            size // per_host,
            Link(hardware.inside_alpha_s, hardware.inside_rate),
            Link(hardware.outside_alpha_s, hardware.outside_rate),
            hardware.call_s,
        )
