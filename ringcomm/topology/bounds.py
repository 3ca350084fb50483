"""How many channels there can be at most."""

from __future__ import annotations

from collections.abc import Iterable

from ringcomm.topology.graph import LinkKind, Topology

__all__ = ["channel_bound"]


def channel_bound(topology: Topology, channel_gb_per_s: float, kinds: Iterable[LinkKind]) -> int:
    """An upper bound on the number of rings that share no lane, by max-flow min-cut.

    A ring goes from rank 0 to every other rank and back. So k rings that share no lane are k paths
    in each direction, and the smallest cut between rank 0 and any rank limits k. The cut around
    a single GPU is its degree; cuts around switches, sockets and hosts are among them as well.

    Args:
        topology: at least two GPUs.
        channel_gb_per_s: line rate of a channel; a link carries as many as fit.
        kinds: of the links that may be used.

    Returns:
        The bound; 0 if these links do not connect all GPUs.
    """
    import networkx  # comes with torch; imported here to keep `import ringcomm.topology` quick

    allowed = frozenset(kinds)
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(len(topology.nodes)))
    for link in topology.links:
        if link.kind in allowed and link.num_channels(channel_gb_per_s):
            graph.add_edge(link.src, link.dst, capacity=link.num_channels(channel_gb_per_s))
    bound = min(
        min(graph.out_degree(gpu, weight="capacity"), graph.in_degree(gpu, weight="capacity"))
        for gpu in topology.gpus
    )
    first, *others = topology.gpus
    for other in others:
        for a, b in ((first, other), (other, first)):
            if bound == 0:
                return 0
            # The cutoff ends the flow once it cannot lower the bound any more.
            flow = networkx.algorithms.flow.edmonds_karp(graph, a, b, cutoff=bound)
            bound = min(bound, int(flow.graph["flow_value"]))
    return bound
