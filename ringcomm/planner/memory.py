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
    layer = 2 * (norm + normed + masks) + attention + _ffn_bytes(shape, job, t, tokens)
    logits = e * tokens * -(-shape.vocab // t)
    return Activations(
        layer=layer,
        boundary=e * width // outside,
        embedding=_TOKEN_ID_BYTES * tokens + masks,
        head=norm + normed + logits + _LOSS_BYTES * tokens,
        logits=logits,
    )


def _ffn_bytes(shape: ModelShape, job: Job, tp: int, tokens: int) -> int:
    """Bytes that the feed-forward layer keeps besides its input."""
    inner = (4 if shape.gated else 2) * job.itemsize * shape.ffn
    if not shape.experts:
        return tokens * inner // tp
    # The router's probabilities, and for each of a token's experts its input and its output.
    routed = shape.top_k * (inner // tp + 2 * job.itemsize * shape.hidden)
    return tokens * (4 * shape.experts + routed)


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
    found = [memory_of_stage(candidate, stage) for stage in stages]
    return max(found, key=lambda memory: memory.device)


def memory_of_stage(candidate: Candidate, stage: int) -> RankMemory:
    """Memory of a rank of one stage of the pipeline."""
    kept = candidate.kept(stage)
    c, is_host = candidate, candidate.cluster.hardware.is_host
    acts = activations_of(c.shape, c.job, c.mesh, c.micro_batch, fused_norms=not is_host)
    # Temporary memory: a layer's recomputation or the logits' gradient, and messages.
    logits = acts.logits if stage == candidate.head_stage else 0
    passing = max(logits, acts.layer - acts.kept(candidate.checkpointing))
    if candidate.mesh.pp > 1:
        passing += 2 * candidate.message_bytes
    return RankMemory(
        parameters=kept.parameters,
        gradients=kept.gradients,
        states=kept.states,
        activations=_alive(candidate, acts, stage),
        buffers=kept.buffers + passing,
        host=kept.elsewhere if candidate.system.states == "host" else 0,
        disk=kept.elsewhere if candidate.system.states == "disk" else 0,
    )


def _alive(candidate: Candidate, acts: Activations, stage: int) -> int:
    """Activations of all micro-batches that a stage has in flight."""
    pp, schedule = candidate.mesh.pp, candidate.schedule
    of_one = candidate.num_layers(stage) * acts.kept(candidate.checkpointing)
    of_one += acts.embedding if stage == 0 else 0
    m = candidate.num_micro_batches if pp > 1 else 1
    live = live_micro_batches(schedule, pp, m, stage)
    # The head's backward pass follows its forward pass, so one micro-batch is live; all with GPipe.
    of_head = acts.head if stage == candidate.head_stage else 0
    if schedule == "gpipe":
        return int(live * (of_one + of_head))
    return int(live * of_one) + of_head
