"""The memory of a rank, by part."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ringcomm.planner.activations import Activations, activations_of
from ringcomm.planner.candidate import Candidate
from ringcomm.planner.job import Job
from ringcomm.planner.rank_part import layers_of, rank_part
from ringcomm.planner.schedules import live_micro_batches
from ringcomm.planner.shapes import ModelShape
from ringcomm.planner.weights_memory import Kept, kept_by

__all__ = ["RankMemory", "memory_of", "memory_of_stage", "weights_of_stage"]


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
