"""What the planner answers: plans, in words why they come to this, and tables."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from ringcomm.planner.cluster import Cluster
from ringcomm.planner.job import Job, in_gb, in_seconds
from ringcomm.planner.memory import RankMemory
from ringcomm.planner.mesh import Candidate, bubble
from ringcomm.planner.models import ModelShape
from ringcomm.planner.step_time import StepTime
from ringcomm.planner.traffic import Traffic

__all__ = [
    "Plan",
    "Plans",
    "Refusal",
    "efficiency",
    "headline",
    "reasons_of",
    "refusal_lines",
    "table_of_plans",
]

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Plan:
    """One way to train, and what it takes.

    Attributes:
        candidate: system, mesh, schedule, recomputation and micro-batches.
        memory: of the fullest rank.
        traffic: of a rank in a step.
        bubble: the share of a step in which a rank of the pipeline waits.
        time: of a step.
        tokens_per_s: of all ranks.
        reasons: in words, how it comes to this.
    """

    candidate: Candidate
    memory: RankMemory
    traffic: Traffic
    bubble: float
    time: StepTime
    tokens_per_s: float
    reasons: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; bytes, seconds."""
        candidate = self.candidate
        return {
            "system": candidate.system.name,
            "mesh": dataclasses.asdict(candidate.mesh),
            "schedule": candidate.schedule or None,
            "checkpointing": candidate.checkpointing,
            "num_micro_batches": candidate.num_micro_batches,
            "micro_batch_sequences": candidate.micro_batch,
            "memory_bytes": {**dataclasses.asdict(self.memory), "device": self.memory.device},
            "traffic_bytes": {**dataclasses.asdict(self.traffic), "sent": self.traffic.sent},
            "bubble": self.bubble,
            "seconds": {**dataclasses.asdict(self.time), "step": self.time.step},
            "tokens_per_s": self.tokens_per_s,
            "reasons": list(self.reasons),
        }


@dataclasses.dataclass(frozen=True)
class Refusal:
    """What does not go, or does not fit.

    Attributes:
        system: its name; "" where the mesh suits none.
        mesh: in words.
        reason: in one line.
    """

    system: str
    mesh: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Plans:
    """What plan() found.

    Attributes:
        shape, cluster, job: what was asked.
        ranked: those that fit, the fastest first; among those within 2 % of the fastest, simple
            systems and little traffic first. Tensor parallelism over hosts comes last.
        refused: the others.
    """

    shape: ModelShape
    cluster: Cluster
    job: Job
    ranked: tuple[Plan, ...]
    refused: tuple[Refusal, ...]

    @property
    def best(self) -> Plan | None:
        """The first one that fits; None if none does."""
        return self.ranked[0] if self.ranked else None

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.ranked)

    def __len__(self) -> int:
        return len(self.ranked)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        shape = dataclasses.asdict(self.shape)
        shape["biases"] = sorted(self.shape.biases)
        return {
            "schema": SCHEMA,
            "model": {**shape, "num_params": self.shape.num_params},
            "cluster": dataclasses.asdict(self.cluster),
            "job": dataclasses.asdict(self.job),
            "plans": [plan.as_dict() for plan in self.ranked],
            "refused": [dataclasses.asdict(refusal) for refusal in self.refused],
        }

    def to_json(self) -> str:
        """One object, with all of it."""
        return json.dumps(self.as_dict(), indent=1, allow_nan=False)


def reasons_of(
    shape: ModelShape,
    cluster: Cluster,
    job: Job,
    candidate: Candidate,
    memory: RankMemory,
    traffic: Traffic,
    time: StepTime,
) -> tuple[str, ...]:
    """In the order in which one would work it out."""
    return (
        _weights(shape, job, candidate, memory),
        _activations(job, candidate, memory),
        f"memory: {in_gb(memory.device)} of {in_gb(cluster.usable_bytes)}"
        f" ({in_gb(cluster.hardware.reserved_bytes)} are the driver's)"
        + "".join(_elsewhere(memory)),
        *_tensor(cluster, candidate, traffic),
        *_data(cluster, job, candidate, traffic, time),
        *_experts(candidate, traffic),
        *_pipeline(job, candidate, traffic),
        *_offload(cluster, job, candidate, traffic),
        _time(job, cluster, candidate, time),
    )


