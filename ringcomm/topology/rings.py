"""The search for ring orders and channels, on whatever machine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from ringcomm.topology.bounds import channel_bound
from ringcomm.topology.graph import ALL_KINDS, LinkKind, Topology
from ringcomm.topology.hosts import has_nics, host_channels
from ringcomm.topology.mesh import pack_rings
from ringcomm.topology.plan import Channel, RingPlan
from ringcomm.topology.trees import Tree, find_tree, spanning_tree, tree_order, tree_path

__all__ = ["STEP_BUDGET", "find_rings"]

# Below half a second of search, and more than wirings need that are sold: the 8 GPUs of a cube mesh
# take some ten steps. With a smaller one a plan may have fewer channels; it never becomes wrong.
STEP_BUDGET = 100_000
# Rates tried at most when the links have many different ones.
MAX_RATES = 12
# As in NCCL: a channel is a thread block, and costs buffers.
MAX_CHANNELS = 64

# The best links that join all GPUs are used, and no others beside them.
KIND_SETS = (
    frozenset({LinkKind.NVLINK}),
    frozenset({LinkKind.PCIE, LinkKind.SOCKET}),
    ALL_KINDS,
)


def find_rings(
    topology: Topology,
    *,
    channel_gb_per_s: float | None = None,
    max_channels: int = MAX_CHANNELS,
    step_budget: int = STEP_BUDGET,
) -> RingPlan:
    """Finds rings over all GPUs that share no lane, as many as the links allow.

    A tree of links (PCIe, the star of an NVSwitch) is walked around, which is best possible. A mesh
    is searched with backtracking. Hosts are joined through their NICs in turn. Where none of these
    gives a ring, one ring goes around the widest spanning tree, through other GPUs if need be. The
    result depends on nothing but the arguments.

    Args:
        topology: two GPUs at least.
        channel_gb_per_s: line rate of a channel. None takes the lane rate, of those that occur,
            which gives the most bandwidth; half a lane's rate lets two channels share a lane.
        max_channels: take no more, even where the links have room.
        step_budget: limit of the search in a mesh.

    Returns:
        The plan, which `check_plan` finds correct.

    Raises:
        ValueError: fewer than two GPUs, an argument that is not positive, a rate that no ring can
            have, or one-way links without a ring.
    """
    if len(topology.gpus) < 2:
        raise ValueError(f"a ring needs two GPUs at least, {topology.name!r} has one")
    if channel_gb_per_s is not None and not 0 < channel_gb_per_s < math.inf:
        raise ValueError(f"channel_gb_per_s must be positive, got {channel_gb_per_s}")
    for name, value in (("max_channels", max_channels), ("step_budget", step_budget)):
        if value < 1:
            raise ValueError(f"{name} must be positive, got {value}")
    kind_sets = (ALL_KINDS,) if has_nics(topology) else KIND_SETS
    search = _Search(topology, channel_gb_per_s, max_channels, step_budget)
    for kinds in kind_sets:
        plan = _best_plan(search, kinds)
        if plan is not None:
            return plan
    return _around_spanning_tree(search)


@dataclass(frozen=True)
class _Search:
    """The arguments of `find_rings`."""

    topology: Topology
    rate: float | None
    max_channels: int
    step_budget: int


def _best_plan(search: _Search, kinds: frozenset[LinkKind]) -> RingPlan | None:
    """The plan with the most bandwidth over links of these kinds; the fewest channels of equals."""
    lane_rates = (k.lane_gb_per_s for k in search.topology.links if k.kind in kinds)
    rates = [search.rate] if search.rate is not None else _some_of(lane_rates)
    bounds = [(channel_bound(search.topology, rate, kinds), rate) for rate in rates]
    bounds = sorted((b for b in bounds if b[0] > 0), key=lambda b: (-b[0] * b[1], b[0]))
    best: RingPlan | None = None
    for bound, rate in bounds:
        # No rate below can reach what is there.
        if best is not None and bound * rate <= best.gb_per_s:
            break
        steps = max(1, search.step_budget // len(bounds))
        plan = _plan(replace(search, rate=rate, step_budget=steps), kinds, rate, bound)
        if plan is not None and (best is None or plan.gb_per_s > best.gb_per_s):
            best = plan
    return best


def _some_of(rates: Iterable[float]) -> list[float]:
    """The different rates, or evenly chosen ones where they are many."""
    different = sorted(set(rates))
    if len(different) <= MAX_RATES:
        return different
    last = len(different) - 1
    return [different[i * last // (MAX_RATES - 1)] for i in range(MAX_RATES)]


def _plan(search: _Search, kinds: frozenset[LinkKind], rate: float, bound: int) -> RingPlan | None:
    topology, target = search.topology, min(bound, search.max_channels)
    is_maximum = False
    if has_nics(topology):
        method = "hosts joined by their NICs in turn"
        channels = host_channels(topology, rate, target)
    elif tree := find_tree(topology, range(len(topology.gpus)), kinds):
        method = "walk around the tree of links"
        channels = _around_tree(topology, tree, rate, target)
    else:
        method = "search in the mesh"
        packing = pack_rings(_direct_lanes(topology, kinds, rate), target, search.step_budget)
        is_maximum = packing.is_maximum
        channels = [_direct_channel(topology, ring) for ring in packing.rings]
    if not channels:
        return None
    is_maximum = is_maximum or len(channels) == target
    return RingPlan(topology, tuple(channels), rate, kinds, bound, is_maximum, method)


def _direct_lanes(topology: Topology, kinds: frozenset[LinkKind], rate: float) -> list[list[int]]:
    def lanes(a: int, b: int) -> int:
        link_idx = topology.index.get((a, b))
        if link_idx is None or topology.links[link_idx].kind not in kinds:
            return 0
        return topology.links[link_idx].num_channels(rate)

    return [[lanes(a, b) for b in topology.gpus] for a in topology.gpus]


def _direct_channel(topology: Topology, ring: tuple[int, ...]) -> Channel:
    nodes = [topology.gpus[rank] for rank in (*ring, ring[0])]
    return Channel(ring, tuple((topology.index[pair],) for pair in pairwise(nodes)))


def _around_tree(topology: Topology, tree: Tree, rate: float, max_channels: int) -> list[Channel]:
    """As many times the same ring as the narrowest link of a tree holds."""
    order = tree_order(topology, tree, topology.gpus[0])
    hops = []
    for a, b in pairwise((*order, order[0])):
        path = tree_path(tree, topology.gpus[a], topology.gpus[b])
        hops.append(tuple(topology.index[pair] for pair in pairwise(path)))
    num_channels = min(topology.links[i].num_channels(rate) for hop in hops for i in hop)
    return [Channel(tuple(order), tuple(hops))] * min(num_channels, max_channels)


def _around_spanning_tree(search: _Search) -> RingPlan:
    """The fallback: every connected topology of two-way links has this ring."""
    topology = search.topology
    tree = spanning_tree(topology)
    widest = min(
        topology.links[topology.index[a, b]].gb_per_s for a, near in tree.items() for b in near
    )
    rate = search.rate or widest
    channels = tuple(_around_tree(topology, tree, rate, search.max_channels))
    if not channels:
        raise ValueError(
            f"no ring of {rate:g} GB/s on {topology.name!r}: the widest there is has {widest:g}"
        )
    bound = channel_bound(topology, rate, ALL_KINDS)
    is_maximum = len(channels) == min(bound, search.max_channels)
    method = "walk around the widest spanning tree"
    return RingPlan(topology, channels, rate, ALL_KINDS, bound, is_maximum, method)
