"""How long a group's collectives take on paper: latency of the hops, and bytes over the rate.

A ring over N ranks, all_reduce of S bytes: 2 (N - 1) alpha + 2 (N - 1) / N S / beta. Where a group
spans hosts, two ways: one ring through all, of which every host's devices carry a share over the
network, or in levels: reduce-scatter inside the host, all_reduce of the shards between hosts,
all-gather inside. Between hosts that is a ring again, or two trees that share the bytes (Sanders et
al. 2009, NCCL's double binary tree): 2 log2(hosts) hops in place of 2 (hosts - 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Group", "Link"]


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