def _weights(shape: ModelShape, job: Job, candidate: Candidate, memory: RankMemory) -> str:
    e, s = job.itemsize, job.state_bytes
    system, mesh = candidate.system, candidate.mesh
    n = mesh.dp
    formulas = {0: f"{2 * e + s} Φ", 1: f"{2 * e} Φ + {s} Φ/{n}", 2: f"{e} Φ + {e + s} Φ/{n}"}
    formula = formulas.get(system.stage, f"{2 * e + s} Φ/{n}")
    if system.is_lomo:
        formula = f"{e} Φ" if system.stage == 0 else f"{e} Φ/{n}"
    elif system.weights != "device":
        formula = "what is too small to offload, and a layer's"
    elif system.is_offloaded:
        formula = f"{e} Φ + {e} Φ/{n}"
    share = mesh.pp * mesh.tp
    of = f"Φ = {shape.num_params:,} weights" + (f" / {share}" if share > 1 else "")
    of += f", of experts 1/{mesh.ep}" if mesh.ep > 1 else ""
    kept = memory.parameters + memory.gradients + memory.states
    return f"weights, gradients, states: {formula} bytes, {of}: {in_gb(kept)}"


def _activations(job: Job, candidate: Candidate, memory: RankMemory) -> str:
    m, b = candidate.num_micro_batches, candidate.micro_batch
    text = {
        "none": "all of every layer",
        "selective": "all but the s × s matrices, which are recomputed",
        "full": "each layer's input, the rest is recomputed for a third more computing",
    }[candidate.checkpointing]
    return (
        f"activations: {m} micro-batches of {b} × {job.sequence} tokens, kept is {text}:"
        f" {in_gb(memory.activations)}"
    )


def _elsewhere(memory: RankMemory) -> Iterator[str]:
    if memory.host:
        yield f"; of the host {in_gb(memory.host)} a rank"
    if memory.disk:
        yield f"; on disks {in_gb(memory.disk)} a rank"


def _tensor(cluster: Cluster, candidate: Candidate, traffic: Traffic) -> Iterator[str]:
    mesh = candidate.mesh
    if mesh.tp == 1:
        return
    group = cluster.tensor_group(mesh)
    place = "inside a host" if group.is_inside else f"over {group.num_hosts} hosts"
    yield (
        f"tp {mesh.tp} {place}: 4 all_reduces a layer and micro-batch, {in_gb(traffic.tensor)}"
        + (", as reduce-scatters and all-gathers" if mesh.is_sequence_split else "")
    )


def _data(
    cluster: Cluster, job: Job, candidate: Candidate, traffic: Traffic, time: StepTime
) -> Iterator[str]:
    mesh = candidate.mesh
    if mesh.dp == 1:
        return
    group = cluster.data_group(mesh)
    stage, m = candidate.system.stage, candidate.num_micro_batches
    shares = {3: f"{3 * m}" if m > 1 else "3", 2: f"{m + 1}"}.get(stage, "2")
    if candidate.system.is_lomo:
        shares = "3" if stage == 3 else "2"
    text = (
        f"dp {mesh.dp}: {shares} (N-1)/N of {job.itemsize} Φ bytes a step,"
        f" {in_gb(traffic.data)}; {in_seconds(time.data_hidden)} behind computing,"
        f" {in_seconds(time.data)} not"
    )
    if not group.is_inside and group.per_host > 1:
        way = "levels" if group.levels(1 << 25) < group.ring(1 << 25) else "one ring"
        text += f"; over {group.num_hosts} hosts by {way}"
    yield text


def _experts(candidate: Candidate, traffic: Traffic) -> Iterator[str]:
    if candidate.mesh.ep > 1:
        yield (
            f"ep {candidate.mesh.ep}: 4 all_to_alls a layer and micro-batch, of tokens routed"
            f" evenly, {in_gb(traffic.expert)}"
        )


def _pipeline(job: Job, candidate: Candidate, traffic: Traffic) -> Iterator[str]:
    p, m = candidate.mesh.pp, candidate.num_micro_batches
    if p == 1:
        return
    idle = bubble(candidate.schedule, p, m, job.virtual_stages)
    formula = {
        "interleaved": f"(p-1)/(vm+p-1) with v = {job.virtual_stages}",
        "zbv": "(p-1)/(6m+p-1)",
    }.get(candidate.schedule, "(p-1)/(m+p-1)")
    why = "2p to 4p"
    if m > 4 * p:
        why = "more than 4p, since fewer do not fit or do not divide"
    elif m < 2 * p:
        why = "less than 2p: the batch has no more"
    yield (
        f"pp {p}, {candidate.schedule}: m = {m} micro-batches ({why}), bubble {formula} ="
        f" {float(idle):.1%}; {in_gb(traffic.pipeline)} to neighbours"
    )


def efficiency(intensity: float, bandwidth: float, peak: float) -> float:
    """The share of time that a device computes if moving and computing take turns.

    Args:
        intensity: FLOP per byte moved.
        bandwidth: bytes per second and device.
        peak: FLOP per second.
    """
    return intensity * bandwidth / (intensity * bandwidth + peak)


