"""The graph of a machine: GPUs, switches, CPUs and NICs, and the directed links between them.

Ranks are the positions of the GPUs in `Topology.gpus`. A cable is two links, one per direction,
since every bus here is full duplex: what flows one way takes nothing from the other.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

__all__ = [
    "ALL_KINDS",
    "Builder",
    "Link",
    "LinkKind",
    "Node",
    "NodeKind",
    "Topology",
    "host_ranks",
]


class NodeKind(enum.Enum):
    """What a node is."""

    GPU = "gpu"
    NVSWITCH = "nvswitch"
    PCIE_SWITCH = "pcie switch"
    CPU = "cpu"
    NIC = "nic"
    FABRIC = "fabric"


class LinkKind(enum.IntEnum):
    """What a link is made of; the smaller value is the better path."""

    NVLINK = 0
    PCIE = 1
    SOCKET = 2
    NETWORK = 3

    @property
    def label(self) -> str:
        """The name in texts, such as "nvlink"."""
        return self.name.lower()


ALL_KINDS = frozenset(LinkKind)


@dataclass(frozen=True)
class Node:
    """A device, or a crossbar between devices.

    Attributes:
        name: unique in its topology, such as "gpu3".
        kind: what it is.
        host: number of the host it belongs to; of no meaning for a fabric.
    """

    name: str
    kind: NodeKind
    host: int = 0


@dataclass(frozen=True)
class Link:
    """One direction of a cable or bus.

    Attributes:
        src: index of the node that sends.
        dst: index of the node that receives.
        kind: what it is made of.
        num_lanes: what can be given to different channels; a PCIe x16 port counts as one lane.
        lane_gb_per_s: line rate of a lane in this direction, in 10^9 bytes per second.
        efficiency: share of the line rate that payload gets.
    """

    src: int
    dst: int
    kind: LinkKind
    num_lanes: int
    lane_gb_per_s: float
    efficiency: float = 1.0

    @property
    def gb_per_s(self) -> float:
        """Line rate of all lanes."""
        return self.num_lanes * self.lane_gb_per_s

    @property
    def payload_gb_per_s(self) -> float:
        """What payload gets of the line rate."""
        return self.gb_per_s * self.efficiency

    def num_channels(self, channel_gb_per_s: float) -> int:
        """How many channels of that rate fit; a rounding error does not cost a channel."""
        return int(self.gb_per_s / channel_gb_per_s + 1e-9)


@dataclass(frozen=True)
class Topology:
    """Nodes and directed links of one or several hosts.

    Args:
        name: for texts.
        nodes: all nodes; the GPUs among them are the ranks, in this order.
        links: at most one per ordered pair of nodes.

    Raises:
        ValueError: a link that is no link, no GPU, or GPUs that cannot reach each other.
    """

    name: str
    nodes: tuple[Node, ...]
    links: tuple[Link, ...]
    index: dict[tuple[int, int], int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        index: dict[tuple[int, int], int] = {}
        for i, link in enumerate(self.links):
            self._check_link(link)
            if (link.src, link.dst) in index:
                raise ValueError(f"{self.link_name(i)} is there twice: add up its lanes")
            index[link.src, link.dst] = i
        object.__setattr__(self, "index", index)
        if len({node.name for node in self.nodes}) != len(self.nodes):
            raise ValueError("two nodes have the same name")
        if not self.gpus:
            raise ValueError(f"topology {self.name!r} has no GPU")
        self._check_connected()

    def _check_link(self, link: Link) -> None:
        num_nodes = len(self.nodes)
        if not (0 <= link.src < num_nodes and 0 <= link.dst < num_nodes) or link.src == link.dst:
            raise ValueError(
                f"link {link.src} -> {link.dst} does not join two of {num_nodes} nodes"
            )
        where = f"link {self.nodes[link.src].name} -> {self.nodes[link.dst].name}"
        if link.num_lanes < 1:
            raise ValueError(f"{where}: num_lanes must be positive, got {link.num_lanes}")
        if not 0 < link.lane_gb_per_s < float("inf"):
            raise ValueError(f"{where}: lane_gb_per_s must be positive, got {link.lane_gb_per_s}")
        if not 0 < link.efficiency <= 1:
            raise ValueError(f"{where}: efficiency must be in (0, 1], got {link.efficiency}")

    def _check_connected(self) -> None:
        forth, back = set(self.index), {(b, a) for a, b in self.index}
        for pairs, text in ((forth, "from {0} to {1}"), (back, "from {1} to {0}")):
            seen = _reachable(self.gpus[0], pairs)
            cut_off = [self.nodes[gpu].name for gpu in self.gpus if gpu not in seen]
            if cut_off:
                path = text.format(self.gpu_name(0), ", ".join(cut_off))
                raise ValueError(f"disconnected: there is no path {path}")

    @cached_property
    def gpus(self) -> tuple[int, ...]:
        """Node indices of the GPUs; a rank is a position in here."""
        return tuple(i for i, node in enumerate(self.nodes) if node.kind is NodeKind.GPU)

    @cached_property
    def hosts(self) -> tuple[int, ...]:
        """The hosts that have a GPU, ascending."""
        return tuple(sorted({self.nodes[gpu].host for gpu in self.gpus}))

    @cached_property
    def links_from(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the links that leave each node, in the order of their far ends."""
        out: list[list[int]] = [[] for _ in self.nodes]
        for (src, _), i in sorted(self.index.items()):
            out[src].append(i)
        return tuple(tuple(links) for links in out)

    def gpu_name(self, rank: int) -> str:
        """The name of a rank's GPU."""
        return self.nodes[self.gpus[rank]].name

    def link_name(self, link_idx: int) -> str:
        """Such as "gpu0 -> nvswitch"."""
        link = self.links[link_idx]
        return f"{self.nodes[link.src].name} -> {self.nodes[link.dst].name}"

    def subset(self, ranks: Iterable[int]) -> Topology:
        """The same machine with some of its GPUs, renumbered in ascending order.

        The other GPUs are taken out: nothing is routed through them.

        Raises:
            ValueError: a rank that is not there or there twice, or GPUs that are cut off.
        """
        chosen = list(ranks)
        if len(set(chosen)) != len(chosen):
            raise ValueError(f"a rank is named twice in {chosen}")
        for rank in chosen:
            if not 0 <= rank < len(self.gpus):
                raise ValueError(f"rank {rank} is not one of the {len(self.gpus)} GPUs")
        gone = set(self.gpus) - {self.gpus[rank] for rank in chosen}
        kept = [i for i in range(len(self.nodes)) if i not in gone]
        new = {old: i for i, old in enumerate(kept)}
        links = (
            Link(new[k.src], new[k.dst], k.kind, k.num_lanes, k.lane_gb_per_s, k.efficiency)
            for k in self.links
            if k.src in new and k.dst in new
        )
        return Topology(
            f"{self.name}, GPUs {','.join(map(str, sorted(chosen)))}",
            tuple(self.nodes[i] for i in kept),
            tuple(links),
        )


