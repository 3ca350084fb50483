"""Looks at every system on every mesh, and ranks what fits."""

from __future__ import annotations

from collections.abc import Iterator

from ringcomm.measure.screen import in_gb
from ringcomm.planner.candidate import Candidate
from ringcomm.planner.hardware import Cluster
from ringcomm.planner.job import (
    CHECKPOINTINGS,
    SCHEDULES,
    SYSTEMS,
    Job,
    Mesh,
    System,
    mesh_fault,
)
from ringcomm.planner.memory import RankMemory, memory_of
from ringcomm.planner.models import ModelShape, find_model
from ringcomm.planner.plans import DEVICE_PARTS, Plan, Plans, Refusal
from ringcomm.planner.step_time import time_of, traffic_of

SAME_TIME = 1.02  # steps that are longer by less count as equally long
MUCH_MORE = 10  # times the bytes


def plan(model: ModelShape | str, cluster: Cluster, job: Job) -> Plans:
    """Predicts memory, traffic and time of every system on every mesh; no rank is started.

    Args:
        model: a name such as "llama-7b", "gpt2-xl" or "mixtral-8x7b", the path of a transformers
            config.json or of its folder, or a shape.
        cluster: devices and their links.
        job: tokens of a step, and restrictions of the search.

    Raises:
        ValueError: the model is not known, the job's sizes do not multiply to the cluster's number
            of devices, or its tokens are no whole number of sequences.
    """
    shape = model if isinstance(model, ModelShape) else find_model(model)
    job = job.with_sequence(shape.context)
    num_sequences = job.tokens // job.sequence
    inside: list[Plan] = []
    outside: list[Plan] = []  # tensor parallelism over hosts ranks last
    refused: list[Refusal] = []
    for mesh in _meshes_of(shape, cluster, job):
        fault = mesh_fault(shape, mesh, job.sequence)
        if fault is None and num_sequences % mesh.dp:
            fault = f"dp {mesh.dp} does not divide {num_sequences} sequences"
        if fault is not None:
            refused.append(Refusal("", str(mesh), fault))
            continue
        ranked = inside if cluster.group(mesh.tp, 1).num_hosts == 1 else outside
        for system in SYSTEMS.values():
            # One rank of several devices is looked at for "single" alone.
            is_for_one, is_one = system.name == "single", mesh.num_ranks == 1
            is_unasked = bool(job.systems) and system.name not in job.systems
            if is_unasked or (is_for_one != is_one and (is_for_one or cluster.num_gpus > 1)):
                continue
            fault = system.fault(mesh, is_host=cluster.hardware.is_host)
            if fault is not None:
                refused.append(Refusal(system.name, str(mesh), fault))
                continue
            for schedule in (job.schedules or SCHEDULES) if mesh.pp > 1 else ("",):
                found = _best(shape, cluster, job, system, mesh, schedule)
                if isinstance(found, Plan):
                    ranked.append(found)
                else:
                    refused.append(found)
    return Plans(shape, cluster, job, (*by_rank(inside), *by_rank(outside)), tuple(refused))


def _divisors(number: int) -> list[int]:
    """All of them, ascending."""
    small = [k for k in range(1, int(number**0.5) + 1) if number % k == 0]
    return sorted({*small, *(number // k for k in small)})


def _meshes_of(shape: ModelShape, cluster: Cluster, job: Job) -> Iterator[Mesh]:
    """All that have as many ranks as there are devices, and sizes as the job wants them.

    Also those that the model does not allow; and a single rank where no size is wanted.
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
            eps = [ep for ep in _divisors(dp) if shape.experts and shape.experts % ep == 0]
            for ep in [job.ep] if job.ep else eps or [1]:
                is_split = job.is_sequence_split
                if is_split is None:
                    is_split = tp > 1 and job.sequence % tp == 0
                yield Mesh(dp, pp, tp, ep, is_split)
    if total > 1 and not (job.dp or job.pp or job.tp or job.ep):
        yield Mesh()


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


def _best(
    shape: ModelShape, cluster: Cluster, job: Job, system: System, mesh: Mesh, schedule: str
) -> Plan | Refusal:
    """The fastest way to recompute and to cut the batch that fits; or why there is none."""
    found: list[Plan] = []
    leanest: tuple[int, str] | None = None
    fault: str | None = None
    for checkpointing in job.checkpointings or CHECKPOINTINGS:
        for m, b in _micro_batches(job, system, mesh):
            why = _schedule_fault(shape, job, mesh.pp, schedule, m)
            if why is not None:
                fault = why
                continue
            candidate = Candidate(shape, cluster, job, system, mesh, schedule, checkpointing, m, b)
            memory = memory_of(candidate)
            why = _does_not_fit(candidate, memory)
            if why is None:
                traffic = traffic_of(candidate)
                found.append(Plan(candidate, memory, traffic, time_of(candidate, traffic)))
                if m >= 4 * mesh.pp or mesh.pp == 1:
                    break  # more micro-batches take longer
            elif leanest is None or memory.device < leanest[0]:
                leanest = memory.device, why
    if found:
        return max(found, key=lambda plan: plan.tokens_per_s)
    reason = str(leanest[1] if leanest is not None else fault)
    if system.is_lomo:
        reason += "; an update inside the backward pass allows one micro-batch"
    return Refusal(system.name, f"{mesh}, {schedule}" if schedule else str(mesh), reason)


def _micro_batches(job: Job, system: System, mesh: Mesh) -> Iterator[tuple[int, int]]:
    """Their number, ascending, and sequences of each: of a pipeline at least 2p, if there are.

    Those up to 4p are all looked at, more if memory demands it. Without a pipeline the first one
    that fits is the best, and an update inside the backward pass allows one alone.
    """
    sequences = job.tokens // job.sequence // mesh.dp
    counts = [1] if system.is_lomo else _divisors(sequences)
    if mesh.pp > 1:
        counts = [m for m in counts if m >= 2 * mesh.pp] or counts[-1:]
    yield from ((m, sequences // m) for m in counts)


def _schedule_fault(shape: ModelShape, job: Job, pp: int, schedule: str, m: int) -> str | None:
    parts = pp * {"interleaved": job.virtual_stages, "zbv": 2}.get(schedule, 1)
    if shape.layers < parts:
        return f"{schedule}: {shape.layers} layers make no {parts} stages"
    if schedule == "interleaved" and m % pp:
        return f"interleaved: {m} micro-batches are no multiple of pp {pp}"
    if schedule == "zbv" and m < 2 * pp:
        return f"zbv: {m} micro-batches are less than 2 × pp {pp}"
    return None


def _does_not_fit(candidate: Candidate, memory: RankMemory) -> str | None:
    cluster = candidate.cluster
    if memory.device > cluster.usable_bytes:
        parts = {name: getattr(memory, name) for name in DEVICE_PARTS}
        largest = max(parts, key=parts.__getitem__)
        return (
            f"needs {in_gb(memory.device)} of {in_gb(cluster.usable_bytes)}: {largest} alone"
            f" {in_gb(parts[largest])}"
        )
    of_host = memory.host * min(cluster.per_host, candidate.mesh.num_ranks)
    if of_host > cluster.host_memory_bytes:
        return (
            f"needs {in_gb(of_host)} of the host's memory, which has"
            f" {in_gb(cluster.host_memory_bytes)}"
        )
    return None
