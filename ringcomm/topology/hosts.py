"""Rings over several hosts: each enters and leaves every host once, through NICs in turn.

Channel c enters host 0 through NIC c and leaves it through NIC c + 1, arrives at NIC c + 1 of host
1, leaves through NIC c, and so on. So over all channels every NIC receives once and sends once, and
traffic stays on its rail: NIC i only ever talks to NIC i, which is what fabrics with a leaf switch
per rail are good at. Inside a host the ring goes from a GPU beside the first NIC to one beside the
second over the best links that are free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise

from ringcomm.topology.graph import LinkKind, NodeKind, Topology, host_ranks
from ringcomm.topology.mesh import PathSearch
from ringcomm.topology.plan import Channel
from ringcomm.topology.routes import Route, find_path
from ringcomm.topology.trees import Tree, find_tree, tree_order

__all__ = ["has_nics", "host_channels"]

PCIE_KINDS = (LinkKind.PCIE, LinkKind.SOCKET)
# Entry and exit GPUs that are tried per NIC. Only where lanes are short does the first not do.
MAX_GPUS_PER_NIC = 4
# Steps of the search for one way through a host; what is not found in these is left out.
PATH_STEPS = 2000


@dataclass(frozen=True)
class _Port:
    """A NIC and the ranks of its host with their ways to it, nearest first."""

    nic: int
    to_nic: tuple[tuple[int, Route], ...]
    from_nic: dict[int, Route]


@dataclass(frozen=True)
class _Stay:
    """What a channel does in one host."""

    order: tuple[int, ...]
    hops: tuple[Route, ...]
    arrival: Route
    departure: Route


def has_nics(topology: Topology) -> bool:
    """Whether there are several hosts that are joined by NICs."""
    return len(topology.hosts) > 1 and any(n.kind is NodeKind.NIC for n in topology.nodes)


def _find_ports(topology: Topology, host: int) -> list[_Port]:
    """The NICs that are nearest to some GPU of a host; NICs of absent GPUs are left alone."""
    ranks = host_ranks(topology, host)
    nics = [i for i, n in enumerate(topology.nodes) if n.kind is NodeKind.NIC and n.host == host]
    ways = {
        (nic, rank): route
        for rank in ranks
        for nic in nics
        if (route := find_path(topology, topology.gpus[rank], nic, PCIE_KINDS)) is not None
    }
    shortest = {
        rank: min((len(way) for (_, r), way in ways.items() if r == rank), default=0)
        for rank in ranks
    }
    ports = []
    for nic in nics:
        here = {rank: way for (n, rank), way in ways.items() if n == nic}
        if not any(len(way) == shortest[rank] for rank, way in here.items()):
            continue
        back = {rank: find_path(topology, nic, topology.gpus[rank], PCIE_KINDS) for rank in here}
        from_nic = {rank: route for rank, route in back.items() if route is not None}
        near = sorted(from_nic, key=lambda rank: (len(here[rank]), rank))
        to_nic = tuple((rank, here[rank]) for rank in near[:MAX_GPUS_PER_NIC])
        ports.append(_Port(nic, to_nic, from_nic))
    return ports


class _Search:
    """Takes channel after channel out of what the links can carry."""

    def __init__(self, topology: Topology, channel_gb_per_s: float) -> None:
        self.topology = topology
        self.free = [link.num_channels(channel_gb_per_s) for link in topology.links]
        self.ports = {host: _find_ports(topology, host) for host in topology.hosts}
        self.num_uses: Counter[tuple[int, bool]] = Counter()
        self.find_path = cache(partial(find_path, topology))
        self.trees: dict[tuple[int, bool], Tree | None] = {
            (host, over_nvlink): find_tree(
                topology,
                host_ranks(topology, host),
                (LinkKind.NVLINK,) if over_nvlink else PCIE_KINDS,
            )
            for host in topology.hosts
            for over_nvlink in (True, False)
        }

    def _fits(self, routes: list[Route]) -> bool:
        uses = Counter(i for route in routes for i in route)
        return all(self.free[i] >= count for i, count in uses.items())

    def channel(self, idx: int) -> Channel | None:
        """The channel that enters host 0 through its NIC number `idx`, if there is room for it."""
        hosts = self.topology.hosts
        nic_idxs = _nic_indices(idx, len(hosts), min(map(len, self.ports.values())))
        stays: list[_Stay] = []
        crossings: list[Route] = []
        for i, host in enumerate(hosts):
            entry = self.ports[host][nic_idxs[i]]
            leave = self.ports[host][nic_idxs[i + 1]]
            arrive = self.ports[hosts[(i + 1) % len(hosts)]][nic_idxs[i + 1]]
            stay = next(self._stays(host, entry, leave), None)
            crossing = self.find_path(leave.nic, arrive.nic, (LinkKind.NETWORK,))
            if stay is None or crossing is None:
                return None
            stays.append(stay)
            crossings.append(crossing)
        hops: list[Route] = []
        for i, stay in enumerate(stays):
            following = stays[(i + 1) % len(stays)]
            hops += [*stay.hops, stay.departure + crossings[i] + following.arrival]
        if not self._fits(hops):
            return None
        for i in (i for hop in hops for i in hop):
            self.free[i] -= 1
        for stay in stays:
            self.num_uses[stay.order[0], True] += 1
            self.num_uses[stay.order[-1], False] += 1
        return Channel(tuple(rank for stay in stays for rank in stay.order), tuple(hops))

    def _stays(self, host: int, entry: _Port, leave: _Port) -> Iterator[_Stay]:
        """Ways from one NIC to another through all GPUs of a host, for which there is room."""
        is_single = len(host_ranks(self.topology, host)) == 1
        pairs = []
        for first, _ in entry.to_nic:
            for last, departure in leave.to_nic:
                if first != last or is_single:
                    num_links = len(entry.from_nic[first]) + len(departure)
                    num_uses = self.num_uses[first, True] + self.num_uses[last, False]
                    pairs.append((num_links, num_uses, first, last, departure))
        for _, _, first, last, departure in sorted(pairs):
            arrival = entry.from_nic[first]
            for order, hops in self._walks(host, first, last):
                if self._fits([arrival, departure, *hops]):
                    yield _Stay(order, hops, arrival, departure)

    def _walks(
        self, host: int, first: int, last: int
    ) -> Iterator[tuple[tuple[int, ...], tuple[Route, ...]]]:
        """Orders of a host's ranks between two of them, over NVLink and then over PCIe."""
        ranks = host_ranks(self.topology, host)
        if len(ranks) == 1:
            yield (first,), ()
            return
        gpus = self.topology.gpus
        for over_nvlink in (True, False):
            kinds = (LinkKind.NVLINK,) if over_nvlink else PCIE_KINDS
            tree = self.trees[host, over_nvlink]
            order: tuple[int, ...] | None = None
            if tree is not None:
                order = tuple(tree_order(self.topology, tree, gpus[first], gpus[last]))
            elif over_nvlink:
                order = self._mesh_walk(ranks, first, last)
            if order is None:
                continue
            hops = [self.find_path(gpus[a], gpus[b], kinds) for a, b in pairwise(order)]
            yield order, tuple(hop for hop in hops if hop is not None)

    def _mesh_walk(self, ranks: Sequence[int], first: int, last: int) -> tuple[int, ...] | None:
        lanes = [[self._free_nvlink(a, b) for b in ranks] for a in ranks]
        search = PathSearch(lanes, PATH_STEPS)
        walk = next(search.paths(ranks.index(first), ranks.index(last)), None)
        return None if walk is None else tuple(ranks[i] for i in walk)

    def _free_nvlink(self, a: int, b: int) -> int:
        i = self.topology.index.get((self.topology.gpus[a], self.topology.gpus[b]))
        is_nvlink = i is not None and self.topology.links[i].kind is LinkKind.NVLINK
        return self.free[i] if i is not None and is_nvlink else 0


def _nic_indices(idx: int, num_hosts: int, num_nics: int) -> list[int]:
    """Which NIC a channel uses before each host, and after the last.

    It alternates between two; with an odd number of hosts the last entry takes a third, if any.
    """
    steps = [host % 2 for host in range(num_hosts)]
    if num_hosts % 2 and num_nics > 2:
        steps[-1] = 2
    return [(idx + step) % num_nics for step in (*steps, 0)]


def host_channels(topology: Topology, channel_gb_per_s: float, max_channels: int) -> list[Channel]:
    """Finds rings over hosts that are joined by NICs.

    Args:
        topology: `has_nics` is true of it.
        channel_gb_per_s: line rate of a channel.
        max_channels: stop at so many.

    Returns:
        Channels, round-robin over the NICs until no further one fits. Empty if a host has no NIC
        beside a GPU, or if no way through some host was found.
    """
    search = _Search(topology, channel_gb_per_s)
    num_nics = min(map(len, search.ports.values()))
    channels: list[Channel] = []
    has_room = num_nics > 0
    while has_room and len(channels) < max_channels:
        found = [c for idx in range(num_nics) if (c := search.channel(idx)) is not None]
        channels += found
        has_room = bool(found)
    return channels[:max_channels]