def _reachable(start: int, pairs: Iterable[tuple[int, int]]) -> set[int]:
    neighbours: dict[int, list[int]] = {}
    for a, b in pairs:
        neighbours.setdefault(a, []).append(b)
    seen, queue = {start}, [start]
    while queue:
        new = [b for b in neighbours.get(queue.pop(), []) if b not in seen]
        seen.update(new)
        queue += new
    return seen


class Builder:
    """Collects nodes and cables, then makes a `Topology`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._nodes: list[Node] = []
        self._links: list[Link] = []

    def add(self, name: str, kind: NodeKind, host: int = 0) -> int:
        """Adds a node and returns its index."""
        self._nodes.append(Node(name, kind, host))
        return len(self._nodes) - 1

    def add_gpus(self, count: int, host: int = 0, prefix: str = "") -> list[int]:
        """Adds GPUs named gpu0, gpu1 and so on, and returns their indices."""
        return [self.add(f"{prefix}gpu{i}", NodeKind.GPU, host) for i in range(count)]

    def connect(
        self,
        a: int,
        b: int,
        kind: LinkKind,
        lane_gb_per_s: float,
        *,
        num_lanes: int = 1,
        efficiency: float = 1.0,
    ) -> None:
        """Adds a cable: a link in each direction."""
        for src, dst in ((a, b), (b, a)):
            self._links.append(Link(src, dst, kind, num_lanes, lane_gb_per_s, efficiency))

    def connect_one_way(self, link: Link) -> None:
        """Adds a single link."""
        self._links.append(link)

    def build(self) -> Topology:
        """Returns the topology. Raises ValueError as `Topology` does."""
        return Topology(self.name, tuple(self._nodes), tuple(self._links))


def host_ranks(topology: Topology, host: int) -> Sequence[int]:
    """The ranks of a host, ascending."""
    return [r for r, gpu in enumerate(topology.gpus) if topology.nodes[gpu].host == host]
