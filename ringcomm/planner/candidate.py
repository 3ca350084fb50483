"""A candidate plan and the weights of its ranks: memory and traffic.

The formulas are those of ringcomm.parallel.zero, called with a model that has only parameters, on
the meta device.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

from ringcomm.planner.hardware import Cluster, Group
from ringcomm.planner.job import SYSTEMS, Job, Mesh, System, bubble
from ringcomm.planner.models import ModelShape, Weight

CHUNK_ELEMS = 1 << 20  # per chunk of an offloaded update: that of offload.Offloaded
LOMO_REDUCE_BYTES = 4  # per element: the default of Lomo's reduce_dtype
NUM_CHUNKS = 3  # one is read, one updated, one written
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Candidate:
    """A combination of system, mesh and schedule to predict."""

    shape: ModelShape
    cluster: Cluster
    job: Job
    system: System
    mesh: Mesh
    schedule: str  # the pipeline's; "" without a pipeline
    checkpointing: str  # "none", or "full" for layers that are recomputed
    num_micro_batches: int  # per step and replica
    micro_batch: int  # sequences per micro-batch

    @property
    def name(self) -> str:
        """The system and its mesh, such as "zero1, dp 4 × tp 2 × sp"."""
        return f"{self.system.label(self.mesh)}, {self.mesh}"

    @property
    def complexity(self) -> tuple[int, bool, int]:
        """An order by the number of axes, pipelines after others, then by position in SYSTEMS."""
        mesh = self.mesh
        num_axes = sum(size > 1 for size in (mesh.dp, mesh.pp, mesh.tp, mesh.ep))
        return num_axes, mesh.pp > 1, list(SYSTEMS).index(self.system.name)

    @property
    def bubble(self) -> float:
        """The share of a step in which a rank of the pipeline waits."""
        return float(bubble(self.schedule, self.mesh.pp, self.num_micro_batches))

    @property
    def head_stage(self) -> int:
        """The pipeline stage with the end of the model: in V form the first one."""
        return 0 if self.schedule == "zbv" else self.mesh.pp - 1

    @property
    def message_bytes(self) -> int:
        """Bytes between layers for a micro-batch."""
        return self.job.itemsize * self.micro_batch * self.job.sequence * self.shape.hidden

    @property
    def routed_bytes(self) -> int:
        """Bytes of a rank's tokens for a layer's experts per micro-batch, with even routing."""
        sharers = self.mesh.tp if self.mesh.is_sequence_split else 1
        return self.message_bytes * self.shape.top_k // sharers

    def num_layers(self, stage: int) -> int:
        """Layers of a stage; they differ by one, and the first stages have more."""
        layers, pp = self.shape.layers, self.mesh.pp
        return layers // pp + (stage < layers % pp)

    def parts(self, stage: int) -> tuple[tuple[RankPart, int], tuple[RankPart, int]]:
        """The weights of a stage's first rank, and how many ranks have them: dense, and experts."""
        shape, mesh, is_end = self.shape, self.mesh, stage == self.head_stage
        before = shape.embedding if stage == 0 else ()
        after = shape.head if is_end else ()
        if shape.tied and is_end and stage != 0:
            after += shape.embedding[:1]  # a tied embedding is on the first and the last stage

        def part(is_expert: bool) -> RankPart:
            shapes = [
                tuple(_cut(w, shape, mesh) for w in unit if w.is_expert == is_expert)
                for unit in (before, shape.layer, after)
            ]
            return RankPart(shapes[0], shapes[1], self.num_layers(stage), shapes[2])

        return (part(False), mesh.dp), (part(True), mesh.dp // mesh.ep)

    def kept(self, stage: int) -> Kept:
        """Weights, gradients and states of a stage's ranks."""
        dense, experts = (kept_by(p, self.system, self.job, n) for p, n in self.parts(stage))
        return dense + experts

    def group(self, axis: str) -> Group:
        """The first rank's group of an axis; "replicas" have the same experts."""
        dp, tp, ep = self.mesh.dp, self.mesh.tp, self.mesh.ep
        sizes = {
            "tp": (tp, 1),
            "dp": (dp, tp),
            "ep": (ep, tp),
            "replicas": (dp // ep, tp * ep),
            "pp": (self.mesh.pp, tp * dp),
        }
        return self.cluster.group(*sizes[axis])


def ring_elems(num_elems: int, num_ranks: int) -> int:
    """Elements that rank 0 sends in an all_reduce: 2 (N - 1) / N of them where N divides.

    In one half it sends all chunks except its own, in the other all except its neighbour's. The
    first chunks have one more element if N does not divide (ringcomm.ops.shard_range).
    """
    if num_ranks == 1:
        return 0
    base, num_longer = divmod(num_elems, num_ranks)
    return 2 * num_elems - 2 * base - min(num_longer, 2)


@dataclass(frozen=True)
class RankPart:
    """Shapes of a rank's weights: before the layers, of one layer, and after the layers."""

    before: Shapes
    layer: Shapes
    num_layers: int
    after: Shapes

    @property
    def num_elems(self) -> int:
        """Elements of all weights."""
        ends = sum(map(prod, (*self.before, *self.after)))
        return ends + self.num_layers * sum(map(prod, self.layer))


def _cut(weight: Weight, shape: ModelShape, mesh: Mesh) -> tuple[int, ...]:
    """A weight's shape on the first rank of a tensor-parallel group."""
    sizes = list(weight.shape)
    if weight.is_expert:
        sizes[0] //= mesh.ep
    if mesh.tp > 1 and weight.split is not None:
        if weight.split == "kv_heads":  # if there are more ranks than groups, each rank has one
            sizes[0] = max(1, shape.kv_heads // mesh.tp) * shape.head_dim
        elif weight.split == "heads":
            sizes[0] //= mesh.tp
        else:
            dim = weight.is_expert + (weight.split == "columns")
            sizes[dim] = -(-sizes[dim] // mesh.tp)
    # Experts are stacked by rows, like separate matrices: shards have whole rows.
    return (sizes[0] * sizes[1], sizes[2]) if weight.is_expert else tuple(sizes)


@dataclass(frozen=True)
class Kept:
    """Bytes of a rank, on the device unless noted."""

    parameters: int = 0
    gradients: int = 0
    states: int = 0
    buffers: int = 0  # for gathers, reductions and updates
    elsewhere: int = 0  # in host memory or on disks
    streamed: int = 0  # moved from and to `elsewhere` for an update
    streamed_each: int = 0  # moved for every micro-batch

    def __add__(self, other: Kept) -> Kept:
        return Kept(*map(operator.add, vars(self).values(), vars(other).values()))


@lru_cache(maxsize=4096)
def kept_by(part: RankPart, system: System, job: Job, world_size: int) -> Kept:
    """The memory of a rank for its weights, which `world_size` ranks share."""
    if not part.num_elems:
        return Kept()
    if system.is_lomo:
        return _of_lomo(part, system, job, world_size)
    if system.stage == 3 and part.num_layers > 2:
        # All layers add the same, so large models need not be built.
        one, two = (kept_by(replace(part, num_layers=n), system, job, world_size) for n in (1, 2))
        more = part.num_layers - 2
        pairs = zip(vars(one).values(), vars(two).values(), strict=True)
        return replace(Kept(*(b + more * (b - a) for a, b in pairs)), buffers=two.buffers)
    memory = _zero("predict_memory", part, system, job, world_size)
    states, buffers = memory.states, memory.buffers
    if system.stage == 0 and job.itemsize == 2:
        states += 4 * part.num_elems  # master weights, which every replica keeps
    if system.stage == 0 and world_size > 1:
        buffers += memory.gradients  # DDP's buckets, without gradient_as_bucket_view
    if system.states == "device":
        return Kept(memory.parameters, memory.gradients, states, buffers)
    weights = gradients = 0  # shards of them elsewhere
    if system.weights != "device":
        shard = -(-part.num_elems // world_size)
        states, weights = shard * job.state_bytes, shard * job.itemsize
        gradients = 4 * shard  # zero.shard() accumulates and reduces in float32
    return Kept(
        memory.parameters,
        memory.gradients,
        buffers=buffers + min(NUM_CHUNKS * CHUNK_ELEMS * job.state_bytes, states),
        elsewhere=states + weights + gradients,
        # States and weights move both ways. Both passes read weights. A gradient is written, then
        # read to add the next one or to update.
        streamed=2 * states + 2 * weights,
        streamed_each=2 * weights + 2 * gradients,
    )


def _of_lomo(part: RankPart, system: System, job: Job, world_size: int) -> Kept:
    """16-bit weights without masters; the live gradient is the largest, reduced in float32."""
    e = job.itemsize
    is_cast = e != LOMO_REDUCE_BYTES and world_size > 1
    largest = max(map(prod, (*part.before, *part.layer, *part.after)))
    gradient = (e + LOMO_REDUCE_BYTES * is_cast) * largest
    if system.stage == 0:
        return Kept(e * part.num_elems, gradient)
    # Weights outside layers stay gathered, as in the root of fully_shard, plus one layer's.
    gathered = e * replace(part, num_layers=1).num_elems
    return Kept(-(-e * part.num_elems // world_size), gradient, buffers=gathered)


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
    if not system.is_lomo and system.stage:
        times = {"num_backwards": num_micro_batches}
        return int(_zero("predict_traffic", part, system, job, world_size, **times))
    elems = ring_elems(part.num_elems, world_size)
    if not system.is_lomo:
        return job.itemsize * elems
    return LOMO_REDUCE_BYTES * elems // 2 + job.itemsize * elems // (1 if system.stage == 3 else 2)


def _zero(
    function: str, part: RankPart, system: System, job: Job, world_size: int, **options: Any
) -> Any:
    """A prediction of ringcomm.parallel.zero."""
    import torch

    from ringcomm.parallel import zero

    is_offloaded = system.weights != "device"
    if is_offloaded:
        options["offload_weights"] = True
    elif job.itemsize == 2:
        options["param_dtype"] = torch.bfloat16
    model, optimizer = _model(part, job.itemsize if is_offloaded else 4, job.optimizer)
    return getattr(zero, function)(model, optimizer, system.stage, world_size=world_size, **options)


@lru_cache(maxsize=1024)
def _model(part: RankPart, itemsize: int, optimizer: str) -> Any:
    """Parameters of these shapes without memory: before, a unit per layer, after; an optimizer."""
    import torch
    from torch import nn

    dtype = torch.bfloat16 if itemsize == 2 else torch.float32

    class Unit(nn.ParameterList):
        def forward(self) -> None:
            """A unit is something that one can call."""

    def unit(shapes: Shapes) -> Unit:
        return Unit(torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)

    layers = nn.ModuleList(unit(part.layer) for _ in range(part.num_layers))
    model = nn.Sequential(unit(part.before), layers, unit(part.after))
    if optimizer == "adamw":
        return model, torch.optim.AdamW(model.parameters(), 1e-3)
    return model, torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
