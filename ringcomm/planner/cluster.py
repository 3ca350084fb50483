"""How long a group's collectives take on paper: latency of the hops, and bytes over the rate.

A ring over N ranks, all_reduce of S bytes: 2 (N - 1) alpha + 2 (N - 1) / N S / beta. Where a group
spans hosts, two ways: one ring through all, of which every host's devices carry a share over the
network, or in levels: reduce-scatter inside the host, all_reduce of the shards between hosts,
all-gather inside. Between hosts that is a ring again, or two trees that share the bytes (Sanders et
al. 2009, NCCL's double binary tree): 2 log2(hosts) hops in place of 2 (hosts - 1).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from ringcomm.planner.hardware import HARDWARE, Hardware
from ringcomm.planner.job import in_gb
from ringcomm.planner.mesh import Mesh
from ringcomm.tuning import Tuning

__all__ = ["Cluster", "Group", "Link"]


@dataclass(frozen=True)
class Link:
    """What a rank reaches its neighbour by.

    Attributes:
        alpha_s: of a hop.
        rate: bytes per second, one direction.
    """

    alpha_s: float
    rate: float

    def seconds(self, num_hops: float, num_bytes: float) -> float:
        """Of so many hops one after the other, with so many bytes in all."""
        return num_hops * self.alpha_s + num_bytes / self.rate


@dataclass(frozen=True)
class Group:
    """Ranks that communicate, as many on every host.

    Attributes:
        per_host: ranks of the group on a host.
        num_hosts: that it spans.
        inside, outside: between ranks of a host, and of different hosts.
        call_s: of every collective.
    """

    per_host: int
    num_hosts: int
    inside: Link
    outside: Link
    call_s: float = 0.0

    @property
    def num_ranks(self) -> int:
        """Of all hosts."""
        return self.per_host * self.num_hosts

    @property
    def is_inside(self) -> bool:
        """Whether it stays on one host."""
        return self.num_hosts == 1

    def all_reduce(self, num_bytes: float) -> float:
        """Seconds, by the fastest of ring, levels and trees."""
        if self.num_ranks == 1:
            return 0.0
        halves = 2 * min(self.ring(num_bytes), self.levels(num_bytes))
        return min(halves, self.trees(num_bytes)) + self.call_s

    def half(self, num_bytes: float) -> float:
        """Seconds of a reduce-scatter or an all-gather of so many bytes, whole."""
        if self.num_ranks == 1:
            return 0.0
        return min(self.ring(num_bytes), self.levels(num_bytes)) + self.call_s

    def ring(self, num_bytes: float) -> float:
        """Half of an all_reduce in one ring; between hosts all their ranks carry a share."""
        steps = self.num_ranks - 1
        if steps == 0:
            return 0.0
        sent = num_bytes * steps / self.num_ranks
        if self.is_inside:
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
        others = self.num_ranks - 1
        if others == 0:
            return 0.0
        away = (self.num_ranks - self.per_host) / others
        inside = self.inside.seconds(self.per_host - 1, num_bytes * (1 - away))
        outside = self.outside.seconds(self.num_ranks - self.per_host, num_bytes * away)
        return max(inside, outside) + self.call_s

    def hop(self, num_bytes: float) -> float:
        """Seconds of a message to the neighbour, over the slowest link there is."""
        link = self.inside if self.is_inside else self.outside
        return link.seconds(1, num_bytes) + self.call_s


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
