"""The weights of one rank: what it keeps of them, their gradients and states, and sends.

The formulas are those of ringcomm.parallel.zero, which takes a model: here it is one of parameters
alone, on the meta device.
"""

from __future__ import annotations

import operator
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

from ringcomm.planner.job import Job
from ringcomm.planner.mesh import Mesh, System
from ringcomm.planner.models import ModelShape, Unit, Weight

__all__ = [
    "Kept",
    "RankPart",
    "kept_by",
    "kept_bytes",
    "layers_of",
    "rank_part",
    "ring_elems",
    "sent_of_weights",
]


def ring_elems(num_elems: int, num_ranks: int) -> int:
    """Elements that rank 0 sends in an all_reduce: 2 (N - 1) / N of them where N divides.

    Of both halves all chunks go on but its own and its neighbour's; the first ones are longer by
    an element where N does not divide (ringcomm.ops.shard_range).
    """
    base, num_longer = divmod(num_elems, num_ranks)
    stay = 2 * base + min(num_longer, 2) if num_ranks > 1 else 2 * num_elems
    return 2 * num_elems - stay


Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RankPart:
    """Shapes of the weights of a rank, or of those that one group of ranks has alike.

    Attributes:
        before: in front of the layers.
        layer: of one layer.
        num_layers: how many there are.
        after: behind them.
    """

    before: Shapes
    layer: Shapes
    num_layers: int
    after: Shapes

    @property
    def num_elems(self) -> int:
        """Of all."""
        return (
            sum(map(prod, self.before))
            + self.num_layers * sum(map(prod, self.layer))
            + sum(map(prod, self.after))
        )

    @property
    def largest_elems(self) -> int:
        """Of the largest weight."""
        return max((prod(s) for s in (*self.before, *self.layer, *self.after)), default=0)


def layers_of(num_layers: int, num_stages: int, stage: int) -> int:
    """A stage's number of layers; they differ by one, the first ones have more."""
    return num_layers // num_stages + (stage < num_layers % num_stages)


def rank_part(
    shape: ModelShape, mesh: Mesh, stage: int, head_stage: int
) -> tuple[RankPart, RankPart]:
    """The weights of the first rank of a pipeline's stage: those of its data group, and experts.

    Args:
        shape: of the model.
        mesh: that mesh_fault() has nothing against.
        stage: of the pipeline.
        head_stage: the one that has the model's end.
    """
    num_layers = layers_of(shape.layers, mesh.pp, stage)
    is_last = stage == head_stage
    before = [shape.embedding] if stage == 0 else []
    after = [shape.head] if is_last else []
    # A head that is the embedding is on both ends of a pipeline.
    if shape.tied and is_last and stage != 0:
        after.append(Unit("embedding", shape.embedding.weights[:1]))

    def shapes(units: list[Unit], *, experts: bool) -> Shapes:
        return tuple(
            _cut(weight, shape, mesh)
            for unit in units
            for weight in unit.weights
            if weight.is_expert == experts
        )

    dense, expert = (
        RankPart(
            shapes(before, experts=is_expert),
            shapes([shape.layer], experts=is_expert),
            num_layers,
            shapes(after, experts=is_expert),
        )
        for is_expert in (False, True)
    )
    return dense, expert


