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
parallelism share the second part, those of sequence parallelism both, but for what the norms give
where ringcomm.nn keeps it as it was gathered. A token's experts count top_k times.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from ringcomm.planner.job import Job
from ringcomm.planner.mesh import Candidate, Mesh, live_micro_batches
from ringcomm.planner.models import ModelShape
from ringcomm.planner.rank_weights import Kept, kept_by, layers_of, rank_part

__all__ = [
    "Activations",
    "RankMemory",
    "activations_of",
    "memory_of",
    "memory_of_stage",
    "weights_of_stage",
]

_TOKEN_ID_BYTES = 8
# Of a token in ringcomm's cross-entropy: its class, and six sums in float32.
_LOSS_BYTES = 8 + 6 * 4


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch on one rank.

    Attributes:
        layer: that a layer keeps.
        scores: of these the s × s matrices, which selective recomputation makes anew.
        boundary: the layer's input alone, which full recomputation keeps.
        embedding: in front of the layers.
        head: behind them: the last norm, the logits, the loss.
        logits: of these the logits, whose gradient comes in the backward pass.
        message: what a stage of a pipeline sends to the next one.
    """

    layer: int
    scores: int
    boundary: int
    embedding: int
    head: int
    logits: int
    message: int

    def kept(self, checkpointing: str) -> int:
        """Of a layer, with such recomputation."""
        if checkpointing == "full":
            return self.boundary
        return self.layer - (self.scores if checkpointing == "selective" else 0)

    def recomputed(self, checkpointing: str) -> int:
        """What comes back of a layer in the backward pass."""
        return self.layer - self.kept(checkpointing)


def activations_of(shape: ModelShape, job: Job, mesh: Mesh, micro_batch: int) -> Activations:
    """Of so many sequences at a time.

    Args:
        shape: of the model.
        job: with a sequence length.
        mesh: that mesh_fault() has nothing against.
        micro_batch: sequences.
    """
    e, t, h = job.itemsize, mesh.tp, shape.hidden
    tokens = micro_batch * job.sequence
    outside = t if mesh.is_sequence_split else 1  # ranks that share what is between layers
    gathered = outside if job.regathers else 1
    width = tokens * h
    norm = _norm_bytes(job) * width // outside + 4 * tokens // outside
    normed = e * width // gathered
    masks = width // outside if shape.dropout else 0
    scores = _score_bytes(shape, job, mesh, micro_batch)
    attention = 2 * e * tokens * shape.query_width // t
    attention += 2 * e * tokens * _kv_width(shape, t)
    if job.attention == "flash":
        attention += 4 * tokens * shape.heads // t
    layer = 2 * (norm + normed + masks) + attention + scores + _ffn_bytes(shape, job, mesh, tokens)
    logits = e * tokens * -(-shape.vocab // t)
    return Activations(
        layer=layer,
        scores=scores,
        boundary=e * width // outside,
        embedding=_TOKEN_ID_BYTES * tokens + masks,
        head=norm + normed + logits + _LOSS_BYTES * tokens,
        logits=logits,
        message=e * width,
    )


def _norm_bytes(job: Job) -> int:
    """Of an element: the input, or what torch's operators for CPUs keep in float32."""
    return job.itemsize if job.fused_norms else 8


