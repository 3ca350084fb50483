"""One way to train: a system on a mesh, its pipeline's schedule, and how its passes go.

Schedules: GPipe (Huang et al. 2019, arXiv 1811.06965), 1F1B and interleaved (Narayanan et al. 2021,
arXiv 2104.04473), and the zero-bubble schedule in V form, ZB-V (Qi et al. 2023, arXiv 2401.10241),
by the names of ringcomm.parallel.pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from ringcomm.planner.models import ModelShape

__all__ = [
    "SCHEDULES",
    "SYSTEMS",
    "Candidate",
    "Mesh",
    "System",
    "bubble",
    "live_micro_batches",
    "mesh_fault",
    "schedule_fault",
]

Tier = Literal["device", "host", "disk"]


@dataclass(frozen=True)
class System:
    """How data-parallel ranks keep a model.

    Attributes:
        name: as in docs/systems.md.
        stage: of ZeRO; 0 where each rank has all.
        states: where the optimizer's states are.
        weights: where shards of weights and gradients are.
        is_lomo: whether an update inside the backward pass leaves no gradients and no states.
    """

    name: str
    stage: int
    states: Tier = "device"
    weights: Tier = "device"
    is_lomo: bool = False

    @property
    def is_offloaded(self) -> bool:
        """Whether anything is elsewhere."""
        return self.states != "device"

    def fault(self, dp: int, pp: int, tp: int, *, is_host: bool) -> str | None:
        """Why it does not go with such axes, or on a device that is its host; None if it does."""
        if self.name == "single":
            return None if dp == pp == tp == 1 else "single is one rank"
        if self.name == "ddp" and dp == pp == tp == 1:
            return "one rank has no replicas: it is single"
        if "host" in (self.states, self.weights) and is_host:
            return "the device is the host: there is no other memory to offload to"
        if self.stage in (2, 3) and pp > 1:
            return (
                f"{self.name} with a pipeline would communicate for every micro-batch in place of"
                " once a step: zero1 does not"
            )
        if (self.is_lomo or self.weights != "device") and (pp > 1 or tp > 1):
            return f"{self.name} is for data-parallel ranks alone"
        if self.name != "ddp" and dp == 1 and not (self.is_lomo or self.is_offloaded):
            return f"{self.name} shares over data-parallel ranks: it needs dp > 1"
        return None


_KNOWN = (
    System("single", 0),
    System("ddp", 0),
    System("zero1", 1),
    System("zero2", 2),
    System("zero3", 3),
    System("offload-cpu", 2, "host"),
    System("offload-nvme", 2, "disk"),
    System("infinity-cpu", 3, "host", "host"),
    System("infinity-nvme", 3, "disk", "disk"),
    System("lomo", 0, is_lomo=True),
    System("lomo-shards", 3, is_lomo=True),
)
SYSTEMS = {system.name: system for system in _KNOWN}


@dataclass(frozen=True)
class Mesh:
    """Sizes of the axes; their product is the number of ranks.

    Attributes:
        dp: data-parallel replicas, or shards of them.
        pp: stages of a pipeline.
        tp: ranks that share every layer.
        ep: ranks of the data-parallel ones that share experts.
        is_sequence_split: whether tensor-parallel ranks share the tokens between layers.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    ep: int = 1
    is_sequence_split: bool = False

    @property
    def num_ranks(self) -> int:
        """Of all axes; experts are shared among the data-parallel ranks."""
        return self.dp * self.pp * self.tp

    def __str__(self) -> str:
        parts = [f"dp {self.dp}"]
        parts += [f"{name} {size}" for name, size in (("pp", self.pp), ("tp", self.tp)) if size > 1]
        if self.is_sequence_split:
            parts.append("sp")
        if self.ep > 1:
            parts.append(f"ep {self.ep}")
        return " × ".join(parts)


def mesh_fault(shape: ModelShape, mesh: Mesh, sequence: int) -> str | None:
    """Why a model cannot be arranged so; None if it can."""
    tp, kv = mesh.tp, shape.kv_heads
    if shape.heads % tp:
        return f"tp {tp} does not divide {shape.heads} heads"
    if kv % tp and tp % kv:
        return f"tp {tp} neither divides {kv} query groups nor is a multiple of them"
    if shape.ffn < tp or shape.vocab < tp:
        return f"tp {tp} is more than there are rows to share"
    if mesh.is_sequence_split and tp == 1:
        return "sequence parallelism shares tokens among tensor-parallel ranks: it needs tp > 1"
    if mesh.is_sequence_split and sequence % tp:
        return f"sequence parallelism: tp {tp} does not divide sequences of {sequence} tokens"
    if mesh.pp > shape.layers:
        return f"pp {mesh.pp} is more than {shape.layers} layers"
    return _expert_fault(shape, mesh)


