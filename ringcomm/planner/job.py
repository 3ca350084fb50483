"""The training job, and the systems, meshes and schedules to consider.

Schedules: GPipe (Huang et al. 2019, arXiv 1811.06965), 1F1B and interleaved (Narayanan et al. 2021,
arXiv 2104.04473), and the zero-bubble schedule in V form, ZB-V (Qi et al. 2023, arXiv 2401.10241),
by the names of ringcomm.parallel.pipeline.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

from ringcomm.planner.hardware import Precision
from ringcomm.planner.models import ModelShape

# Stages per rank, for schedules with more than one.
STAGES_PER_RANK = {"interleaved": 2, "zbv": 2}
CHECKPOINTINGS = ("none", "full")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zbv")
Tier = Literal["device", "host", "disk"]
Optimizer = Literal["adamw", "sgd"]


@dataclass(frozen=True)
class System:
    """A data-parallel training system, by its name; docs/choose.md has each."""

    name: str
    stage: int  # the stage of ZeRO; 0 if each rank has everything
    states: Tier = "device"  # where the optimizer's states are
    weights: Tier = "device"  # where shards of weights and gradients are
    is_lomo: bool = False  # an update inside the backward pass leaves no gradients and no states

    def label(self, mesh: "Mesh") -> str:
        """Its name on a mesh: without data parallelism, DDP has no replicas to average."""
        if self.name != "ddp" or mesh.dp > 1:
            return self.name
        axes = (("tensor", mesh.tp), ("pipeline", mesh.pp))
        return " + ".join(name for name, size in axes if size > 1) or self.name

    def fault(self, mesh: "Mesh", *, is_host: bool) -> str | None:
        """Why it does not support a mesh, or a device that is the host; None if it does."""
        dp, pp, tp = mesh.dp, mesh.pp, mesh.tp
        if self.name == "ddp" and mesh.num_ranks == 1:
            return "with one rank there are no replicas: see the system single"
        if "host" in (self.states, self.weights) and is_host:
            return "the device is the host, which has no other memory to offload to"
        if self.stage in (2, 3) and pp > 1:
            return (
                f"{self.name} with a pipeline would communicate for every micro-batch instead of"
                " once per step: use zero1"
            )
        if (self.is_lomo or self.weights != "device") and (pp > 1 or tp > 1):
            return f"{self.name} supports data parallelism only"
        if self.name.startswith("zero") and dp == 1:
            return f"{self.name} shards over data-parallel ranks: it needs dp > 1"
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
# Sorted by complexity, which decides between equally fast plans.
SYSTEMS = {system.name: system for system in _KNOWN}


@dataclass(frozen=True)
class Job:
    """A training step, and restrictions of the search; empty and 0 mean no restriction.

    Raises:
        ValueError: a value is out of its range, or not known.
    """

    tokens: int  # per step, over all ranks
    sequence: int = 0  # tokens per sequence; 0: the model's context, or all tokens if fewer
    precision: Precision = "bf16"  # with float32 masters
    optimizer: Optimizer = "adamw"  # "sgd" has momentum
    is_sequence_split: bool | None = None  # Mesh.is_sequence_split; None: where possible
    dp: int = 0
    pp: int = 0
    tp: int = 0
    ep: int = 0
    systems: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()
    checkpointings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.sequence < 0:
            raise ValueError(f"tokens must be positive, got {self.tokens} of {self.sequence}")
        if self.sequence and self.tokens % self.sequence:
            raise ValueError(
                f"{self.tokens} tokens are not a whole number of sequences of {self.sequence}"
            )
        known: dict[str, tuple[str, ...]] = {
            "precision": get_args(Precision),
            "optimizer": get_args(Optimizer),
            "systems": tuple(SYSTEMS),
            "schedules": SCHEDULES,
            "checkpointings": CHECKPOINTINGS,
        }
        for name, names in known.items():
            value = getattr(self, name)
            for one in (value,) if isinstance(value, str) else value:
                if one not in names:
                    raise ValueError(f"{name} must be one of {', '.join(names)}, got {one!r}")
        for name in ("dp", "pp", "tp", "ep"):
            if (size := getattr(self, name)) < 0:
                raise ValueError(f"{name} must be positive, or 0 for all, got {size}")

    @property
    def itemsize(self) -> int:
        """Bytes of a weight, a gradient and an activation."""
        return 2 if self.precision == "bf16" else 4

    @property
    def state_bytes(self) -> int:
        """Bytes per weight: the optimizer's numbers, and a master beside 16-bit weights."""
        return (8 if self.optimizer == "adamw" else 4) + (4 if self.itemsize == 2 else 0)


