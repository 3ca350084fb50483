"""What the search for rings returns."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ringcomm.topology.graph import LinkKind, Topology
from ringcomm.topology.routes import Route

__all__ = ["Channel", "RingPlan", "link_loads"]


@dataclass(frozen=True)
class Channel:
    """A directed ring over all ranks.

    Attributes:
        order: the ranks as the ring visits them; the last sends to the first.
        hops: per position, the links from that rank to the next.
    """

    order: tuple[int, ...]
    hops: tuple[Route, ...]


@dataclass(frozen=True)
class RingPlan:
    """Rings that share no lane, each moving `channel_gb_per_s` at the line rate.

    Attributes:
        topology: where they run.
        channels: the rings; each carries the same share of a buffer.
        channel_gb_per_s: line rate of one ring.
        kinds: of the links that the search was free to use.
        bound: no plan with this rate and these kinds has more channels: every ring leaves and
            enters each set of GPUs at least once, so a minimum cut limits their number.
        is_maximum: `bound`, or the number asked for, is met, or the search went through all rings.
        method: in a few words, how the rings were found.
    """

    topology: Topology
    channels: tuple[Channel, ...]
    channel_gb_per_s: float
    kinds: frozenset[LinkKind]
    bound: int
    is_maximum: bool
    method: str

    @property
    def gb_per_s(self) -> float:
        """Line rate of all channels together: the limit of the bus bandwidth."""
        return len(self.channels) * self.channel_gb_per_s


def link_loads(channels: tuple[Channel, ...]) -> Counter[int]:
    """How many times the channels use each link."""
    return Counter(i for channel in channels for hop in channel.hops for i in hop)