def _expert_fault(shape: ModelShape, mesh: Mesh) -> str | None:
    ep = mesh.ep
    if ep == 1:
        return None
    if not shape.experts:
        return f"ep {ep}: {shape.name} has no experts"
    if mesh.dp == 1:
        return "expert parallelism shares experts among data-parallel ranks: it needs dp > 1"
    if mesh.dp % ep:
        return f"ep {ep} does not divide dp {mesh.dp}"
    if shape.experts % ep:
        return f"ep {ep} does not divide {shape.experts} experts"
    return None


Schedule = Literal["gpipe", "1f1b", "interleaved", "zbv"]
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved", "zbv")


def bubble(schedule: str, num_stages: int, num_micro_batches: int, virtual: int = 2) -> Fraction:
    """The share of a step in which a rank waits.

    (p - 1) / (m + p - 1), of an interleaved one (p - 1) / (v m + p - 1); of ZB-V, where weights'
    gradients take what was idle, (p - 1) / (6 m + p - 1) from m = 2p on.
    """
    idle, busy = num_stages - 1, num_micro_batches
    busy *= {"interleaved": virtual, "zbv": 6}.get(schedule, 1)
    return Fraction(idle, busy + idle)


def live_micro_batches(
    schedule: str, num_stages: int, num_micro_batches: int, stage: int, virtual: int = 2
) -> Fraction:
    """How many micro-batches' activations a rank has at most, of all its layers.

    GPipe m; 1F1B min(m, p - i) on rank i; interleaved up to (p - 1) / v more than that on rank 0;
    ZB-V min(m, p) on every rank.
    """
    p, m = num_stages, Fraction(num_micro_batches)
    if schedule == "gpipe":
        return m
    if schedule == "1f1b":
        return min(m, Fraction(p - stage))
    if schedule == "interleaved":
        warm_up = (virtual - 1) * p + 2 * (p - 1 - stage) + 1
        return min(m, Fraction(warm_up, virtual))
    return min(m, Fraction(p))


def schedule_fault(
    schedule: str, num_layers: int, num_stages: int, num_micro_batches: int, virtual: int = 2
) -> str | None:
    """Why a schedule cannot run so; None if it can."""
    parts = {"interleaved": virtual, "zbv": 2}.get(schedule, 1)
    if num_layers < num_stages * parts:
        return f"{schedule}: {num_layers} layers make no {num_stages * parts} stages"
    if schedule == "interleaved" and num_micro_batches % num_stages:
        return f"interleaved: {num_micro_batches} micro-batches are no multiple of pp {num_stages}"
    if schedule == "zbv" and num_micro_batches < 2 * num_stages:
        return f"zbv: {num_micro_batches} micro-batches are less than 2 × pp {num_stages}"
    return None


@dataclass(frozen=True)
class Candidate:
    """What is predicted, and compared.

    Attributes:
        system: how data-parallel ranks keep the model.
        mesh: how ranks are arranged.
        schedule: of the pipeline; "" where there is none.
        checkpointing: "none", "selective" or "full" recomputation.
        num_micro_batches: of a step on a replica.
        micro_batch: sequences of each.
    """

    system: System
    mesh: Mesh
    schedule: str
    checkpointing: str
    num_micro_batches: int
    micro_batch: int

    @property
    def name(self) -> str:
        """Of the system and its mesh, such as "zero1, dp 4 × tp 2 × sp"."""
        return f"{self.system.name}, {self.mesh}"

    @property
    def complexity(self) -> tuple[int, int]:
        """More axes are more complex, and of systems each one than those before it in SYSTEMS."""
        mesh = self.mesh
        num_axes = sum(size > 1 for size in (mesh.dp, mesh.pp, mesh.tp, mesh.ep))
        return num_axes, list(SYSTEMS).index(self.system.name)

    @property
    def head_stage(self) -> int:
        """The stage of the pipeline that has the model's end: in V form the first one."""
        return 0 if self.schedule == "zbv" else self.mesh.pp - 1
