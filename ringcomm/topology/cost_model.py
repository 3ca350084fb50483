"""How long an all_reduce takes on paper: latency per step, and the link with most to carry.

    time = base + sum over phases of (latencies of its steps + bytes of the busiest link / its rate)

A link's rate is what payload gets of it. Links that several hops share, as uplinks of PCIe switches
and sockets are, are the busiest by themselves: their bytes add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ringcomm.topology.flows import Phase, phases_of
from ringcomm.topology.graph import LinkKind, Topology
from ringcomm.topology.plan import RingPlan

__all__ = ["CostModel", "Prediction", "busbw_factor", "predict", "predict_sizes"]


@dataclass(frozen=True)
class CostModel:
    """Latencies in microseconds.

    The defaults are those of NCCL's tuner for rings with its Simple protocol (src/graph/tuning.cc):
    a flag beside the data, as between GPUs in ringcomm. Other transports have others: measure.

    Attributes:
        base_us: once per call.
        step_us: per hop of a message, by the worst link on its way.
    """

    base_us: float = 8.4
    step_us: Mapping[LinkKind, float] = field(
        default_factory=lambda: {
            LinkKind.NVLINK: 3.4,
            LinkKind.PCIE: 5.7,
            LinkKind.SOCKET: 5.7,
            LinkKind.NETWORK: 14.0,
        }
    )

    def __post_init__(self) -> None:
        missing = [kind.label for kind in LinkKind if kind not in self.step_us]
        if missing:
            raise ValueError(f"step_us has no latency for {', '.join(missing)}")
        if min(self.base_us, *self.step_us.values()) < 0:
            raise ValueError("a latency is negative")


@dataclass(frozen=True)
class Prediction:
    """What the model says of one all_reduce.

    Attributes:
        algorithm: its name.
        size_bytes: of each rank's buffer.
        time_us: of the call.
        latency_us: the part that does not depend on the size.
        algbw_gb_per_s: size over time.
        busbw_gb_per_s: as nccl-tests has it, algbw times 2(N-1)/N.
        bottleneck: the link that takes longest in the longest phase, in words.
    """

    algorithm: str
    size_bytes: int
    time_us: float
    latency_us: float
    algbw_gb_per_s: float
    busbw_gb_per_s: float
    bottleneck: str


def busbw_factor(num_ranks: int) -> float:
    """What turns an all_reduce's algbw into its busbw (nccl-tests, doc/PERFORMANCE.md)."""
    return 2 * (num_ranks - 1) / num_ranks


def predict(
    plan: RingPlan, algorithm: str, size_bytes: int, model: CostModel | None = None
) -> Prediction:
    """Predicts one all_reduce.

    Args:
        plan: rings over the machine's GPUs; algorithms without rings use its topology only.
        algorithm: "ring", "tree", "one_shot", "two_shot" or "hierarchical".
        size_bytes: of each rank's buffer, positive.
        model: latencies; None takes the defaults.

    Raises:
        ValueError: unknown algorithm, a size that is not positive, or hosts that do not suit it.
    """
    return predict_sizes(plan, algorithm, [size_bytes], model)[0]


def predict_sizes(
    plan: RingPlan, algorithm: str, sizes_bytes: Sequence[int], model: CostModel | None = None
) -> list[Prediction]:
    """As `predict`, for several sizes; what the links carry is worked out once."""
    for size_bytes in sizes_bytes:
        if size_bytes < 1:
            raise ValueError(f"size_bytes must be positive, got {size_bytes}")
    costs = model or CostModel()
    phases = phases_of(plan, algorithm)
    busiest = [_busiest(plan.topology, phase) for phase in phases]
    latency_us = costs.base_us + sum(
        costs.step_us[kind] * count for phase in phases for kind, count in phase.steps.items()
    )
    _, _, slowest = max(busiest)
    bottleneck = _in_words(plan.topology, -slowest)
    predictions = []
    for size_bytes in sizes_bytes:
        # Seconds per 10^9 bytes, times bytes, are 10^-9 s.
        time_us = latency_us + sum(seconds for seconds, *_ in busiest) * size_bytes * 1e-3
        algbw = size_bytes / time_us * 1e-3
        busbw = algbw * busbw_factor(len(plan.topology.gpus))
        predictions.append(
            Prediction(algorithm, size_bytes, time_us, latency_us, algbw, busbw, bottleneck)
        )
    return predictions


def _busiest(topology: Topology, phase: Phase) -> tuple[float, LinkKind, int]:
    """Seconds per 10^9 bytes of S on the slowest link, its kind, and minus its index.

    Of equals it is the one of the worst kind, and of those the first.
    """
    return max(
        (round(share / topology.links[i].payload_gb_per_s, 12), topology.links[i].kind, -i)
        for i, share in phase.share.items()
    )


def _in_words(topology: Topology, link_idx: int) -> str:
    link = topology.links[link_idx]
    return f"{topology.link_name(link_idx)} ({link.kind.label}, {link.payload_gb_per_s:.4g} GB/s)"
