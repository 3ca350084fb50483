"""What the planner answers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from ringcomm.planner.candidate import Candidate
from ringcomm.planner.cluster import Cluster
from ringcomm.planner.job import Job
from ringcomm.planner.memory import RankMemory
from ringcomm.planner.shapes import ModelShape
from ringcomm.planner.step_time import StepTime
from ringcomm.planner.traffic import Traffic

__all__ = ["Plan", "Plans", "Refusal"]

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
        ranked: those that fit, most tokens per second first; those whose tensor parallelism
            leaves a host come after all others.
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
