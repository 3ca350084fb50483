"""Paths between GPUs: which links a hop of a ring uses.

A path is as good as its worst link, then as short as can be. It does not pass through another GPU
unless that is asked for, since no GPU forwards by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ringcomm.topology.graph import ALL_KINDS, LinkKind, NodeKind, Topology

__all__ = ["Route", "best_route", "best_routes_from", "find_path", "route_kind"]

# Indices of links, each starting where the one before ends.
Route = tuple[int, ...]


def find_path(
    topology: Topology,
    src: int,
    dst: int,
    kinds: Iterable[LinkKind] = ALL_KINDS,
    *,
    may_pass: Callable[[int], bool] | None = None,
) -> Route | None:
    """The shortest path between two nodes over links of these kinds, or None.

    Args:
        topology: the graph.
        src: node index.
        dst: node index.
        kinds: of the links that may be used.
        may_pass: tells of a node whether a path may pass through it; None lets it pass through
            everything but GPUs.

    Returns:
        The links. Among equals, the path whose nodes have smaller indices.
    """
    came_by = _search(topology, src, kinds, may_pass, dst)
    return _trace(topology, came_by, src, dst) if dst in came_by else None


def _search(
    topology: Topology,
    src: int,
    kinds: Iterable[LinkKind],
    may_pass: Callable[[int], bool] | None,
    dst: int = -1,
) -> dict[int, int]:
    """The link by which a breadth-first search first comes to each node, until it comes to dst."""
    allowed = frozenset(kinds)
    passes = may_pass or (lambda node: topology.nodes[node].kind is not NodeKind.GPU)
    came_by: dict[int, int] = {src: -1}
    layer = [src]
    while layer and dst not in came_by:
        following: list[int] = []
        for node in layer:
            for i in topology.links_from[node]:
                link = topology.links[i]
                if link.kind in allowed and link.dst not in came_by:
                    came_by[link.dst] = i
                    if passes(link.dst):
                        following.append(link.dst)
        layer = following
    return came_by


def _trace(topology: Topology, came_by: dict[int, int], src: int, dst: int) -> Route:
    links: list[int] = []
    node = dst
    while node != src:
        links.append(came_by[node])
        node = topology.links[came_by[node]].src
    return tuple(reversed(links))


def best_route(
    topology: Topology, src_rank: int, dst_rank: int, kinds: Iterable[LinkKind] = ALL_KINDS
) -> Route | None:
    """The path between two ranks whose worst link is best, then the shortest, or None."""
    return _routes_from(topology, src_rank, kinds).get(dst_rank)


def best_routes_from(topology: Topology, src_rank: int) -> dict[int, Route]:
    """The best path to every other rank, through other GPUs where there is no other way."""
    routes = _routes_from(topology, src_rank, ALL_KINDS)
    src = topology.gpus[src_rank]
    forwarding = _search(topology, src, ALL_KINDS, lambda _: True)
    for rank, gpu in enumerate(topology.gpus):
        if rank != src_rank and rank not in routes:
            routes[rank] = _trace(topology, forwarding, src, gpu)
    return routes


def _routes_from(topology: Topology, src_rank: int, kinds: Iterable[LinkKind]) -> dict[int, Route]:
    src = topology.gpus[src_rank]
    routes: dict[int, Route] = {}
    allowed = sorted(kinds)
    for i in range(len(allowed)):
        came_by = _search(topology, src, allowed[: i + 1], None)
        for rank, gpu in enumerate(topology.gpus):
            if rank != src_rank and rank not in routes and gpu in came_by:
                routes[rank] = _trace(topology, came_by, src, gpu)
    return routes


def route_kind(topology: Topology, route: Route) -> LinkKind:
    """The kind of a route's worst link."""
    return max(topology.links[i].kind for i in route)
