"""What devices can do: a table of data sheets, or one's own file.

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
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from ringcomm.tuning import World

__all__ = ["HARDWARE", "Hardware", "find_hardware"]

Precision = Literal["bf16", "fp32"]
MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A device and what is around it. Rates are per device, bytes per second in one direction.

    Attributes:
        name: for people.
        peak_flops: per second, by precision.
        memory_bytes: of the device.
        reserved_bytes: of these what its driver and libraries take.
        memory_rate: of the device's memory.
        new_memory_rate: at which memory is written that the system has to give first, page by page;
            0 where an allocator keeps it.
        inside_rate, outside_rate: between devices of a host, and of different ones.
        inside_alpha_s, outside_alpha_s: of a hop.
        host_rate: to host memory.
        disk_rate: to all disks of a host together.
        per_host: devices of a host.
        host_memory_bytes: of a host.
        utilisation: the share of the peak that layers reach.
        overlap: the share of communication that may run beside computing; 0 where the processor
            moves the bytes itself.
        call_s: of a collective, whatever it moves.
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
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            may_be_zero = field.name in (
                *("reserved_bytes", "overlap", "call_s", "new_memory_rate"),
            ) or (field.name.endswith("alpha_s"))
            if field.name in ("name", "is_host"):
                continue
            numbers = list(value.values()) if isinstance(value, Mapping) else [value]
            for number in numbers:
                is_number = isinstance(number, int | float) and not isinstance(number, bool)
                if not is_number or not (0 < number < float("inf") or (may_be_zero and not number)):
                    raise ValueError(
                        f"hardware {self.name}: {field.name} is a positive number, got {number!r}"
                    )
        if not {"bf16", "fp32"} <= set(self.peak_flops):
            raise ValueError(f"hardware {self.name}: peak_flops is an object with bf16 and fp32")
        if not 0 < self.utilisation <= 1 or not 0 <= self.overlap <= 1:
            raise ValueError(f"hardware {self.name}: utilisation and overlap are shares up to 1")

    def tuned(self, world: World) -> Hardware:
        """The same with alpha and beta inside a host as `ringcomm tune` has measured them."""
        return dataclasses.replace(
            self,
            name=f"{self.name} (tuned with {world.world_size} ranks)",
            inside_alpha_s=world.alpha_us * 1e-6,
            inside_rate=MIB / max(world.beta_us_per_mib, 1e-9) * 1e6,
            call_s=world.overhead_us * 1e-6,
        )


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


def find_hardware(name: str | PathLike[str]) -> Hardware:
    """A device by its name in HARDWARE, or from a JSON file.

    The file holds an object with the fields of Hardware; with `like`, a name in HARDWARE, it holds
    those that differ.

    Raises:
        ValueError: there is neither, or a field is wrong; names it.
    """
    if str(name) in HARDWARE:
        return HARDWARE[str(name)]
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"{str(name)!r} is no file and none of {', '.join(HARDWARE)}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: hardware is an object with {', '.join(_fields())}")
    like = content.pop("like", None)
    if like is not None and like not in HARDWARE:
        raise ValueError(f"{path}: like is one of {', '.join(HARDWARE)}, got {like!r}")
    unknown = sorted(set(content) - set(_fields()))
    if unknown:
        raise ValueError(f"{path}: unknown {', '.join(unknown)}; known are {', '.join(_fields())}")
    try:
        if like is not None:
            return dataclasses.replace(HARDWARE[like], **{"name": path.stem, **content})
        return Hardware(**{"name": path.stem, **content})
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from None


def _fields() -> list[str]:
    return [field.name for field in dataclasses.fields(Hardware)]
