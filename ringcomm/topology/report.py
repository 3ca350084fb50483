"""A plan as text: links, rings, bound, and what the cost model says of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ringcomm.topology.check import check_plan
from ringcomm.topology.cost_model import CostModel, predict_sizes
from ringcomm.topology.flows import ALGORITHMS
from ringcomm.topology.graph import Topology
from ringcomm.topology.plan import RingPlan, link_loads

__all__ = ["describe", "prediction_rows"]

DEFAULT_SIZES = (1 << 10, 1 << 20, 1 << 30)


def describe(
    plan: RingPlan, *, sizes_bytes: Sequence[int] = DEFAULT_SIZES, model: CostModel | None = None
) -> str:
    """A plan in about twenty lines of text, for `python -m ringcomm plan` and the like.

    Args:
        plan: from `find_rings`.
        sizes_bytes: buffers for which the algorithms are compared.
        model: latencies; None takes the defaults.

    Returns:
        Lines, without a newline at the end.
    """
    topology = plan.topology
    problems = check_plan(plan)
    lines = [
        f"{topology.name}: {len(topology.gpus)} GPUs on {len(topology.hosts)} host(s)",
        *(f"  {text}" for text in _link_lines(topology)),
        f"{len(plan.channels)} channel(s) of {plan.channel_gb_per_s:g} GB/s, "
        f"{plan.gb_per_s:g} GB/s together ({plan.method})",
        f"  {_bound_text(plan)}",
        "  checked: " + ("every ring is a permutation, no lane is used twice"
                         if not problems else "; ".join(problems)),
        *(f"  {text}" for text in _ring_lines(plan)),
        f"  fullest links: {_fullest(plan)}",
        "predicted all_reduce, bandwidths in GB/s:",
        *(f"  {'  '.join(row)}" for row in _aligned(prediction_rows(plan, sizes_bytes, model))),
    ]  # fmt: skip
    return "\n".join(lines)


def prediction_rows(
    plan: RingPlan, sizes_bytes: Sequence[int] = DEFAULT_SIZES, model: CostModel | None = None
) -> list[tuple[str, ...]]:
    """The table of `describe`, header first: bytes, algorithm, us, algbw, busbw, bottleneck.

    Algorithms that do not suit the machine are left out; the fastest of a size comes first.
    """
    header = ("bytes", "algorithm", "us", "algbw", "busbw", "limited by")
    rows: list[tuple[str, ...]] = [header]
    names = [name for name in ALGORITHMS if name != "hierarchical" or _is_even(plan.topology)]
    by_name = [predict_sizes(plan, name, sizes_bytes, model) for name in names]
    for predictions in zip(*by_name, strict=True):
        for p in sorted(predictions, key=lambda p: p.time_us):
            limit = "latency" if p.latency_us > p.time_us / 2 else p.bottleneck
            numbers = (f"{p.time_us:.1f}", f"{p.algbw_gb_per_s:.4g}", f"{p.busbw_gb_per_s:.4g}")
            rows.append((str(p.size_bytes), p.algorithm, *numbers, limit))
    return rows


def _is_even(topology: Topology) -> bool:
    sizes = Counter(topology.nodes[gpu].host for gpu in topology.gpus)
    return len(sizes) > 1 and len(set(sizes.values())) == 1


def _link_lines(topology: Topology) -> list[str]:
    groups = Counter(
        (k.kind, k.num_lanes, k.lane_gb_per_s, k.payload_gb_per_s) for k in topology.links
    )
    return [
        f"{count:4d} x {kind.label}: {lanes} lane(s) of {lane:g} GB/s per direction, "
        f"payload {payload:.4g} GB/s"
        for (kind, lanes, lane, payload), count in sorted(groups.items())
    ]


def _bound_text(plan: RingPlan) -> str:
    if len(plan.channels) == plan.bound:
        return f"upper bound {plan.bound}: met, no set of rings is larger"
    if plan.is_maximum:
        return f"upper bound {plan.bound}: not met, but no larger set exists (or was asked for)"
    return f"upper bound {plan.bound}: not met, the search ended at its budget"


def _ring_lines(plan: RingPlan) -> list[str]:
    counts = Counter(channel.order for channel in plan.channels)
    return [
        f"{count:2d} x " + " ".join(map(str, (*order, order[0]))) for order, count in counts.items()
    ]


def _fullest(plan: RingPlan) -> str:
    links = plan.topology.links
    parts = {
        i: uses * plan.channel_gb_per_s / links[i].gb_per_s
        for i, uses in link_loads(plan.channels).items()
    }
    fullest = max(parts.values())
    equals = [i for i, part in sorted(parts.items()) if part > fullest - 1e-9]
    more = f" and {len(equals) - 1} more" if len(equals) > 1 else ""
    return f"{plan.topology.link_name(equals[0])}{more}, {fullest:.0%} of the line rate"


def _aligned(rows: list[tuple[str, ...]]) -> list[list[str]]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        [
            *(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)),
            row[-1],
        ]
        for row in rows
    ]
