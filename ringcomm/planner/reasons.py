"""A plan in words: where each figure comes from, and which part decides."""

from __future__ import annotations

from collections.abc import Iterator

from ringcomm.planner.candidate import Candidate
from ringcomm.planner.cluster import Cluster
from ringcomm.planner.job import Job
from ringcomm.planner.memory import RankMemory
from ringcomm.planner.schedules import bubble
from ringcomm.planner.shapes import ModelShape
from ringcomm.planner.sizes import in_gb, in_seconds
from ringcomm.planner.step_time import StepTime
from ringcomm.planner.traffic import Traffic

__all__ = ["reasons_of"]


def reasons_of(
    shape: ModelShape,
    cluster: Cluster,
    job: Job,
    candidate: Candidate,
    memory: RankMemory,
    traffic: Traffic,
    time: StepTime,
) -> tuple[str, ...]:
    """In the order in which one would work it out."""
    return (
        _weights(shape, job, candidate, memory),
        _activations(job, candidate, memory),
        f"memory: {in_gb(memory.device)} of {in_gb(cluster.usable_bytes)}"
        f" ({in_gb(cluster.hardware.reserved_bytes)} are the driver's)"
        + "".join(_elsewhere(memory)),
        *_tensor(cluster, candidate, traffic),
        *_data(cluster, job, candidate, traffic, time),
        *_experts(candidate, traffic),
        *_pipeline(job, candidate, traffic),
        *_offload(cluster, job, candidate, traffic),
        _time(job, cluster, candidate, time),
    )


def _weights(shape: ModelShape, job: Job, candidate: Candidate, memory: RankMemory) -> str:
    e, s = job.itemsize, job.state_bytes
    system, mesh = candidate.system, candidate.mesh
    n = mesh.dp
    formulas = {0: f"{2 * e + s} Φ", 1: f"{2 * e} Φ + {s} Φ/{n}", 2: f"{e} Φ + {e + s} Φ/{n}"}
    formula = formulas.get(system.stage, f"{2 * e + s} Φ/{n}")
    if system.is_lomo:
        formula = f"{e} Φ" if system.stage == 0 else f"{e} Φ/{n}"
    elif system.weights != "device":
        formula = "what is too small to offload, and a layer's"
    elif system.is_offloaded:
        formula = f"{e} Φ + {e} Φ/{n}"
    share = mesh.pp * mesh.tp
    of = f"Φ = {shape.num_params:,} weights" + (f" / {share}" if share > 1 else "")
    of += f", of experts 1/{mesh.ep}" if mesh.ep > 1 else ""
    kept = memory.parameters + memory.gradients + memory.states
    return f"weights, gradients, states: {formula} bytes, {of}: {in_gb(kept)}"


def _activations(job: Job, candidate: Candidate, memory: RankMemory) -> str:
    m, b = candidate.num_micro_batches, candidate.micro_batch
    text = {
        "none": "all of every layer",
        "selective": "all but the s × s matrices, which are recomputed",
        "full": "each layer's input, the rest is recomputed for a third more computing",
    }[candidate.checkpointing]
    return (
        f"activations: {m} micro-batches of {b} × {job.sequence} tokens, kept is {text}:"
        f" {in_gb(memory.activations)}"
    )


def _elsewhere(memory: RankMemory) -> Iterator[str]:
    if memory.host:
        yield f"; of the host {in_gb(memory.host)} a rank"
    if memory.disk:
        yield f"; on disks {in_gb(memory.disk)} a rank"


def _tensor(cluster: Cluster, candidate: Candidate, traffic: Traffic) -> Iterator[str]:
    mesh = candidate.mesh
    if mesh.tp == 1:
        return
    group = cluster.tensor_group(mesh)
    place = "inside a host" if group.is_inside else f"over {group.num_hosts} hosts"
    yield (
        f"tp {mesh.tp} {place}: 4 all_reduces a layer and micro-batch, {in_gb(traffic.tensor)}"
        + (", as reduce-scatters and all-gathers" if mesh.is_sequence_split else "")
    )