def _cut(weight: Weight, shape: ModelShape, mesh: Mesh) -> tuple[int, ...]:
    """A weight's shape on the first rank of a tensor-parallel group."""
    sizes = list(weight.shape)
    if weight.is_expert:
        sizes[0] //= mesh.ep
    if mesh.tp > 1 and weight.split is not None:
        if weight.split == "kv_heads":
            sizes[0] = max(1, shape.kv_heads // mesh.tp) * shape.head_dim
        elif weight.split == "heads":
            sizes[0] //= mesh.tp
        else:
            dim = weight.is_expert + (weight.split == "columns")
            sizes[dim] = -(-sizes[dim] // mesh.tp)
    # Experts one below the other, as matrices of their own are: shards are of whole rows.
    return (sizes[0] * sizes[1], sizes[2]) if weight.is_expert else tuple(sizes)


CHUNK_ELEMS = 1 << 20  # of an offloaded update: ringcomm.parallel.offload.AdamW's default
LOMO_REDUCE_BYTES = 4  # of an element: the default of Lomo's reduce_dtype
NUM_CHUNKS = 3  # one comes, one is at work, one goes


@dataclass(frozen=True)
class Kept:
    """Bytes of a rank.

    Attributes:
        parameters, gradients, states: on the device.
        buffers: what gathers, reduces and updates go through.
        elsewhere: what an offloading system keeps in host memory or on disks.
        streamed: what goes to and comes from there for an update.
        streamed_each: what does so for every micro-batch.
    """

    parameters: int = 0
    gradients: int = 0
    states: int = 0
    buffers: int = 0
    elsewhere: int = 0
    streamed: int = 0
    streamed_each: int = 0

    def __add__(self, other: Kept) -> Kept:
        return Kept(*map(operator.add, astuple(self), astuple(other)))

    def __sub__(self, other: Kept) -> Kept:
        return Kept(*map(operator.sub, astuple(self), astuple(other)))


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
    if system.stage == 3 and part.num_layers > 2:
        # A layer is a unit, and adds what every other one does: large models need not be built.
        one, two = (kept_by(replace(part, num_layers=n), system, job, world_size) for n in (1, 2))
        added = replace(two - one, buffers=0)
        return two + _times(part.num_layers - 2, added)
    if system.weights != "device":
        return _of_infinity(part, job, world_size)
    return _of_zero(part, system, job, world_size)


def _of_zero(part: RankPart, system: System, job: Job, world_size: int) -> Kept:
    from ringcomm.parallel import zero

    model, optimizer = _model(part, 4, job.optimizer)
    options: Any = {"world_size": world_size, "param_dtype": _param_dtype(job)}
    memory = zero.predict_memory(model, optimizer, system.stage, **options)
    states = memory.states
    if system.stage == 0 and job.itemsize == 2:
        states += 4 * part.num_elems  # masters, which replicas keep as well
    buffers = memory.buffers
    if system.stage == 0 and world_size > 1:
        buffers += memory.gradients  # DistributedDataParallel's buckets, unless it is told to share
    if not system.is_offloaded:
        return Kept(memory.parameters, memory.gradients, states, buffers)
    return Kept(
        memory.parameters,
        memory.gradients,
        0,
        memory.buffers + min(_chunk_bytes(job), states),
        elsewhere=states,
        streamed=2 * states,
    )


def _times(count: int, kept: Kept) -> Kept:
    return Kept(*(count * number for number in astuple(kept)))


def _chunk_bytes(job: Job) -> int:
    return NUM_CHUNKS * CHUNK_ELEMS * job.state_bytes


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
        both = job.itemsize * ring_elems(part.num_elems, world_size)
        if not system.is_lomo:
            return both
        reduced = LOMO_REDUCE_BYTES * ring_elems(part.num_elems, world_size) // 2
        return reduced + (both if system.stage == 3 else both // 2)
    from ringcomm.parallel import zero

    is_elsewhere = system.weights != "device"
    model, optimizer = _model(part, job.itemsize if is_elsewhere else 4, job.optimizer)
    arguments: Any = {"world_size": world_size}
    if is_elsewhere:
        arguments["offload_weights"] = True
    else:
        arguments["param_dtype"] = _param_dtype(job)
    return zero.predict_traffic(
        model, optimizer, system.stage, num_backwards=num_micro_batches, **arguments
    )


def _of_lomo(part: RankPart, system: System, job: Job, world_size: int) -> Kept:
    """16-bit weights are updated as they are; the gradient that lives is the largest.

    Ranks reduce it in float32.
    """
    e = job.itemsize
    is_cast = e != LOMO_REDUCE_BYTES and world_size > 1
    gradient = (e + LOMO_REDUCE_BYTES * is_cast) * part.largest_elems
    if system.stage == 0:
        return Kept(e * part.num_elems, gradient)
    # The weights outside of layers stay whole, as in ringcomm.parallel.WeightShards; and a layer's.
    ends = RankPart(part.before, (), 0, part.after).num_elems
    unit = RankPart((), part.layer, 1, ()).num_elems
    return Kept(-(-e * part.num_elems // world_size), gradient, buffers=e * (ends + unit))


def _of_infinity(part: RankPart, job: Job, world_size: int) -> Kept:
    from ringcomm.parallel import zero

    model, optimizer = _model(part, job.itemsize, job.optimizer)
    memory = zero.predict_memory(model, optimizer, 3, world_size=world_size, offload_weights=True)
    shard = -(-part.num_elems // world_size)
    states, weights = shard * job.state_bytes, shard * job.itemsize
    gradients = 4 * shard  # zero.shard() accumulates and reduces in float32
    return Kept(
        memory.parameters,
        memory.gradients,
        0,
        memory.buffers + min(_chunk_bytes(job), states),
        elsewhere=states + weights + gradients,
        # States and weights both ways. Weights come for both passes; a gradient goes and comes
        # back, for the next one to be added or for the update.
        streamed=2 * states + 2 * weights,
        streamed_each=2 * weights + 2 * gradients,
    )


def _param_dtype(job: Job) -> Any:
    import torch

    return torch.bfloat16 if job.itemsize == 2 else None


@lru_cache(maxsize=1024)
def _model(part: RankPart, itemsize: int, optimizer: str) -> Any:
    """Parameters of these shapes without memory: before, a unit per layer, after; an optimizer."""
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
    if optimizer == "adamw":
        return model, torch.optim.AdamW(model.parameters(), 1e-3)
    return model, torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
