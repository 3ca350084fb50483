"""What the planner answers: plans, in words why they come to this, and tables."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from ringcomm.measure.screen import columns, in_gb, in_seconds
from ringcomm.planner.candidate import Candidate
from ringcomm.planner.hardware import Cluster
from ringcomm.planner.job import Job
from ringcomm.planner.memory import RankMemory
from ringcomm.planner.models import ModelShape
from ringcomm.planner.step_time import StepTime, Traffic, offload_rate

SCHEMA = 2
DEVICE_PARTS = ("parameters", "gradients", "states", "activations", "buffers")


@dataclasses.dataclass(frozen=True)
class Plan:
    """One way to train, and what it takes.

    Attributes:
        candidate: system, mesh, schedule, recomputation and micro-batches.
        memory: bytes of the fullest rank, by part.
        traffic: bytes that a rank sends in a step, by what for.
        time: seconds of a step, by part.
    """

    candidate: Candidate
    memory: RankMemory
    traffic: Traffic
    time: StepTime

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all ranks per second."""
        return self.candidate.job.tokens / self.time.step

    @property
    def reasons(self) -> tuple[str, ...]:
        """How it comes to this, in words: weights, activations, memory, traffic, time."""
        return tuple(_reasons(self))

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
            "bubble": candidate.bubble,
            "seconds": {**dataclasses.asdict(self.time), "step": self.time.step},
            "tokens_per_s": self.tokens_per_s,
            "reasons": list(self.reasons),
        }


@dataclasses.dataclass(frozen=True)
class Refusal:
    """What does not go, or does not fit: a system, or "" where the mesh suits none, and why."""

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

    def to_json(self) -> str:
        """One object with everything: bytes, seconds."""
        shape = dataclasses.asdict(self.shape)
        shape["biases"] = sorted(self.shape.biases)
        content = {
            "schema": SCHEMA,
            "model": {**shape, "num_params": self.shape.num_params},
            "cluster": dataclasses.asdict(self.cluster),
            "job": dataclasses.asdict(self.job),
            "plans": [plan.as_dict() for plan in self.ranked],
            "refused": [dataclasses.asdict(refusal) for refusal in self.refused],
        }
        return json.dumps(content, indent=1, allow_nan=False)

    def headline(self) -> str:
        """What was asked, in two lines."""
        shape, cluster, job = self.shape, self.cluster, self.job
        return (
            f"{shape.name}: {shape.num_params:,} parameters, {shape.layers} layers of"
            f" {shape.hidden}; {job.tokens:,} tokens a step in sequences of {job.sequence:,},"
            f" {job.precision}, {job.optimizer}\n"
            f"{cluster.num_gpus:,} × {cluster.hardware.name} with {in_gb(cluster.memory_bytes)},"
            f" {cluster.per_host} a host; {len(self.ranked):,} plans fit,"
            f" {len(self.refused):,} do not"
        )

    def table(self, top: int) -> str:
        """The first plans; all where top is 0. Figures are of the fullest rank, in 10^9 bytes.

        "host" is of its memory or disks, a rank; "m × b" micro-batches, and sequences of each.
        """
        memory = ["params", "grads", "states", "acts", "buffers", "GB", "host"]
        rows = [["system", "mesh", "schedule", "m × b", "recompute", *memory]]
        rows[0] += ["sent GB", "bubble", "step", "tokens/s", "most is"]
        for plan in self.ranked[: top or None]:
            c, kept = plan.candidate, plan.memory
            gigabytes = [getattr(kept, part) for part in DEVICE_PARTS]
            gigabytes += [kept.device, kept.host + kept.disk, plan.traffic.sent]
            row = [c.system.name, str(c.mesh), c.schedule]
            row += [f"{c.num_micro_batches} × {c.micro_batch}", c.checkpointing]
            row += [f"{value / 1e9:,.{2 if value < 1e10 else 1}f}" for value in gigabytes]
            row += [f"{c.bubble:.0%}" if c.mesh.pp > 1 else "", in_seconds(plan.time.step)]
            rows.append([*row, f"{plan.tokens_per_s:,.0f}", plan.time.largest])
        return columns(rows, 5)

    def refusal_lines(self, top: int) -> Iterator[str]:
        """One line per reason and system, with the meshes; all where top is 0."""
        meshes: dict[tuple[str, str], list[str]] = defaultdict(list)
        for refusal in self.refused:
            meshes[refusal.system, refusal.reason].append(refusal.mesh)
        for (system, reason), names in list(meshes.items())[: top or None]:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            yield f"{system or 'no system'}, {names[0]}{more}: {reason}"
        if top and len(meshes) > top:
            yield f"… and {len(meshes) - top} more reasons: --top 0 has all, --json too"


def _reasons(plan: Plan) -> Iterator[str]:
    """In the order in which one would work it out."""
    c, memory, time = plan.candidate, plan.memory, plan.time
    parts = [f"{name} {in_gb(getattr(memory, name))}" for name in DEVICE_PARTS]
    yield (
        f"memory: {in_gb(memory.device)} of {in_gb(c.cluster.usable_bytes)} = {' + '.join(parts)}"
        + (f"; of the host {in_gb(memory.host)} a rank" if memory.host else "")
        + (f"; on disks {in_gb(memory.disk)} a rank" if memory.disk else "")
    )
    recompute = "layers are" if c.checkpointing == "full" else "nothing is"
    m = c.num_micro_batches
    tokens = f"{c.micro_batch} × {c.job.sequence} tokens"
    yield f"activations: {m} micro-batches of {tokens}; {recompute} recomputed"
    for axis, part in (("tp", "tensor"), ("dp", "data"), ("ep", "expert"), ("pp", "pipeline")):
        size, group = getattr(c.mesh, axis), c.group(axis)
        if size > 1:
            place = "inside a host" if group.num_hosts == 1 else f"over {group.num_hosts} hosts"
            yield (
                f"{axis} {size} {place}: {in_gb(getattr(plan.traffic, part))} a step,"
                f" {in_seconds(getattr(time, part))}"
                + (f" and {in_seconds(time.data_hidden)} behind computing" * (axis == "dp"))
                + (_pipeline(c) if axis == "pp" else "")
            )
    hardware = c.cluster.hardware
    if plan.traffic.offloaded:
        moved = f"{in_gb(plan.traffic.offloaded)} a step at {in_gb(offload_rate(c))}/s"
        yield f"offload: {moved}, {in_seconds(time.offload)}"
    shown = [f"{k} {in_seconds(v)}" for k, v in time.parts.items() if v > 0.0005 * time.step]
    yield (
        f"time: {in_seconds(time.step)} = {' + '.join(shown)}, computing at"
        f" {hardware.utilisation:.0%} of the peak; {time.largest} dominates with"
        f" {time.parts[time.largest] / time.step:.0%}"
    )


def _pipeline(candidate: Candidate) -> str:
    p, m = candidate.mesh.pp, candidate.num_micro_batches
    why = "2p to 4p"
    if m > 4 * p:
        why = "more than 4p, since fewer do not fit or do not divide"
    elif m < 2 * p:
        why = "less than 2p: the batch has no more"
    return f"; {candidate.schedule} with {m} micro-batches ({why}), bubble {candidate.bubble:.1%}"
