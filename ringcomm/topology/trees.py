"""Ring orders on trees: PCIe hierarchies, and the star of an NVSwitch.

Walk around a tree in depth-first order and write down the GPUs as they come: between two of them
the walk takes the one path there is, and in total it passes each link once down and once up. So one
ring loads every link once per direction. No ring can do with less, since on both sides of every
link there are GPUs: on a tree this order is the best there is, for any bandwidths.
"""

from __future__ import annotations

from collections.abc import Iterable

from ringcomm.topology.graph import LinkKind, NodeKind, Topology

__all__ = ["Tree", "find_tree", "spanning_tree", "tree_order", "tree_path"]

# Neighbours of each node that is part of the tree.
Tree = dict[int, list[int]]


def find_tree(topology: Topology, ranks: Iterable[int], kinds: Iterable[LinkKind]) -> Tree | None:
    """The links of these kinds around some GPUs, if they are a tree with those GPUs as leaves.

    Branches without a GPU are cut off first: NICs, and sockets that nothing hangs at.

    Args:
        topology: the graph.
        ranks: the GPUs, at least one; links to others are left out.
        kinds: of the links to look at.

    Returns:
        The tree, or None if there is a circle, a one-way link, a GPU between others, or a GPU that
        these links do not reach.
    """
    gpus = {topology.gpus[rank] for rank in ranks}
    others = set(topology.gpus) - gpus
    allowed = frozenset(kinds)
    pairs = {
        (k.src, k.dst)
        for k in topology.links
        if k.kind in allowed and k.src not in others and k.dst not in others
    }
    if any((b, a) not in pairs for a, b in pairs):
        return None
    tree = _component(min(gpus), pairs)
    _cut_bare_branches(tree, gpus)
    num_cables = sum(map(len, tree.values())) // 2
    if not gpus <= set(tree) or num_cables != len(tree) - 1:
        return None
    if any(len(tree[gpu]) > 1 for gpu in gpus) and len(gpus) > 2:
        return None
    return tree


def _component(start: int, pairs: set[tuple[int, int]]) -> Tree:
    neighbours: Tree = {}
    for a, b in sorted(pairs):
        neighbours.setdefault(a, []).append(b)
    tree: Tree = {}
    queue = [start]
    while queue:
        node = queue.pop()
        if node not in tree:
            tree[node] = neighbours.get(node, [])
            queue += tree[node]
    return tree


def _cut_bare_branches(tree: Tree, gpus: set[int]) -> None:
    bare = [node for node, near in tree.items() if len(near) < 2 and node not in gpus]
    while bare:
        node = bare.pop()
        for other in tree.pop(node):
            tree[other] = [n for n in tree[other] if n != node]
            if len(tree[other]) < 2 and other not in gpus and other in tree and other not in bare:
                bare.append(other)


def spanning_tree(topology: Topology) -> Tree:
    """The widest spanning tree over all nodes (Prim): its narrowest cable is as wide as can be.

    Args:
        topology: connected, as every topology is. One-way links are left out.

    Raises:
        ValueError: some GPU cannot be reached over cables that work both ways.
    """

    def width(a: int, b: int) -> float:
        return min(topology.links[topology.index[p]].gb_per_s for p in ((a, b), (b, a)))

    root = topology.gpus[0]
    tree: Tree = {root: []}
    best: dict[int, tuple[float, int, int]] = {}

    def offer(a: int) -> None:
        for i in topology.links_from[a]:
            b = topology.links[i].dst
            if b not in tree and (b, a) in topology.index:
                best[b] = min(best.get(b, (0.0, b, a)), (-width(a, b), b, a))

    offer(root)
    while best:
        _, node, parent = min(best.values())
        del best[node]
        tree[node] = [parent]
        tree[parent].append(node)
        offer(node)
    cut_off = [topology.nodes[gpu].name for gpu in topology.gpus if gpu not in tree]
    if cut_off:
        raise ValueError(
            f"no ring: {topology.gpu_name(0)} and {', '.join(cut_off)} are joined by one-way links "
            "only, and no circle over them was found"
        )
    _cut_bare_branches(tree, set(topology.gpus))
    for near in tree.values():
        near.sort()
    return tree


def tree_order(topology: Topology, tree: Tree, start: int, end: int | None = None) -> list[int]:
    """The ranks of a tree's GPUs in depth-first order.

    Args:
        topology: the graph.
        tree: from `find_tree` or `spanning_tree`.
        start: node of the first GPU.
        end: node of the last GPU, a leaf; None leaves it to the order of the nodes.

    Returns:
        Ranks. With `end`, the walk goes down the branches towards it last.
    """
    rank_of = {gpu: rank for rank, gpu in enumerate(topology.gpus)}
    towards_end = set(tree_path(tree, start, end)) if end is not None else set()

    def link_kind(a: int, b: int) -> int:
        return topology.links[topology.index[a, b]].kind

    order: list[int] = []
    stack = [(start, -1)]
    while stack:
        node, parent = stack.pop()
        if topology.nodes[node].kind is NodeKind.GPU:
            order.append(rank_of[node])
        children = [n for n in tree[node] if n != parent]
        # All that is below one root complex comes before the other socket.
        keys = [(n in towards_end, link_kind(node, n), n) for n in children]
        stack += [(child, node) for *_, child in sorted(keys, reverse=True)]
    return order


def tree_path(tree: Tree, src: int, dst: int) -> list[int]:
    """The nodes between two nodes of a tree, both included."""
    parent = {src: src}
    queue = [src]
    while dst not in parent:
        node = queue.pop()
        for other in tree[node]:
            if other not in parent:
                parent[other] = node
                queue.append(other)
    path = [dst]
    while path[-1] != src:
        path.append(parent[path[-1]])
    return path[::-1]
