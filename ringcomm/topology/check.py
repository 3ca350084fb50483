"""Whether rings are what they claim to be. Shares no code with the search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ringcomm.topology.graph import ALL_KINDS, LinkKind, Topology
from ringcomm.topology.plan import Channel, RingPlan
from ringcomm.topology.routes import best_route

__all__ = ["check_channels", "check_orders", "check_plan"]


def check_plan(plan: RingPlan) -> list[str]:
    """What is wrong with a plan, in words; empty if nothing is."""
    problems = check_channels(plan.topology, plan.channels, plan.channel_gb_per_s)
    if not plan.channels:
        problems.append("the plan has no channel")
    if len(plan.channels) > plan.bound:
        problems.append(f"{len(plan.channels)} channels, but the bound is {plan.bound}")
    used = {plan.topology.links[i].kind for c in plan.channels for hop in c.hops for i in hop}
    problems += [f"uses {kind.label}, which it says it does not" for kind in used - plan.kinds]
    return problems


def check_orders(
    topology: Topology,
    orders: Iterable[Sequence[int]],
    channel_gb_per_s: float,
    *,
    kinds: Iterable[LinkKind] = ALL_KINDS,
) -> list[str]:
    """What is wrong with ring orders, each hop taking the best path between its GPUs.

    Args:
        topology: where the rings are to run.
        orders: the ranks in the order of each ring.
        channel_gb_per_s: line rate that each ring is to have.
        kinds: of the links that the rings may use.

    Returns:
        Problems in words: not a permutation of the ranks, no path for a hop, or a link that
        carries more than it has lanes for. Empty if there are none.
    """
    allowed = frozenset(kinds)
    problems: list[str] = []
    channels: list[Channel] = []
    for idx, order in enumerate(orders):
        wrong = _order_problems(topology, idx, order)
        problems += wrong
        if wrong:
            continue
        hops = []
        for a, b in _pairs(order):
            route = best_route(topology, a, b, allowed)
            if route is None:
                pair = f"{topology.gpu_name(a)} to {topology.gpu_name(b)}"
                problems.append(f"channel {idx}: no path from {pair}")
            hops.append(route or ())
        channels.append(Channel(tuple(order), tuple(hops)))
    return problems + _load_problems(topology, channels, channel_gb_per_s)


def check_channels(
    topology: Topology, channels: Sequence[Channel], channel_gb_per_s: float
) -> list[str]:
    """What is wrong with channels, whose hops say which links they take.

    Args:
        topology: where they are to run.
        channels: the rings.
        channel_gb_per_s: line rate that each ring is to have.

    Returns:
        As `check_orders`, and: a hop whose links do not lead from its GPU to the next.
    """
    problems: list[str] = []
    for idx, channel in enumerate(channels):
        wrong = _order_problems(topology, idx, channel.order)
        if not wrong and len(channel.hops) != len(channel.order):
            wrong = [f"channel {idx}: {len(channel.hops)} hops for {len(channel.order)} ranks"]
        problems += wrong
        if wrong:
            continue
        for (a, b), hop in zip(_pairs(channel.order), channel.hops, strict=True):
            pair = f"{topology.gpu_name(a)} to {topology.gpu_name(b)}"
            at = topology.gpus[a]
            for i in hop:
                if not 0 <= i < len(topology.links) or topology.links[i].src != at:
                    problems.append(f"channel {idx}: the path from {pair} is broken at link {i}")
                    break
                at = topology.links[i].dst
            else:
                if at != topology.gpus[b]:
                    where = topology.nodes[at].name
                    problems.append(f"channel {idx}: the path from {pair} ends at {where}")
    if problems:
        return problems
    return _load_problems(topology, channels, channel_gb_per_s)


def _pairs(order: Sequence[int]) -> list[tuple[int, int]]:
    return [(order[i], order[(i + 1) % len(order)]) for i in range(len(order))]


def _order_problems(topology: Topology, idx: int, order: Sequence[int]) -> list[str]:
    num_ranks = len(topology.gpus)
    counts = Counter(order)
    strange = sorted(rank for rank in counts if not 0 <= rank < num_ranks)
    missing = [rank for rank in range(num_ranks) if rank not in counts]
    repeated = sorted(rank for rank, count in counts.items() if count > 1)
    return [
        f"channel {idx}: not a permutation of the ranks: {text} {ranks}"
        for text, ranks in (("unknown", strange), ("missing", missing), ("repeated", repeated))
        if ranks
    ]


def _load_problems(
    topology: Topology, channels: Sequence[Channel], channel_gb_per_s: float
) -> list[str]:
    uses: dict[int, list[int]] = {}
    for idx, channel in enumerate(channels):
        for hop in channel.hops:
            for i in hop:
                uses.setdefault(i, []).append(idx)
    problems = []
    for i, users in sorted(uses.items()):
        link = topology.links[i]
        needed = len(users) * channel_gb_per_s
        if needed > link.gb_per_s * (1 + 1e-9):
            problems.append(
                f"link {topology.link_name(i)} ({link.kind.label}) has {link.gb_per_s:g} GB/s, and "
                f"channels {', '.join(map(str, users))} need {needed:g}"
            )
    return problems