def _data(
    cluster: Cluster, job: Job, candidate: Candidate, traffic: Traffic, time: StepTime
) -> Iterator[str]:
    mesh = candidate.mesh
    if mesh.dp == 1:
        return
    group = cluster.data_group(mesh)
    stage, m = candidate.system.stage, candidate.num_micro_batches
    shares = {3: f"{3 * m}" if m > 1 else "3", 2: f"{m + 1}"}.get(stage, "2")
    if candidate.system.is_lomo:
        shares = "3" if stage == 3 else "2"
    text = (
        f"dp {mesh.dp}: {shares} (N-1)/N of {job.itemsize} Φ bytes a step,"
        f" {in_gb(traffic.data)}; {in_seconds(time.data_hidden)} behind computing,"
        f" {in_seconds(time.data)} not"
    )
    if not group.is_inside and group.per_host > 1:
        way = "levels" if group.levels(1 << 25) < group.ring(1 << 25) else "one ring"
        text += f"; over {group.num_hosts} hosts by {way}"
    yield text


def _experts(candidate: Candidate, traffic: Traffic) -> Iterator[str]:
    if candidate.mesh.ep > 1:
        yield (
            f"ep {candidate.mesh.ep}: 4 all_to_alls a layer and micro-batch, of tokens routed"
            f" evenly, {in_gb(traffic.expert)}"
        )


def _pipeline(job: Job, candidate: Candidate, traffic: Traffic) -> Iterator[str]:
    p, m = candidate.mesh.pp, candidate.num_micro_batches
    if p == 1:
        return
    idle = bubble(candidate.schedule, p, m, job.virtual_stages)
    formula = {
        "interleaved": f"(p-1)/(vm+p-1) with v = {job.virtual_stages}",
        "zbv": "(p-1)/(6m+p-1)",
    }.get(candidate.schedule, "(p-1)/(m+p-1)")
    why = "2p to 4p"
    if m > 4 * p:
        why = "more than 4p, since fewer do not fit or do not divide"
    elif m < 2 * p:
        why = "less than 2p: the batch has no more"
    yield (
        f"pp {p}, {candidate.schedule}: m = {m} micro-batches ({why}), bubble {formula} ="
        f" {float(idle):.1%}; {in_gb(traffic.pipeline)} to neighbours"
    )


def _offload(cluster: Cluster, job: Job, candidate: Candidate, traffic: Traffic) -> Iterator[str]:
    system, hardware = candidate.system, cluster.hardware
    if not system.is_offloaded:
        return
    from ringcomm.parallel.offload.efficiency import efficiency, optimizer_intensity

    rate = hardware.host_rate
    if system.states == "disk":
        rate = hardware.disk_rate / min(candidate.mesh.num_ranks, cluster.per_host)
    peak = hardware.peak_flops[job.precision] * (job.utilisation or hardware.utilisation)
    share = efficiency(optimizer_intensity(job.tokens, job.state_bytes), rate, peak)
    yield (
        f"offload: {in_gb(traffic.offloaded)} a step at {in_gb(rate)}/s; for the states alone"
        f" {share:.1%} of the time computes"
    )


def _time(job: Job, cluster: Cluster, candidate: Candidate, time: StepTime) -> str:
    parts = ("compute", "tensor", "expert", "pipeline", "data", "offload", "update", "bubble")
    shown = [
        f"{name} {in_seconds(getattr(time, name))}"
        for name in parts
        if getattr(time, name) > 0.0005 * time.step
    ]
    utilisation = job.utilisation or cluster.hardware.utilisation
    dominates = f"{time.largest} dominates with {getattr(time, time.largest) / time.step:.0%}"
    return (
        f"time: {in_seconds(time.step)} = {' + '.join(shown)}, computing at {utilisation:.0%} of"
        f" the peak; {dominates}"
    )