def _offload(cluster: Cluster, job: Job, candidate: Candidate, traffic: Traffic) -> Iterator[str]:
    system, hardware = candidate.system, cluster.hardware
    if not system.is_offloaded:
        return
    rate = hardware.host_rate
    if system.states == "disk":
        rate = hardware.disk_rate / min(candidate.mesh.num_ranks, cluster.per_host)
    peak = hardware.peak_flops[job.precision] * (job.utilisation or hardware.utilisation)
    # Rajbhandari et al. 2021, section 4: 8 FLOP a token and weight, states read and written.
    share = efficiency(8 * job.tokens / (2 * job.state_bytes), rate, peak)
    yield (
        f"offload: {in_gb(traffic.offloaded)} a step at {in_gb(rate)}/s; for the states alone"
        f" {share:.1%} of the time computes"
    )


def _time(job: Job, cluster: Cluster, candidate: Candidate, time: StepTime) -> str:
    parts = ("compute", "tensor", "expert", "pipeline", "data", "offload", "update", "bubble")
    shown = [
        f"{name} {in_seconds(getattr(time, name))}"
        for name in parts
        if getattr(time, name) > 0.0005 * time.step
    ]
    utilisation = job.utilisation or cluster.hardware.utilisation
    dominates = f"{time.largest} dominates with {getattr(time, time.largest) / time.step:.0%}"
    return (
        f"time: {in_seconds(time.step)} = {' + '.join(shown)}, computing at {utilisation:.0%} of"
        f" the peak; {dominates}"
    )


_PARTS = ("parameters", "gradients", "states", "activations", "buffers")


def headline(plans: Plans) -> str:
    """What was asked, in two lines."""
    shape, cluster, job = plans.shape, plans.cluster, plans.job
    return (
        f"{shape.name}: {shape.num_params:,} parameters, {shape.layers} layers of {shape.hidden};"
        f" {job.tokens:,} tokens a step in sequences of {job.sequence:,}, {job.precision},"
        f" {job.optimizer}\n"
        f"{cluster.num_gpus:,} × {cluster.hardware.name} with {in_gb(cluster.memory_bytes)},"
        f" {cluster.per_host} a host; {len(plans):,} plans fit, {len(plans.refused):,} do not"
    )


def table_of_plans(plans: Plans, top: int) -> Any:
    """A rich table of the first ones; all where top is 0."""
    from ringcomm.measure.screen import make_table

    headers = ["system", "mesh", "schedule", "m × b", "recompute"]
    memory = ["params", "grads", "states", "acts", "buffers", "GB", "host"]
    table = make_table(
        [*headers, *memory, "sent GB", "bubble", "step", "tokens/s", "most is"],
        "Of the fullest rank, in 10^9 bytes; host: of its memory or disks, a rank. m × b:"
        " micro-batches, and sequences of each.",
    )
    for column in table.columns[:3]:
        column.justify = "left"
    for plan in plans.ranked[: top or None]:
        table.add_row(*_cells(plan))
    return table


def _cells(plan: Plan) -> Iterator[str]:
    candidate, memory = plan.candidate, plan.memory
    yield candidate.system.name
    yield str(candidate.mesh)
    yield candidate.schedule
    yield f"{candidate.num_micro_batches} × {candidate.micro_batch}"
    yield candidate.checkpointing
    for part in _PARTS:
        yield _gb(getattr(memory, part))
    yield _gb(memory.device)
    yield _gb(memory.host + memory.disk)
    yield _gb(plan.traffic.sent)
    yield f"{plan.bubble:.0%}" if candidate.mesh.pp > 1 else ""
    yield in_seconds(plan.time.step)
    yield f"{plan.tokens_per_s:,.0f}"
    yield plan.time.largest


def _gb(num_bytes: int) -> str:
    value = num_bytes / 1e9
    return f"{value:,.{2 if value < 10 else 1 if value < 1000 else 0}f}"


def refusal_lines(plans: Plans, top: int) -> Iterator[str]:
    """One per reason and system, with the meshes; the first ones, all where top is 0."""
    meshes: dict[tuple[str, str], list[str]] = defaultdict(list)
    for refusal in plans.refused:
        meshes[refusal.system, refusal.reason].append(refusal.mesh)
    found = list(meshes.items())
    for (system, reason), names in found[: top or None]:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"{system or 'no system'}, {names[0]}{more}: {reason}"
    if top and len(found) > top:
        yield f"… and {len(found) - top} more reasons: --top 0 has all, --json too"
