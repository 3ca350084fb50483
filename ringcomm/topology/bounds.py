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
    # It comes with torch. Imported here, it costs nothing to those who only want a topology.
    import networkx
    from networkx.algorithms.flow import build_residual_network, edmonds_karp

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
    # Cables carry as much one way as the other, and then so do cuts.
    is_symmetric = all(graph.get_edge_data(b, a) == data for a, b, data in graph.edges(data=True))
    residual = build_residual_network(graph, "capacity")
    first, *others = topology.gpus
    for other in others:
        for a, b in ((first, other),) if is_symmetric else ((first, other), (other, first)):
            if bound == 0:
                return 0
            # The cutoff ends the flow once it cannot lower the bound any more.
            flow = edmonds_karp(graph, a, b, residual=residual, cutoff=bound)
            bound = min(bound, int(flow.graph["flow_value"]))
    return bound
