"""The training systems that `ringcomm bench systems` compares, and the step that all train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import trainees
from decoder import HEAD_WIDTH, config_of
from model import Llama
from operations import RINGCOMM
from torch import Tensor
from trainees import FAKE, Trainee

from ringcomm import planner
from ringcomm.planner.hardware import HARDWARE, Hardware
from ringcomm.planner.models import ModelShape
from ringcomm.planner.plans import Plan

GLOO = "gloo"


class Planned(NamedTuple):
    """What the planner knows a system by: its name there, and the mesh's one axis."""

    system: str = "ddp"
    axis: str = "dp"
    shares_tokens: bool = False


@dataclass(frozen=True)
class System:
    """A way to train on several ranks.

    Attributes:
        make: from a model and its group.
        planned: by which the planner computes what a rank sends in a step; None if it cannot.
        like: whose losses it has to have.
        others: supported backends besides ringcomm.
        is_counted: whether what a rank sends belongs to one step; a server answers when asked.
        sees_all: whether each rank is given the rows of all.
    """

    make: Callable[[Llama, dist.ProcessGroup], Trainee]
    planned: Planned | None = None
    like: Callable[[Llama], Any] = trainees.adamw_of
    others: tuple[str, ...] = ()
    is_counted: bool = True
    sees_all: bool = False


_PORTABLE = (GLOO, FAKE)


def _by(planned: str | None, make: Any, **options: Any) -> System:
    """A way that shards or averages over ranks of any backend."""
    return System(make, None if planned is None else Planned(planned), others=_PORTABLE, **options)


SYSTEMS: dict[str, System] = {
    "ddp": _by("ddp", trainees.ddp),
    "ddp blocking": _by("ddp", partial(trainees.ddp, blocks=True)),
    "torch's zero-1": _by("zero3", trainees.torch_zero1),  # as many bytes: it also broadcasts
    "zero-1": _by("zero1", partial(trainees.sharded, stage=1)),
    "zero-2": _by("zero2", partial(trainees.sharded, stage=2)),
    "zero-3": _by("zero3", partial(trainees.sharded, stage=3)),
    "zero-3 in files": System(trainees.offloaded, Planned("infinity-nvme")),
    "parameter server": System(
        lambda model, group: Trainee(model, model, trainees.Served(model, group)),
        Planned(),
        is_counted=False,
    ),
    "lomo": _by("lomo", trainees.lomo, like=trainees.sgd_of),
    "lomo on shards": _by("lomo-shards", trainees.lomo_on_shards, like=trainees.sgd_of),
    "tensor": System(trainees.in_parts, Planned(axis="tp"), others=_PORTABLE, sees_all=True),
    "tensor, tokens shared": System(
        partial(trainees.in_parts, shares_tokens=True),
        Planned(axis="tp", shares_tokens=True),
        others=(GLOO,),
        sees_all=True,
    ),
    "pipeline": System(trainees.Piped, Planned(axis="pp"), others=(GLOO,), sees_all=True),
}
# What is measured unless something else is asked for: all over ringcomm, and torch's over Gloo.
DEFAULT = [name for name in SYSTEMS if name != "ddp blocking"]
DEFAULT.insert(2, f"torch's zero-1 on {GLOO}")
# Not Muon: without AVX-512 a product of bfloat16 matrices takes 30 to 70 times as long as one of
# float32, and a step takes seconds.
_MUON: Any = {"like": trainees.both_of}
_CLIPPED: Any = {"clip_grad_norm": trainees.CLIP_NORM}
SYSTEMS |= {
    "muon ddp": _by("ddp", partial(trainees.ddp, optimizer_of=trainees.both_of), **_MUON),
    **{
        f"muon zero-{stage}": _by(
            # At stage 3 matrices also go to their owner and back.
            f"zero{stage}" if stage < 3 else None,
            partial(trainees.sharded, stage=stage, optimizer_of=trainees.muon_of),
            **_MUON,
        )
        for stage in (1, 2, 3)
    },
    # Other optimizers in the backward pass, and torch's beside them.
    "lomo, overlapped": _by("lomo", partial(trainees.lomo, overlap=True), like=trainees.sgd_of),
    "lomo, clip deferred": _by(
        "lomo", partial(trainees.lomo, **_CLIPPED), like=trainees.clipped_sgd_of
    ),
    "lomo, clip two_pass": _by(
        None,
        partial(trainees.lomo, **_CLIPPED, clip_mode="two_pass"),
        like=trainees.clipped_sgd_of,
    ),
    "adalomo": _by("lomo", trainees.adalomo, like=trainees.adalomo_of),
    "sgd": _by("ddp", partial(trainees.ddp, optimizer_of=trainees.sgd_of), like=trainees.sgd_of),
    "sgd, clip": _by(
        "ddp",
        partial(trainees.ddp, optimizer_of=trainees.clipped_sgd_of),
        like=trainees.clipped_sgd_of,
    ),
    # torch's tensor parallelism, plain as in its tutorial, and with joined inputs.
    **{
        f"tensor by DTensor{words}": System(
            partial(trainees.ByDTensor, joins_inputs=bool(words)), sees_all=True
        )
        for words in ("", ", inputs joined")
    },
}


