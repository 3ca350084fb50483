"""What a forward pass keeps for the backward pass, in bytes of a micro-batch on a rank.

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

from dataclasses import dataclass

from ringcomm.planner.job import Job
from ringcomm.planner.mesh import Mesh
from ringcomm.planner.shapes import ModelShape

__all__ = ["Activations", "activations_of"]

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
