"""The machines of a training: devices, hosts, and what joins them."""

from __future__ import annotations

import dataclasses

from ringcomm.planner.hardware import HARDWARE, Hardware
from ringcomm.planner.links import Group, Link
from ringcomm.planner.mesh import Mesh
from ringcomm.planner.sizes import in_gb
from ringcomm.tuning import Tuning

__all__ = ["Cluster"]


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Devices of one kind.

    Ranks are numbered with tensor parallelism innermost, then data, then pipeline parallelism, so
    that what talks most stays inside a host.

    Attributes:
        num_gpus: of all hosts; whole hosts, or less than one.
        hardware: of each.
        memory_bytes: of a device; 0 for the hardware's.
        per_host: devices of a host; 0 for the hardware's, or fewer if there are fewer.
        host_memory_bytes: of a host; 0 for the hardware's.

    Raises:
        ValueError: a number is out of its range, or devices do not fill hosts.
    """

    num_gpus: int
    hardware: Hardware = HARDWARE["h100"]
    memory_bytes: int = 0
    per_host: int = 0
    host_memory_bytes: int = 0

    def __post_init__(self) -> None:
        if self.num_gpus < 1 or min(self.memory_bytes, self.per_host, self.host_memory_bytes) < 0:
            raise ValueError("gpus, memory and gpus per host are positive")
        per_host = self.per_host or min(self.hardware.per_host, self.num_gpus)
        if self.num_gpus % per_host:
            raise ValueError(
                f"{self.num_gpus} gpus are no whole number of hosts of {per_host}: say how many a"
                " host has (--per-host)"
            )
        object.__setattr__(self, "per_host", per_host)
        defaults = {"memory_bytes": self.hardware.memory_bytes}
        defaults["host_memory_bytes"] = self.hardware.host_memory_bytes
        for name, value in defaults.items():
            object.__setattr__(self, name, getattr(self, name) or value)
        if self.usable_bytes < 1:
            raise ValueError(
                f"{in_gb(self.memory_bytes)} of memory are less than the driver's"
                f" {in_gb(self.hardware.reserved_bytes)}"
            )

    @property
    def num_hosts(self) -> int:
        """Of all devices."""
        return self.num_gpus // self.per_host

    @property
    def usable_bytes(self) -> int:
        """Of a device, without what its driver takes."""
        return self.memory_bytes - self.hardware.reserved_bytes

    def tuned(self, tuning: Tuning) -> Cluster:
        """The same with alpha and beta inside a host as `ringcomm tune` has measured them.

        Of the numbers of ranks that it has, the one nearest to a host's devices counts.
        """
        world = min(tuning.worlds, key=lambda w: (abs(w.world_size - self.per_host), w.world_size))
        return dataclasses.replace(self, hardware=self.hardware.tuned(world))

    def tensor_group(self, mesh: Mesh) -> Group:
        """Ranks that share layers."""
        return self._group(mesh.tp, 1)

    def data_group(self, mesh: Mesh) -> Group:
        """Ranks that have the same part of the model, and other rows."""
        return self._group(mesh.dp, mesh.tp)

    def expert_group(self, mesh: Mesh) -> Group:
        """Ranks that share experts, neighbours in the data group."""
        return self._group(mesh.ep, mesh.tp)

    def replica_group(self, mesh: Mesh) -> Group:
        """Ranks that have the same experts."""
        return self._group(mesh.dp // mesh.ep, mesh.tp * mesh.ep)

    def pipeline_group(self, mesh: Mesh) -> Group:
        """Neighbouring stages; a hop may leave the host as soon as one of them does."""
        return self._group(mesh.pp, mesh.tp * mesh.dp)

    def _group(self, size: int, stride: int) -> Group:
        """Of `size` ranks, every stride-th."""
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