def parse_name(name: str) -> tuple[str, str]:
    """``"ddp on gloo"`` as system and backend; without one over ringcomm. Raises ValueError."""
    if name in SYSTEMS:
        return name, RINGCOMM
    system, _, backend = name.rpartition(" on ")
    if system not in SYSTEMS:
        raise ValueError(f"--systems must be some of {'; '.join(SYSTEMS)}, got {name!r}")
    if backend not in SYSTEMS[system].others:
        others = " and ".join(SYSTEMS[system].others) or "ringcomm alone"
        raise ValueError(f"--systems: {system} runs with {others} only, got {backend!r}")
    return system, backend


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The Llama that all systems train, and each rank's batch of rows × tokens.

    Attributes:
        names: systems, over ringcomm or "SYSTEM on BACKEND"; others are compared with the first.
    """

    names: list[str]
    world_size: int
    width: int
    num_layers: int
    rows: int
    tokens: int

    def check(self) -> None:
        """Raises ValueError naming an invalid option."""
        if not self.names:
            raise ValueError(f"--systems must be some of {'; '.join(SYSTEMS)}, got none")
        systems = [parse_name(name)[0] for name in self.names]
        if min(self.world_size, self.num_layers, self.rows, self.tokens) < 1:
            raise ValueError("needs at least one rank, one layer, one row and one token")
        if self.width < HEAD_WIDTH or self.width % HEAD_WIDTH:
            raise ValueError(f"--width must be a multiple of {HEAD_WIDTH}, got {self.width}")
        num, in_parts = self.world_size, [n for n in systems if n.startswith("tensor")]
        if in_parts and (self.width // HEAD_WIDTH < num or self.tokens % num):
            raise ValueError(
                f"{' and '.join(in_parts)} need a head of {HEAD_WIDTH} features for each of {num}"
                f" ranks, and a number of tokens that is a multiple of {num}: change --width,"
                " --tokens or --systems"
            )
        if any("DTensor" in name for name in systems) and self.width // HEAD_WIDTH % num:
            raise ValueError(
                f"DTensor needs a number of heads of {HEAD_WIDTH} features that is a multiple of"
                f" {num} ranks: change --width or --systems"
            )
        if "pipeline" in systems and self.num_layers + 3 < num:
            raise ValueError(
                f"{self.num_layers} layers are too few for {num} pipeline stages, one for each rank"
            )

    @property
    def num_tokens(self) -> int:
        """Of all ranks, in a step."""
        return self.world_size * self.rows * self.tokens

    def model(self) -> Llama:
        """The same on every rank."""
        return Llama(config_of(self.width, self.num_layers))

    def shape(self) -> ModelShape:
        """The model's, as the planner has it."""
        config = self.model().config
        return ModelShape(
            "llama",
            layers=config.num_layers,
            hidden=config.dim,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            ffn=config.ffn_dim,
            vocab=config.vocab_size,
            context=self.tokens,
        )

    def plan(self, name: str, hardware: Hardware = HARDWARE["cpu-core"]) -> Plan | None:
        """A system's step as the planner has it; None if it cannot plan the system."""
        planned = SYSTEMS[name].planned
        if planned is None or self.world_size == 1:
            return None
        axes: Any = {"dp": 1, "pp": 1, "tp": 1} | {planned.axis: self.world_size}
        job = planner.Job(
            self.num_tokens,
            self.tokens,
            "fp32",
            systems=(planned.system,),
            schedules=("1f1b",),
            checkpointings=("none",),
            is_sequence_split=planned.shares_tokens,
            **axes,
        )
        return planner.plan(self.shape(), planner.Cluster(self.world_size, hardware), job).best

    def ids(self, step: int) -> Tensor:
        """All ranks' rows of a step."""
        generator = torch.Generator().manual_seed(step)
        return torch.randint(
            256, [self.world_size * self.rows, self.tokens + 1], generator=generator
        )

    def ids_for(self, system: System, step: int, rank: int) -> Tensor:
        """The ids of a rank."""
        ids = self.ids(step)
        return ids if system.sees_all else ids[rank * self.rows : (rank + 1) * self.rows]

    def backward_alone(self) -> Callable[[], None]:
        """A call that makes forward and backward passes of a rank's rows, and nothing else."""
        model, ids = self.model(), self.ids(0)[: self.rows]

        def call() -> None:
            model(ids[:, :-1], ids[:, 1:]).backward()
            model.zero_grad()

        return call