def _kv_width(shape: ModelShape, tp: int) -> int:
    """Of a rank's keys; ranks that are more than groups have one each."""
    return max(1, shape.kv_heads // tp) * shape.head_dim


def _score_bytes(shape: ModelShape, job: Job, mesh: Mesh, micro_batch: int) -> int:
    """Softmax's result, and with dropout its mask and what that leaves."""
    if job.attention == "flash":
        return 0
    per_pair = 2 * job.itemsize + 1 if shape.dropout else job.itemsize
    return per_pair * shape.heads * micro_batch * job.sequence**2 // mesh.tp


def _ffn_bytes(shape: ModelShape, job: Job, mesh: Mesh, tokens: int) -> int:
    """What the feed-forward layer keeps besides its input."""
    e, t = job.itemsize, mesh.tp
    inner = (4 if shape.gated else 2) * e * shape.ffn
    if not shape.experts:
        return tokens * inner // t
    # The router's probabilities; of each of a token's experts what it was sent and what it returns.
    routed = shape.top_k * (inner // t + 2 * e * shape.hidden)
    return tokens * (4 * shape.experts + routed)


@dataclass(frozen=True)
class RankMemory:
    """Bytes of the rank that needs most.

    Attributes:
        parameters, gradients, states, activations, buffers: on the device. Activations are those
            of all micro-batches that are alive; buffers what gathers, reductions, recomputation,
            the logits' gradient and messages go through.
        host: in host memory: what is offloaded there, or what loading takes, if that is more.
        disk: on disks.
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
        """Of all parts on the device."""
        return sum(getattr(self, field.name) for field in fields(self)[:5])


def memory_of(shape: ModelShape, job: Job, candidate: Candidate) -> RankMemory:
    """Of the fullest rank: the first stage of a pipeline, or the last, which has the logits."""
    stages = sorted({0, candidate.head_stage})
    found = [memory_of_stage(shape, job, candidate, stage) for stage in stages]
    return max(found, key=lambda memory: memory.device)


def weights_of_stage(shape: ModelShape, job: Job, candidate: Candidate, stage: int) -> Kept:
    """Weights, gradients and states of a stage's ranks."""
    mesh, system = candidate.mesh, candidate.system
    dense, experts = rank_part(shape, mesh, stage, candidate.head_stage)
    owners = mesh.dp // mesh.ep
    return kept_by(dense, system, job, mesh.dp) + kept_by(experts, system, job, owners)


def memory_of_stage(shape: ModelShape, job: Job, candidate: Candidate, stage: int) -> RankMemory:
    """Of the ranks that one stage of the pipeline has."""
    kept = weights_of_stage(shape, job, candidate, stage)
    acts = activations_of(shape, job, candidate.mesh, candidate.micro_batch)
    system = candidate.system
    host = kept.elsewhere if system.states == "host" else 0
    disk = kept.elsewhere if system.states == "disk" else 0
    return RankMemory(
        parameters=kept.parameters,
        gradients=kept.gradients,
        states=kept.states,
        activations=_alive(shape, job, candidate, acts, stage),
        buffers=kept.buffers + _passing(candidate, acts, stage),
        host=max(host, _loading(shape, job, candidate, stage)),
        disk=disk,
    )


def _alive(shape: ModelShape, job: Job, candidate: Candidate, acts: Activations, stage: int) -> int:
    """What all micro-batches have that a stage has begun and not ended."""
    mesh = candidate.mesh
    num_layers = layers_of(shape.layers, mesh.pp, stage)
    of_one = num_layers * acts.kept(candidate.checkpointing)
    if stage == 0:
        of_one += acts.embedding
    live = live_micro_batches(
        candidate.schedule or "1f1b",
        mesh.pp,
        candidate.num_micro_batches if mesh.pp > 1 else 1,
        stage,
        job.virtual_stages,
    )
    # The head's backward pass follows its forward pass: one micro-batch's is alive, of GPipe's all.
    of_head = acts.head if stage == candidate.head_stage else 0
    if candidate.schedule == "gpipe":
        return int(live * (of_one + of_head))
    return int(live * of_one) + of_head


def _passing(candidate: Candidate, acts: Activations, stage: int) -> int:
    """What comes and goes: a layer's recomputation or the logits' gradient, and messages."""
    logits = acts.logits if stage == candidate.head_stage else 0
    recomputed = acts.recomputed(candidate.checkpointing)
    messages = 2 * acts.message if candidate.mesh.pp > 1 else 0
    return max(logits, recomputed) + messages


def _loading(shape: ModelShape, job: Job, candidate: Candidate, stage: int) -> int:
    """Host memory of reading weights: of all that the rank begins with, or of the largest."""
    parts = rank_part(shape, candidate.mesh, stage, candidate.head_stage)
    if job.loads_whole:
        return job.itemsize * sum(part.num_elems for part in parts)
    return job.itemsize * max(part.largest_elems for part in parts)