@dataclass(frozen=True)
class Mesh:
    """Sizes of the axes; their product is the number of ranks.

    Ranks are numbered with tensor parallelism innermost, then data, then pipeline parallelism, so
    that what communicates most stays inside a host.
    """

    dp: int = 1  # data-parallel ranks
    pp: int = 1  # pipeline stages
    tp: int = 1  # ranks over which each layer is sharded
    ep: int = 1  # data-parallel ranks over which experts are sharded
    is_sequence_split: bool = False  # tensor-parallel ranks shard the tokens between layers

    @property
    def num_ranks(self) -> int:
        """Ranks of all axes; experts are sharded over data-parallel ranks."""
        return self.dp * self.pp * self.tp

    def __str__(self) -> str:
        sizes = (("dp", self.dp), ("pp", self.pp), ("tp", self.tp))
        parts = [f"{name} {size}" for name, size in sizes if size > 1] or ["dp 1"]
        if self.is_sequence_split:
            parts.append("sp")
        if self.ep > 1:
            parts.append(f"ep {self.ep}")
        return " × ".join(parts)

    def fault(self, shape: ModelShape, sequence: int) -> str | None:
        """Why a model does not support this mesh; None if it does."""
        dp, pp, tp, ep, kv = self.dp, self.pp, self.tp, self.ep, shape.kv_heads
        if shape.heads % tp:
            return f"tp {tp} does not divide {shape.heads} heads"
        if kv % tp and tp % kv:
            return f"tp {tp} neither divides {kv} query groups nor is a multiple of them"
        if min(shape.ffn, shape.vocab) < tp:
            return f"tp {tp} is more than the rows to shard"
        if self.is_sequence_split and tp == 1:
            return "sequence parallelism shards tokens over tensor-parallel ranks: it needs tp > 1"
        if self.is_sequence_split and sequence % tp:
            return f"sequence parallelism: tp {tp} does not divide sequences of {sequence} tokens"
        if pp > shape.layers:
            return f"pp {pp} is more than {shape.layers} layers"
        if ep > 1 and not shape.experts:
            return f"ep {ep}: {shape.name} has no experts"
        if ep > 1 and dp == 1:
            return "expert parallelism shards experts over data-parallel ranks: it needs dp > 1"
        if dp % ep:
            return f"ep {ep} does not divide dp {dp}"
        if shape.experts % ep:
            return f"ep {ep} does not divide {shape.experts} experts"
        return None

    def schedule_fault(self, shape: ModelShape, schedule: str, m: int) -> str | None:
        """Why a schedule does not support so many micro-batches; None if it does."""
        parts = self.pp * STAGES_PER_RANK.get(schedule, 1)
        if shape.layers < parts:
            return (
                f"{schedule}: {parts} stages need {parts} layers or more, and the model has"
                f" {shape.layers}"
            )
        if (problem := schedule_problem(schedule, self.pp, m)) is not None:
            return problem
        least = {"interleaved": self.pp, "zbv": 2 * self.pp}.get(schedule, 0)
        if m < least:  # bubble() does not count these
            return f"{schedule} over {self.pp} ranks: {m} micro-batches are less than {least}"
        return None


def schedule_problem(schedule: str, num_ranks: int, num: int) -> str | None:
    """Why `num` micro-batches cannot run over the ranks of a schedule; None if they can."""
    if schedule == "1f1b" and num < num_ranks:
        return (
            f"1f1b needs at least as many micro-batches as ranks, {num_ranks}; got {num}: use more,"
            ' or schedule="gpipe", which is no slower here'
        )
    if schedule not in ("interleaved", "zero-bubble"):
        return None
    equal = [n for n in range(1, 2 * num + 1) if n % max(1, n // num_ranks) == 0]
    if num in equal:
        return None
    below, above = max(n for n in equal if n < num), min(n for n in equal if n > num)
    return (
        f"{schedule} over {num_ranks} ranks cannot run {num} micro-batches in"
        f" {num // num_ranks} equal rounds: use {below} or {above}"
    )


def bubble(schedule: str, num_stages: int, num_micro_batches: int) -> Fraction:
    """The share of a step in which a rank waits.

    (p - 1) / (m + p - 1), interleaved (p - 1) / (2 m + p - 1); of ZB-V, where weights' gradients
    take what was idle, (p - 1) / (6 m + p - 1) from m = 2p on.
    """
    busy = num_micro_batches * {"interleaved": 2, "zbv": 6}.get(schedule, 1)
    return Fraction(num_stages - 1, busy + num_stages - 1)


def live_micro_batches(schedule: str, num_stages: int, num: int, stage: int) -> Fraction:
    """How many of `num` micro-batches' activations a rank has at most, of all its layers.

    GPipe m; 1F1B min(m, p - i) on rank i; interleaved with r in a round, which a stage runs before
    the rank's next one, (r + 2 p - 2 i - 1) / 2; ZB-V min(m, p) on every rank.
    """
    p, m = num_stages, Fraction(num)
    of_rounds = (m / max(1, num // p) + 2 * (p - stage) - 1) / 2
    live = {"gpipe": m, "zbv": Fraction(p), "interleaved": of_rounds}
    return min(m, live.get(schedule, Fraction(p - stage)))
