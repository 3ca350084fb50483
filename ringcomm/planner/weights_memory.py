"""Weights, gradients and states of a rank, and what it sends of them, by ringcomm.parallel.zero.

The predictions of zero take a model: here it is one of parameters alone, on the meta device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ringcomm.planner.job import Job
from ringcomm.planner.rank_part import RankPart, Shapes
from ringcomm.planner.systems import System

__all__ = ["Kept", "kept_bytes", "kept_by", "sent_of_weights"]

CHUNK_ELEMS = 1 << 20  # of an offloaded update: ringcomm.parallel.offload.AdamW's default
NUM_CHUNKS = 3  # one comes, one is at work, one goes


@dataclass(frozen=True)
class Kept:
    """Bytes of a rank.

    Attributes:
        parameters, gradients, states: on the device.
        buffers: what gathers, reduces and updates go through.
        elsewhere: what an offloading system keeps in host memory or on disks.
        streamed: what goes to and comes from there in a step.
    """

    parameters: int = 0
    gradients: int = 0
    states: int = 0
    buffers: int = 0
    elsewhere: int = 0
    streamed: int = 0

    def __add__(self, other: Kept) -> Kept:
        return Kept(*(a + b for a, b in zip(_tuple(self), _tuple(other), strict=True)))


def _tuple(kept: Kept) -> tuple[int, ...]:
    return (
        kept.parameters,
        kept.gradients,
        kept.states,
        kept.buffers,
        kept.elsewhere,
        kept.streamed,
    )


def kept_bytes(num_params: int, system: System, job: Job, world_size: int = 1) -> Kept:
    """Of so many weights in one piece; without a model's shapes, rounding and buffers are unlike.

    kept_bytes(7_000_000_000, SYSTEMS["ddp"], job) is the 16 bytes a weight of mixed precision.
    """
    return kept_by(RankPart((), ((num_params,),), 1, ()), system, job, world_size)


@lru_cache(maxsize=4096)
def kept_by(part: RankPart, system: System, job: Job, world_size: int) -> Kept:
    """What a rank keeps of its weights when so many ranks have the same ones.

    Raises:
        ValueError: there is no such world size.
    """
    if not part.num_elems:
        return Kept()
    if system.is_lomo:
        return _of_lomo(part, system, job, world_size)
    if system.weights != "device":
        return _of_infinity(part, job, world_size)
    from ringcomm.parallel import zero

    model = _model(part, itemsize=4)
    memory = zero.predict_memory(
        model,
        _optimizer(model, job),
        system.stage,
        world_size=world_size,
        param_dtype=_param_dtype(job),
    )
    states = memory.states
    if system.stage == 0 and job.itemsize == 2:
        states += 4 * part.num_elems  # masters, which replicas keep as well
    if not system.is_offloaded:
        return Kept(memory.parameters, memory.gradients, states, memory.buffers)
    chunks = NUM_CHUNKS * CHUNK_ELEMS * job.state_bytes
    return Kept(
        memory.parameters,
        memory.gradients,
        0,
        memory.buffers + min(chunks, states),
        elsewhere=states,
        streamed=2 * states,
    )


@lru_cache(maxsize=4096)
def sent_of_weights(
    part: RankPart, system: System, job: Job, world_size: int, num_micro_batches: int
) -> int:
    """Bytes that a rank sends of weights and gradients in a step.

    2 (N - 1) / N of them, of replicas and at stages 1 and 2; 3 (N - 1) / N at stage 3. Stage 2
    reduces, and stage 3 gathers and reduces, in every micro-batch.
    """
    if not part.num_elems or world_size == 1:
        return 0
    if system.is_lomo or system.stage == 0:
        shares = 3 if system.stage == 3 else 2
        return shares * (world_size - 1) * job.itemsize * part.num_elems // world_size
    from ringcomm.parallel import zero

    if system.weights != "device":
        model, options = _model(part, job.itemsize), {"offload_weights": True}
    else:
        model, options = _model(part, itemsize=4), {"param_dtype": _param_dtype(job)}
    arguments: Any = {"world_size": world_size, **options}
    once = zero.predict_traffic(model, _optimizer(model, job), system.stage, **arguments)
    if system.stage == 3:
        return num_micro_batches * once
    if system.stage == 1:
        return once
    shards = zero.predict_memory(model, _optimizer(model, job), 2, **arguments).gradients
    gathered = (world_size - 1) * shards
    return gathered + num_micro_batches * (once - gathered)


def _of_lomo(part: RankPart, system: System, job: Job, world_size: int) -> Kept:
    """16-bit weights are updated as they are; the gradient that lives is the largest."""
    e = job.itemsize
    gradient = e * part.largest_elems
    if system.stage == 0:
        return Kept(e * part.num_elems, gradient)
    # The weights outside of layers stay whole, as in ringcomm.parallel.WeightShards; and a layer's.
    ends = RankPart(part.before, (), 0, part.after).num_elems
    unit = RankPart((), part.layer, 1, ()).num_elems
    return Kept(-(-e * part.num_elems // world_size), gradient, buffers=e * (ends + unit))


def _of_infinity(part: RankPart, job: Job, world_size: int) -> Kept:
    from ringcomm.parallel import zero

    model = _model(part, job.itemsize)
    memory = zero.predict_memory(
        model, _optimizer(model, job), 3, world_size=world_size, offload_weights=True
    )
    shard = -(-part.num_elems // world_size)
    states, weights = shard * job.state_bytes, shard * job.itemsize
    chunks = NUM_CHUNKS * CHUNK_ELEMS * job.state_bytes
    return Kept(
        memory.parameters,
        memory.gradients,
        0,
        memory.buffers + min(chunks, states),
        elsewhere=states + 2 * weights,
        # States both ways; weights come for both passes and the update, which writes them;
        # gradients go and come back.
        streamed=2 * states + 6 * weights,
    )


def _param_dtype(job: Job) -> Any:
    import torch

    return torch.bfloat16 if job.itemsize == 2 else None


@lru_cache(maxsize=1024)
def _model(part: RankPart, itemsize: int) -> Any:
    """Parameters of these shapes without memory: before, a unit per layer, after."""
    import torch
    from torch import nn

    dtype = torch.bfloat16 if itemsize == 2 else torch.float32

    class Unit(nn.Module):
        def __init__(self, shapes: Shapes) -> None:
            super().__init__()
            for i, shape in enumerate(shapes):
                empty = torch.empty(shape, dtype=dtype, device="meta")
                self.register_parameter(f"weight{i}", nn.Parameter(empty))

        def forward(self) -> None:
            """A unit is something that one can call."""

    model = Unit(())
    model.before = Unit(part.before)
    model.layers = nn.ModuleList(Unit(part.layer) for _ in range(part.num_layers))
    model.after = Unit(part.after)
    return model


def _optimizer(model: Any, job: Job) -> Any:
    import torch

    if job.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), 1e-3)
    return torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
