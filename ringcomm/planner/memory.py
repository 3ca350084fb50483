"""The memory of a rank, by part: weights, gradients, states, and what a forward pass keeps.

Activations, in bytes of a micro-batch:

Korthikanti et al. 2022 (arXiv 2205.05198) have sbh (34 + 5 a s / h) for a layer of GPT in 16 bits:
s tokens, b sequences, h hidden, a heads. With their terms, by who has them:

    GPT     all ranks   two norms' inputs 4, what they give 4, two masks of dropout 2         10
            shared      queries, keys, values 6, attention's result 2, GELU's input 8 and
                        output 8                                                              24
                        softmax 2, its mask 1, its dropped output 2, per head and pair        5as/h

A layer of Llama has no dropout and no GELU, g = kv_heads / heads, f = ffn:

    Llama   all ranks   two norms' inputs 4, what they give 4                                  8
            shared      queries 2, keys and values 4g, attention's result 2           4 + 4g
                        gate 2, up 2, silu(gate) 2, their product 2, per f/h               8f/h

so sbh (12 + 4g + 8 f/h), and 2 a s / h more without flash attention, which keeps 4 bytes per token
and head (log-sum-exp) in place of s × s matrices; norms keep 4 per token. t ranks of tensor
parallelism share the second part, those of sequence parallelism both, but for what the norms give,
which ringcomm.nn keeps as it was gathered. A token's experts count top_k times.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from ringcomm.planner.candidate import Candidate
from ringcomm.planner.job import Job, Mesh, live_micro_batches
from ringcomm.planner.models import ModelShape

_TOKEN_ID_BYTES = 8
# Of a token in ringcomm's cross-entropy: its class, and six sums in float32.
_LOSS_BYTES = 8 + 6 * 4


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch on one rank."""

    layer: int  # that a layer keeps
    scores: int  # of these the s × s matrices, which selective recomputation makes anew
    boundary: int  # the layer's input alone, which full recomputation keeps
    embedding: int  # in front of the layers
    head: int  # behind them: the last norm, the logits, the loss
    logits: int  # of these the logits, whose gradient comes in the backward pass

    def kept(self, checkpointing: str) -> int:
        """What a layer keeps with such recomputation."""
        if checkpointing == "full":
            return self.boundary
        return self.layer - (self.scores if checkpointing == "selective" else 0)


def activations_of(shape: ModelShape, job: Job, mesh: Mesh, micro_batch: int) -> Activations:
    """Activations of so many sequences at a time; the job has a sequence length."""
    e, t = job.itemsize, mesh.tp
    tokens = micro_batch * job.sequence
    outside = t if mesh.is_sequence_split else 1  # ranks that share what is between layers
    width = tokens * shape.hidden
    # A norm keeps its input, or what torch's operators for CPUs keep in float32; and a number.
    norm = (e if job.fused_norms else 8) * width // outside + 4 * tokens // outside
    normed = e * width
    masks = width // outside if shape.dropout else 0
    scores = 0
    if job.attention == "full":  # softmax's result, and with dropout its mask and what that leaves
        per_pair = 2 * e + 1 if shape.dropout else e
        scores = per_pair * shape.heads * micro_batch * job.sequence**2 // t
    # Ranks that are more than groups of heads have one each.
    kv_width = max(1, shape.kv_heads // t) * shape.head_dim
    attention = 2 * e * tokens * shape.query_width // t + 2 * e * tokens * kv_width
    if job.attention == "flash":
        attention += 4 * tokens * shape.heads // t
    layer = 2 * (norm + normed + masks) + attention + scores + _ffn_bytes(shape, job, t, tokens)
    logits = e * tokens * -(-shape.vocab // t)
    return Activations(
        layer=layer,
        scores=scores,
        boundary=e * width // outside,
        embedding=_TOKEN_ID_BYTES * tokens + masks,
        head=norm + normed + logits + _LOSS_BYTES * tokens,
        logits=logits,
    )


def _ffn_bytes(shape: ModelShape, job: Job, tp: int, tokens: int) -> int:
    """What the feed-forward layer keeps besides its input."""
    inner = (4 if shape.gated else 2) * job.itemsize * shape.ffn
    if not shape.experts:
        return tokens * inner // tp
    # The router's probabilities; of each of a token's experts what it was sent and what it returns.
    routed = shape.top_k * (inner // tp + 2 * job.itemsize * shape.hidden)
    return tokens * (4 * shape.experts + routed)


@dataclass(frozen=True)
class RankMemory:
    """Bytes of the rank that needs most.

    Attributes:
        parameters, gradients, states, activations, buffers: on the device. Activations are those
            of all live micro-batches; buffers what gathers, reductions, recomputation, the logits'
            gradient and messages go through.
        host, disk: what is offloaded there.
    """

    parameters: int
    gradients: int
    states: int
    activations: int
    buffers: int
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
    acts = activations_of(candidate.shape, candidate.job, candidate.mesh, candidate.micro_batch)
    # What comes and goes: a layer's recomputation or the logits' gradient, and messages.
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
    """Activations of all micro-batches that a stage has begun and not ended."""
    pp, schedule = candidate.mesh.pp, candidate.schedule
    of_one = candidate.num_layers(stage) * acts.kept(candidate.checkpointing)
    of_one += acts.embedding if stage == 0 else 0
    m = candidate.num_micro_batches if pp > 1 else 1
    live = live_micro_batches(schedule, pp, m, stage, candidate.job.virtual_stages)
    # The head's backward pass follows its forward pass: one micro-batch's is alive, of GPipe's all.
    of_head = acts.head if stage == candidate.head_stage else 0
    if schedule == "gpipe":
        return int(live * (of_one + of_head))
    return int(live * of_one) + of_head
