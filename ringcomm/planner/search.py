"""Looks at every system on every mesh, and ranks what fits."""

from __future__ import annotations

from collections.abc import Iterator

from ringcomm.planner.cluster import Cluster
from ringcomm.planner.job import CHECKPOINTINGS, Job, in_gb
from ringcomm.planner.memory import RankMemory, memory_of
from ringcomm.planner.mesh import (
    SCHEDULES,
    SYSTEMS,
    Candidate,
    Mesh,
    System,
    bubble,
    mesh_fault,
    schedule_fault,
)
from ringcomm.planner.models import ModelShape
from ringcomm.planner.plans import Plan, Plans, Refusal, reasons_of
from ringcomm.planner.step_time import time_of
from ringcomm.planner.traffic import traffic_of

__all__ = ["by_rank", "plan"]

SAME_TIME = 1.02  # steps that are longer by less count as equally long
MUCH_MORE = 10  # times the bytes


def _divisors(number: int) -> list[int]:
    """All of them, ascending."""
    small = [k for k in range(1, int(number**0.5) + 1) if number % k == 0]
    return sorted({*small, *(number // k for k in small)})


def _meshes_of(shape: ModelShape, cluster: Cluster, job: Job) -> Iterator[Mesh]:
    """All that have as many ranks as there are devices, and sizes as the job wants them.

    Also those that the model does not allow.

    Raises:
        ValueError: the sizes that the job wants do not divide the devices.
    """
    total = cluster.num_gpus
    wanted = (job.dp or 1) * (job.pp or 1) * (job.tp or 1)
    are_all_set = job.dp and job.pp and job.tp
    if total % wanted or (are_all_set and wanted != total):
        sizes = ", ".join(f"{name} {getattr(job, name)}" for name in ("dp", "pp", "tp"))
        raise ValueError(f"{sizes.replace(' 0', ' any')} do not make {total} gpus")
    for tp in [job.tp] if job.tp else _divisors(total):
        for pp in [job.pp] if job.pp else _divisors(total // tp):
            if total % (tp * pp) or (job.dp and job.dp * tp * pp != total):
                continue
            dp = total // (tp * pp)
            for ep in _expert_sizes(shape, job, dp):
                is_split = job.is_sequence_split
                if is_split is None:
                    is_split = tp > 1 and job.sequence % tp == 0
                yield Mesh(dp, pp, tp, ep, is_split)


def _expert_sizes(shape: ModelShape, job: Job, dp: int) -> list[int]:
    if job.ep:
        return [job.ep]
    return [ep for ep in _divisors(dp) if ep == 1 or (shape.experts and shape.experts % ep == 0)]


def plan(shape: ModelShape, cluster: Cluster, job: Job) -> Plans:
    """Predicts memory, traffic and time of every system on every mesh; no rank is started.

    Args:
        shape: of the model: find_model("llama-7b"), or one's own.
        cluster: devices, and what joins them.
        job: tokens of a step, and restrictions of the search.

    Raises:
        ValueError: the job's sizes do not make the cluster's number of devices, or its tokens are
            no whole number of sequences.
    """
    job = job.with_sequence(shape.context)
    ranked: list[Plan] = []
    refused: list[Refusal] = []
    meshes = list(_meshes_of(shape, cluster, job))
    if cluster.num_gpus > 1 and not (job.dp or job.pp or job.tp or job.ep):
        meshes.append(Mesh())
    for mesh in meshes:
        fault = mesh_fault(shape, mesh, job.sequence)
        if fault is None and job.num_sequences % mesh.dp:
            fault = f"dp {mesh.dp} does not divide {job.num_sequences} sequences"
        if fault is not None:
            refused.append(Refusal("", str(mesh), fault))
            continue
        for system in _systems(job, mesh, cluster):
            fault = system.fault(mesh.dp, mesh.pp, mesh.tp, is_host=cluster.hardware.is_host)
            if fault is not None:
                refused.append(Refusal(system.name, str(mesh), fault))
                continue
            for schedule in _schedules(job, mesh):
                found = _best(shape, cluster, job, system, mesh, schedule)
                if isinstance(found, Plan):
                    ranked.append(found)
                else:
                    refused.append(found)

    inside = [p for p in ranked if cluster.tensor_group(p.candidate.mesh).is_inside]
    outside = [p for p in ranked if not cluster.tensor_group(p.candidate.mesh).is_inside]
    return Plans(shape, cluster, job, (*by_rank(inside), *by_rank(outside)), tuple(refused))


def by_rank(plans: list[Plan]) -> Iterator[Plan]:
    """The fastest first; plans within SAME_TIME of the fastest one left by what else they cost.

    Those that send MUCH_MORE than the least of them come last, and then simpler systems, and less
    traffic, come first: a prediction does not know a step's time to 2 %.
    """
    left = sorted(plans, key=lambda plan: plan.time.step)
    while left:
        limit = SAME_TIME * left[0].time.step
        alike = [plan for plan in left if plan.time.step <= limit]
        left = left[len(alike) :]
        limit_bytes = MUCH_MORE * min(plan.traffic.sent for plan in alike)
        yield from sorted(
            alike,
            key=lambda plan: (
                plan.traffic.sent > limit_bytes,
                plan.candidate.complexity,
                plan.traffic.sent,
                plan.time.step,
            ),
        )


def _systems(job: Job, mesh: Mesh, cluster: Cluster) -> Iterator[System]:
    """One rank of several is looked at for what suits one."""
    for name, system in SYSTEMS.items():
        if job.systems and name not in job.systems:
            continue
        if name == "single" and mesh.num_ranks > 1:
            continue
        if name != "single" and mesh.num_ranks == 1 and cluster.num_gpus > 1:
            continue
        yield system


def _schedules(job: Job, mesh: Mesh) -> tuple[str, ...]:
    if mesh.pp == 1:
        return ("",)
    return job.schedules or SCHEDULES


def _best(
    shape: ModelShape, cluster: Cluster, job: Job, system: System, mesh: Mesh, schedule: str
) -> Plan | Refusal:
    """The fastest way to recompute and to cut the batch that fits; or why there is none."""
    found: list[Plan] = []
    leanest: tuple[int, str] | None = None
    fault = ""
    for checkpointing in job.checkpointings or CHECKPOINTINGS:
        if checkpointing == "selective" and job.attention == "flash":
            fault = "selective recomputation: flash attention keeps no matrices to make anew"
            continue
        for candidate in _candidates(job, system, mesh, schedule, checkpointing):
            why = _schedule_fault(shape, job, candidate)
            if why is not None:
                fault = why
                continue
            memory = memory_of(shape, job, candidate)
            why = _does_not_fit(cluster, candidate, memory)
            if why is None:
                found.append(_plan_of(shape, cluster, job, candidate, memory))
                if not _is_proposed(candidate):
                    break  # more micro-batches take longer
            elif leanest is None or memory.device < leanest[0]:
                leanest = memory.device, why
    if found:
        return max(found, key=lambda plan: plan.tokens_per_s)
    where = f"{mesh}, {schedule}" if schedule else str(mesh)
    reason = leanest[1] if leanest is not None else fault
    if system.is_lomo:
        reason += "; an update inside the backward pass allows one micro-batch"
    return Refusal(system.name, where, reason)


def _candidates(
    job: Job, system: System, mesh: Mesh, schedule: str, checkpointing: str
) -> Iterator[Candidate]:
    """By number of micro-batches, ascending: of a pipeline at least 2p, if there are so many.

    Those up to 4p are all looked at, more if memory demands it. Without a pipeline the first one
    that fits is the best, and an update inside the backward pass allows one alone.
    """
    sequences = job.num_sequences // mesh.dp
    counts = _divisors(sequences)
    if system.is_lomo:
        counts = [1]
    elif mesh.pp > 1:
        counts = [m for m in counts if m >= 2 * mesh.pp] or counts[-1:]
    for m in counts:
        yield Candidate(system, mesh, schedule, checkpointing, m, sequences // m)


def _is_proposed(candidate: Candidate) -> bool:
    """Whether a greater number of micro-batches is worth a look, too."""
    pp = candidate.mesh.pp
    return pp > 1 and candidate.num_micro_batches < 4 * pp


def _schedule_fault(shape: ModelShape, job: Job, candidate: Candidate) -> str | None:
    if not candidate.schedule:
        return None
    return schedule_fault(
        candidate.schedule,
        shape.layers,
        candidate.mesh.pp,
        candidate.num_micro_batches,
        job.virtual_stages,
    )


def _does_not_fit(cluster: Cluster, candidate: Candidate, memory: RankMemory) -> str | None:
    if memory.device > cluster.usable_bytes:
        parts = {
            name: getattr(memory, name)
            for name in ("parameters", "gradients", "states", "activations", "buffers")
        }
        largest = max(parts, key=lambda name: parts[name])
        return (
            f"needs {in_gb(memory.device)} of {in_gb(cluster.usable_bytes)}: {largest} alone"
            f" {in_gb(parts[largest])}"
        )
    sharers = min(cluster.per_host, candidate.mesh.num_ranks)
    if not cluster.hardware.is_host and memory.host * sharers > cluster.host_memory_bytes:
        return (
            f"needs {in_gb(memory.host * sharers)} of the host's memory, which has"
            f" {in_gb(cluster.host_memory_bytes)}"
        )
    return None


def _plan_of(
    shape: ModelShape, cluster: Cluster, job: Job, candidate: Candidate, memory: RankMemory
) -> Plan:
    traffic = traffic_of(shape, job, candidate)
    time = time_of(shape, job, cluster, candidate, traffic)
    mesh = candidate.mesh
    idle = bubble(
        candidate.schedule or "1f1b", mesh.pp, candidate.num_micro_batches, job.virtual_stages
    )
    return Plan(
        candidate,
        memory,
        traffic,
        float(idle),
        time,
        job.tokens / time.step,
        reasons_of(shape, cluster, job, candidate, memory, traffic, time),
    )
