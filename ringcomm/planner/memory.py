"""The memory of a rank, by part: weights, gradients, states, and saved activations.

docs/design/planner.md has the table of activations. Tensor parallelism shards activations between
two collectives. Sequence parallelism shards the others too, except the results of norms, which
ringcomm.nn keeps gathered.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from ringcomm.planner.candidate import Candidate
from ringcomm.planner.job import Job, Mesh, live_micro_batches
from ringcomm.planner.models import ModelShape

_TOKEN_ID_BYTES = 8
# Bytes per token in ringcomm's cross-entropy: its class, and six sums in float32.
_LOSS_BYTES = 8 + 6 * 4


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch on one rank."""

    layer: int  # kept by one layer
    boundary: int  # the layer's input alone, which full recomputation keeps
    embedding: int  # before the layers
    head: int  # after the layers: the last norm, the logits, the loss
    logits: int  # the part of `head` whose gradient appears in the backward pass

    def kept(self, checkpointing: str) -> int:
        """Bytes that a layer keeps with this recomputation."""
        return self.boundary if checkpointing == "full" else self.layer


def activations_of(
    shape: ModelShape, job: Job, mesh: Mesh, micro_batch: int, *, fused_norms: bool = True
) -> Activations:
    """Activations of so many sequences at a time; the job has a sequence length.

    Norms keep their input alone if fused; torch's for CPUs keep two float32 numbers per element.
    """
    e, t = job.itemsize, mesh.tp
    tokens = micro_batch * job.sequence
    outside = t if mesh.is_sequence_split else 1  # ranks that share what is between layers
    width = tokens * shape.hidden
    norm = (e if fused_norms else 8) * width // outside + 4 * tokens // outside
    normed = e * width
    masks = width // outside if shape.dropout else 0
    # If there are more ranks than groups of heads, each rank has one group.
    kv_width = max(1, shape.kv_heads // t) * shape.head_dim
    attention = 2 * e * tokens * shape.query_width // t + 2 * e * tokens * kv_width
    attention += 4 * tokens * shape.heads // t
    inner = (4 if shape.gated else 2) * e * shape.ffn
    ffn = tokens * inner // t
    if shape.experts:
        # The router's probabilities, and for each of a token's experts its input and its output.
        ffn = tokens * (4 * shape.experts + shape.top_k * (inner // t + 2 * e * shape.hidden))
    logits = e * tokens * -(-shape.vocab // t)
    return Activations(
        layer=2 * (norm + normed + masks) + attention + ffn,
        boundary=e * width // outside,
        embedding=_TOKEN_ID_BYTES * tokens + masks,
        head=norm + normed + logits + _LOSS_BYTES * tokens,
        logits=logits,
    )


@dataclass(frozen=True)
class RankMemory:
    """Bytes of the rank that needs most; host and disk have offloaded bytes."""

    parameters: int
    gradients: int
    states: int
    activations: int  # for all live micro-batches
    buffers: int  # for gathers, reductions, recomputation, the logits' gradient and messages
    host: int = 0
    disk: int = 0

    @property
    def device(self) -> int:
        """All parts on the device."""
        return sum(getattr(self, field.name) for field in fields(self)[:5])


def memory_of(candidate: Candidate) -> RankMemory:
    """Memory of the fullest rank: of the first stage, or of the last, which has the logits."""
    stages = sorted({0, candidate.head_stage})
    return max((_of_stage(candidate, stage) for stage in stages), key=lambda memory: memory.device)


def _of_stage(candidate: Candidate, stage: int) -> RankMemory:
    c, is_end = candidate, stage == candidate.head_stage
    fused_norms = not c.cluster.hardware.is_host
    acts = activations_of(c.shape, c.job, c.mesh, c.micro_batch, fused_norms=fused_norms)
    layer = acts.kept(c.checkpointing)
    # Temporary memory: a layer's recomputation or the logits' gradient, and messages.
    passing = max(acts.logits * is_end, acts.layer - layer)
    if c.mesh.pp > 1:
        passing += 2 * c.message_bytes
    of_one = c.num_layers(stage) * layer + acts.embedding * (stage == 0)
    of_head = acts.head * is_end
    num_micro_batches = c.num_micro_batches if c.mesh.pp > 1 else 1
    live = live_micro_batches(c.schedule, c.mesh.pp, num_micro_batches, stage)
    # The head's backward pass follows its forward pass, so one micro-batch is live; all with GPipe.
    live_heads = live if c.schedule == "gpipe" else 1
    kept = c.kept(stage)
    return RankMemory(
        parameters=kept.parameters,
        gradients=kept.gradients,
        states=kept.states,
        activations=int(live * of_one) + int(live_heads * of_head),
        buffers=kept.buffers + passing,
        host=kept.elsewhere if c.system.states == "host" else 0,
        disk=kept.elsewhere if c.system.states == "disk" else 0,
    )
