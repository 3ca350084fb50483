"""What each all_reduce algorithm sends over which links: bytes per link, and steps of latency.

N ranks, a buffer of S bytes on each. A phase is a set of transfers that run together; phases follow
one another. Ring, tree and the rest are written for S = 1, since every byte count is a multiple.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from ringcomm.topology.graph import LinkKind, Topology, host_ranks
from ringcomm.topology.plan import RingPlan
from ringcomm.topology.rings import find_rings
from ringcomm.topology.routes import Route, best_routes_from, route_kind

__all__ = ["ALGORITHMS", "Phase", "phases_of"]


@dataclass
class Phase:
    """Transfers that run together.

    Attributes:
        share: per link, what it carries as a share of S.
        steps: kinds of the hops that follow one another on the longest chain of messages.
    """

    share: dict[int, float] = field(default_factory=dict)
    steps: dict[LinkKind, int] = field(default_factory=dict)

    def send(self, route: Route, share: float) -> None:
        """Adds a transfer."""
        for i in route:
            self.share[i] = self.share.get(i, 0.0) + share

    def step(self, kind: LinkKind, count: int = 1) -> None:
        """Adds hops to the longest chain."""
        self.steps[kind] = self.steps.get(kind, 0) + count


def ring(plan: RingPlan) -> list[Phase]:
    """Every channel moves its part of the buffer 2(N-1)/N times over each of its hops.

    A message passes 2(N-1) hops, two fewer than twice around; the dearest such chain counts.
    """
    topology = plan.topology
    num_ranks = len(topology.gpus)
    phase = Phase()
    for channel in plan.channels:
        for hop in channel.hops:
            phase.send(hop, 2 * (num_ranks - 1) / num_ranks / len(plan.channels))
    kinds = [route_kind(topology, hop) for hop in plan.channels[0].hops]
    start = min(range(num_ranks), key=lambda i: (kinds[i - 1] + kinds[i], i))
    for i in range(2 * (num_ranks - 1)):
        phase.step(kinds[(start + 1 + i) % num_ranks])
    return [phase]


def one_shot(plan: RingPlan) -> list[Phase]:
    """Every rank sends its whole buffer to every other, which reduces all of them."""
    return [_all_to_all(plan.topology, 1.0)]


def two_shot(plan: RingPlan) -> list[Phase]:
    """Every rank sends each other the part that one owns, and then all the part that it owns."""
    return [_all_to_all(plan.topology, 1 / len(plan.topology.gpus))] * 2


def _all_to_all(topology: Topology, share: float) -> Phase:
    phase = Phase()
    routes = [
        r for src in range(len(topology.gpus)) for r in best_routes_from(topology, src).values()
    ]
    for route in routes:
        phase.send(route, share)
    phase.step(max(route_kind(topology, route) for route in routes))
    return phase


def tree(plan: RingPlan) -> list[Phase]:
    """Sums go up a tree and results come down it, pipelined; each channel has a tree of its own.

    As in NCCL: inside a host the ranks are a chain in the channel's order, and the first ones of
    the hosts are a binary tree. Over three hosts and more there is a second tree that numbers the
    hosts backwards, with half of the channel's part each: a leaf of one is an inner node of the
    other (Sanders, Speck, Traeff: Two-tree algorithms for full bandwidth broadcast, 2009).
    """
    topology = plan.topology
    routes = [best_routes_from(topology, rank) for rank in range(len(topology.gpus))]
    phase = Phase()

    def join(child: int, parent: int, share: float) -> None:
        phase.send(routes[child][parent], share)
        phase.send(routes[parent][child], share)

    share = 1 / len(plan.channels)
    for channel in plan.channels:
        chains = _chains(topology, channel.order)
        for before, after in (pair for chain in chains for pair in pairwise(chain)):
            join(after, before, share)
        roots = [chain[0] for chain in chains]
        for i in range(1, len(roots)):
            for hosts in (roots, roots[::-1]):
                join(hosts[i], hosts[(i - 1) // 2], share / 2)
    chains = _chains(topology, plan.channels[0].order)
    longest: list[int] = max(chains, key=len)
    for a, b in pairwise(longest):
        phase.step(route_kind(topology, routes[a][b]), 2)
    phase.step(LinkKind.NETWORK, 2 * (len(chains).bit_length() - 1))
    return [phase]


def _chains(topology: Topology, order: tuple[int, ...]) -> list[list[int]]:
    """The ranks of each host as a ring visits them."""
    hosts = {rank: topology.nodes[topology.gpus[rank]].host for rank in order}
    return [[rank for rank in order if hosts[rank] == host] for host in topology.hosts]


def hierarchical(plan: RingPlan) -> list[Phase]:
    """Reduce-scatter in each host, all-reduce of each shard between hosts, all-gather in each host.

    The rank with place p of its host exchanges its shard with place p of the others, in a ring.

    Raises:
        ValueError: hosts of different sizes, or only one.
    """
    topology = plan.topology
    groups = [list(host_ranks(topology, host)) for host in topology.hosts]
    sizes = {len(group) for group in groups}
    if len(groups) < 2 or len(sizes) > 1:
        raise ValueError(
            "the hierarchical algorithm needs several hosts of the same size, got "
            f"{[len(group) for group in groups]} GPUs per host"
        )
    size, num_hosts = sizes.pop(), len(groups)
    inside = Phase()
    if size > 1:
        for group in groups:
            part = topology.subset(group)
            part_plan = find_rings(part)
            (both_ways,) = ring(part_plan)
            # Half of an all_reduce, on links named by the subset's numbers.
            for i, share in both_ways.share.items():
                inside.send((_link_of(topology, part, i),), share / 2)
            steps = {kind: count // 2 for kind, count in both_ways.steps.items()}
            if sum(steps.values()) > sum(inside.steps.values()):
                inside.steps = steps
    between = Phase()
    for place in range(size):
        for a, b in zip(groups, groups[1:] + groups[:1], strict=True):
            route = best_routes_from(topology, a[place])[b[place]]
            between.send(route, 2 * (num_hosts - 1) / num_hosts / size)
    between.step(LinkKind.NETWORK, 2 * (num_hosts - 1))
    return [inside, between, inside] if size > 1 else [between]


def _link_of(topology: Topology, part: Topology, link_idx: int) -> int:
    """The link of a machine that a part of it calls `link_idx`."""
    names = {node.name: i for i, node in enumerate(topology.nodes)}
    link = part.links[link_idx]
    ends = (names[part.nodes[link.src].name], names[part.nodes[link.dst].name])
    return topology.index[ends]


ALGORITHMS: dict[str, Callable[[RingPlan], list[Phase]]] = {
    "ring": ring,
    "tree": tree,
    "one_shot": one_shot,
    "two_shot": two_shot,
    "hierarchical": hierarchical,
}


def phases_of(plan: RingPlan, algorithm: str) -> list[Phase]:
    """The phases of an algorithm.

    Raises:
        ValueError: unknown algorithm, or one that does not fit the hosts.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {sorted(ALGORITHMS)}, got {algorithm!r}")
    return ALGORITHMS[algorithm](plan)
