"""The bytes that a rank sends in a step, by what for."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ringcomm.planner.job import Job
from ringcomm.planner.mesh import Candidate
from ringcomm.planner.models import ModelShape, Unit
from ringcomm.planner.rank_weights import kept_by, layers_of, rank_part, ring_elems, sent_of_weights

__all__ = ["Traffic", "calls_of_tensor_parallelism", "traffic_of", "traffic_of_stage"]

_STATS_BYTES = 24  # of a token in the loss over classes in parts: ringcomm.ops.cross_entropy


@dataclass(frozen=True)
class Traffic:
    """Bytes of one rank and step.

    Attributes:
        data: weights and gradients among data-parallel ranks.
        tensor: activations among tensor-parallel ranks, the loss's sums, norms' gradients.
        pipeline: activations and their gradients to the neighbours.
        expert: tokens to and from the experts of other ranks.
        offloaded: to and from host memory or disks.
    """

    data: int = 0
    tensor: int = 0
    pipeline: int = 0
    expert: int = 0
    offloaded: int = 0

    @property
    def sent(self) -> int:
        """To other ranks."""
        return self.data + self.tensor + self.pipeline + self.expert

    def __add__(self, other: Traffic) -> Traffic:
        sums = (getattr(self, f.name) + getattr(other, f.name) for f in fields(self))
        return Traffic(*sums)


def traffic_of(shape: ModelShape, job: Job, candidate: Candidate) -> Traffic:
    """Of the rank that sends most: of a pipeline's first or last stage, or of one between them."""
    pp = candidate.mesh.pp
    stages = {0, min(1, pp - 1), pp - 1}
    found = [traffic_of_stage(shape, job, candidate, stage) for stage in sorted(stages)]
    return max(found, key=lambda traffic: (traffic.sent, traffic.offloaded))


def traffic_of_stage(shape: ModelShape, job: Job, candidate: Candidate, stage: int) -> Traffic:
    """Of the first rank that one stage of the pipeline has."""
    mesh, system = candidate.mesh, candidate.system
    m = candidate.num_micro_batches
    dense, experts = rank_part(shape, mesh, stage, candidate.head_stage)
    owners = mesh.dp // mesh.ep
    data = sent_of_weights(dense, system, job, mesh.dp, m)
    data += sent_of_weights(experts, system, job, owners, m)
    kept = kept_by(dense, system, job, mesh.dp) + kept_by(experts, system, job, owners)
    return Traffic(
        data=data + _tied_bytes(shape, job, candidate, stage),
        tensor=m * _tensor_bytes(shape, job, candidate, stage),
        pipeline=m * _pipeline_bytes(shape, job, candidate, stage),
        expert=m * _expert_bytes(shape, job, candidate, stage),
        offloaded=kept.streamed + m * kept.streamed_each,
    )


def _message(shape: ModelShape, job: Job, candidate: Candidate) -> int:
    return job.itemsize * candidate.micro_batch * job.sequence * shape.hidden


def calls_of_tensor_parallelism(
    shape: ModelShape, job: Job, candidate: Candidate, stage: int
) -> int:
    """Halves of all_reduces, of b·s·h each, in a micro-batch's passes on a stage.

    A layer has two all_reduces forward and two backward, or as many reduce-scatters and
    all-gathers; recomputation repeats what comes before its last one. The embedding has one, and
    the head's input has one.
    """
    mesh = candidate.mesh
    if mesh.tp == 1:
        return 0
    per_layer = 8
    if candidate.checkpointing == "full":
        per_layer += 3 if mesh.is_sequence_split else 2
    ends = 2 * ((stage == 0) + (stage == candidate.head_stage))
    halves = per_layer * layers_of(shape.layers, mesh.pp, stage) + ends
    if mesh.is_sequence_split and job.regathers:
        halves += 2 * layers_of(shape.layers, mesh.pp, stage) + (stage == candidate.head_stage)
    return halves


def _tensor_bytes(shape: ModelShape, job: Job, candidate: Candidate, stage: int) -> int:
    """Of a micro-batch."""
    mesh = candidate.mesh
    t = mesh.tp
    if t == 1:
        return 0
    halves = calls_of_tensor_parallelism(shape, job, candidate, stage)
    e, tokens = job.itemsize, candidate.micro_batch * job.sequence
    if mesh.is_sequence_split:
        sent = halves * (t - 1) * e * tokens // t * shape.hidden
        num_layers = layers_of(shape.layers, mesh.pp, stage)
        sent += num_layers * e * _summed_elems(shape.layer, t)
        sent += e * _summed_elems(shape.head, t) if stage == candidate.head_stage else 0
    else:
        sent = halves // 2 * e * ring_elems(tokens * shape.hidden, t)
    if stage == candidate.head_stage:
        sent += _STATS_BYTES * ring_elems(tokens + 1, t)
    copies = t // shape.kv_heads
    if copies > 1:  # gradients of heads that several ranks have
        elems = 2 * shape.head_dim * (shape.hidden + ("qkv" in shape.biases))
        elems *= layers_of(shape.layers, mesh.pp, stage)
        sent += e * ring_elems(elems, copies)
    return sent


def _summed_elems(unit: Unit, tp: int) -> int:
    """Sent of gradients of what every rank uses on its own tokens: norms, biases behind sums."""
    return sum(
        ring_elems(weight.num_elems, tp)
        for weight in unit.weights
        if weight.split is None and len(weight.shape) == 1
    )


def _pipeline_bytes(shape: ModelShape, job: Job, candidate: Candidate, stage: int) -> int:
    """Of a micro-batch: forward to the next stage, and back to the one before.

    Interleaved stages are a ring of v rounds; the V form has two of each.
    """
    pp = candidate.mesh.pp
    if pp == 1:
        return 0
    message = _message(shape, job, candidate)
    if candidate.schedule == "interleaved":
        v = job.virtual_stages
        forward = v - (stage == pp - 1)
        back = v - (stage == 0)
    elif candidate.schedule == "zbv":
        forward = back = 2 - (stage == 0) - (stage == pp - 1)
    else:
        forward, back = int(stage < pp - 1), int(stage > 0)
    return message * (forward + back)


def _expert_bytes(shape: ModelShape, job: Job, candidate: Candidate, stage: int) -> int:
    """Of a micro-batch: tokens go and come back, and so do gradients, if routed evenly."""
    mesh = candidate.mesh
    if mesh.ep == 1:
        return 0
    routed = _message(shape, job, candidate) * shape.top_k
    routed //= mesh.tp if mesh.is_sequence_split else 1
    passes = 6 if candidate.checkpointing == "full" else 4
    num_layers = layers_of(shape.layers, mesh.pp, stage)
    return passes * num_layers * routed * (mesh.ep - 1) // mesh.ep


def _tied_bytes(shape: ModelShape, job: Job, candidate: Candidate, stage: int) -> int:
    """A head that is the embedding, on two stages: an all_reduce of two."""
    if not shape.tied or candidate.head_stage == 0 or stage not in (0, candidate.head_stage):
        return 0
    rows = -(-shape.vocab // candidate.mesh.tp)
    return job.itemsize * rows * shape.hidden
