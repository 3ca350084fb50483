"""Searches all systems and meshes, ranks plans that fit, and explains them."""

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from operator import itemgetter
from typing import Any

from ringcomm.planner import costs
from ringcomm.planner.candidate import Candidate
from ringcomm.planner.hardware import Cluster
from ringcomm.planner.job import CHECKPOINTINGS, SCHEDULES, SYSTEMS, Job, Mesh, System
from ringcomm.planner.models import ModelShape, find_model
from ringcomm.screen import columns, counted, factor, in_gib, in_seconds

SCHEMA = 2
SAME_TIME = 1.02  # steps within this ratio count as equally long
MUCH_MORE = 10  # a ratio of bytes
LEGEND = """\
system       how data-parallel ranks share the training state; docs/choose.md has each
mesh         ranks of data (dp), pipeline (pp), tensor (tp) and expert (ep) parallelism; sp shards
             the tokens between tensor-parallel layers; the pipeline's schedule
batches      micro-batches of a step × sequences in each; recomputed: layers keep their inputs only
memory       on the device of the rank that needs most
sent         what a rank sends
bound by     the part of the step that takes longest
--why N explains plan N: memory by part, bubble, times"""
DEVICE_PARTS = ("parameters", "gradients", "states", "activations", "buffers")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A plan, with its memory, traffic and time."""

    candidate: Candidate  # system, mesh, schedule, recomputation and micro-batches
    memory: costs.RankMemory  # bytes on the rank that needs most
    traffic: costs.Traffic  # bytes that a rank sends per step
    time: costs.StepTime  # seconds per step

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all ranks per second."""
        return self.candidate.job.tokens / self.time.step

    @property
    def reasons(self) -> tuple[str, ...]:
        """The explanation, in the order of the calculation: memory, activations, traffic, time."""
        return tuple(_reasons(self))

    def as_dict(self) -> dict[str, Any]:
        """For JSON; bytes, seconds."""
        candidate = self.candidate
        return {
            "system": candidate.system.name,
            "mesh": vars(candidate.mesh),
            "schedule": candidate.schedule or None,
            "checkpointing": candidate.checkpointing,
            "num_micro_batches": candidate.num_micro_batches,
            "micro_batch_sequences": candidate.micro_batch,
            "memory_bytes": {**vars(self.memory), "device": self.memory.device},
            "traffic_bytes": {**vars(self.traffic), "sent": self.traffic.sent},
            "bubble": candidate.bubble,
            "seconds": {**vars(self.time), "step": self.time.step},
            "tokens_per_s": self.tokens_per_s,
            "reasons": list(self.reasons),
        }


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A rejected plan and the reason.

    `system` is System.label(), or "" if no system supports the mesh.
    """

    system: str
    mesh: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Plans:
    """The result of plan().

    Plans that fit are ranked by time. Among those within 2 % of the fastest, simple systems and
    less traffic come first. Tensor parallelism over hosts comes last.
    """

    shape: ModelShape
    cluster: Cluster
    job: Job
    ranked: tuple[Plan, ...]
    refused: tuple[Refusal, ...]

    @property
    def best(self) -> Plan | None:
        """The first one that fits; None if none does."""
        return self.ranked[0] if self.ranked else None

    def to_json(self) -> str:
        """One object with everything: bytes, seconds."""
        shape = {**dataclasses.asdict(self.shape), "biases": sorted(self.shape.biases)}
        content = {
            "schema": SCHEMA,
            "model": {**shape, "num_params": self.shape.num_params},
            "cluster": dataclasses.asdict(self.cluster),
            "job": vars(self.job),
            "plans": [plan.as_dict() for plan in self.ranked],
            "refused": [vars(refusal) for refusal in self.refused],
        }
        return json.dumps(content, indent=1, allow_nan=False)

    def headline(self) -> str:
        """The job and the cluster, in two lines; a third where ranks share memory."""
        shape, cluster, job = self.shape, self.cluster, self.job
        of_memory = ""  # the cores of shared memory's collectives, and costs not measured
        if (machine := cluster.hardware.machine) is not None:
            missing = ", ".join(machine.costs.defaults)
            more = f"; not measured, but defaults: {missing}" if missing else ""
            of_memory = f"\ncollectives inside a host run on {counted(machine.cores, 'core')}{more}"
        return (
            f"{shape.name}: {shape.num_params:,} parameters, {shape.layers} layers of"
            f" {shape.hidden}; {job.tokens:,} tokens per step in sequences of {job.sequence:,},"
            f" {job.precision}, {job.optimizer}\n"
            f"{cluster.num_gpus:,} × {cluster.hardware.name} with {in_gib(cluster.memory_bytes)},"
            f" {cluster.per_host} per host; {len(self.ranked):,} plans fit,"
            f" {len(self.refused):,} do not{of_memory}"
        )

    def table(self, top: int) -> str:
        """A table of the first plans; all if top is 0. LEGEND explains it."""
        rows = [["", "system", "mesh", "batches", "memory, GiB", "sent in a step, GiB"]]
        rows[0] += ["step", "bound by"]
        for number, plan in enumerate(self.ranked[: top or None], 1):
            c = plan.candidate
            mesh = f"{c.mesh}, {c.schedule}" if c.schedule else str(c.mesh)
            batches = f"{c.num_micro_batches} × {c.micro_batch}"
            batches += ", recomputed" if c.checkpointing == "full" else ""
            sizes = [factor(each / (1 << 30)) for each in (plan.memory.device, plan.traffic.sent)]
            row = [str(number), c.system.label(c.mesh), mesh, batches, *sizes]
            rows.append([*row, in_seconds(plan.time.step), plan.time.largest])
        return columns(rows, "><<<")

    def tie_line(self, top: int) -> str:
        """How many plans count as equally fast, and how they are sorted; "" for one plan.

        `top` as in table().
        """
        fastest = min(self.ranked, key=lambda plan: plan.time.step)
        equal = [p for p in self.ranked if p.time.step <= SAME_TIME * fastest.time.step]
        if len(equal) == 1 and fastest is self.ranked[0]:
            return ""
        number, c = self.ranked.index(fastest) + 1, fastest.candidate
        hidden = f" (not shown: {c.name})" if 0 < top < number else ""
        return (
            f"Plan {number}{hidden} is the fastest, with {in_seconds(fastest.time.step)}."
            f" {counted(len(equal), 'plan')} within {SAME_TIME - 1:.0%} of it, which the"
            " prediction cannot tell apart, count as equal and are sorted: plans that send over"
            f" {MUCH_MORE} times the least come last; then fewer axes first, data parallelism"
            " before a pipeline, simpler systems, and fewer bytes sent. Plans with tensor"
            " parallelism over several hosts rank last."
        )

    def refusal_lines(self, top: int) -> Iterator[str]:
        """One line per reason and system, with the meshes; all if top is 0."""
        meshes: dict[tuple[str, str], list[str]] = defaultdict(list)
        for refusal in self.refused:
            meshes[refusal.system, refusal.reason].append(refusal.mesh)
        for (system, reason), names in list(meshes.items())[: top or None]:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            yield f"{system or 'no system'}, {names[0]}{more}: {reason}"
        if top and len(meshes) > top:
            yield f"… and {len(meshes) - top} more reasons; --top 0 and --json list all"


def _reasons(plan: Plan) -> Iterator[str]:
    c, memory, time = plan.candidate, plan.memory, plan.time
    parts = [f"{name} {in_gib(getattr(memory, name))}" for name in DEVICE_PARTS]
    reserved = c.cluster.hardware.reserved_bytes
    taken = f" (the driver takes {in_gib(reserved)})" if reserved else ""
    yield (
        f"memory: {in_gib(memory.device)} of {in_gib(c.cluster.usable_bytes)} usable{taken}"
        f" = {' + '.join(parts)}"
        + (f"; in host memory {in_gib(memory.host)} per rank" if memory.host else "")
        + (f"; on disks {in_gib(memory.disk)} per rank" if memory.disk else "")
    )
    recompute = "layers are" if c.checkpointing == "full" else "nothing is"
    m = c.num_micro_batches
    tokens = f"{c.micro_batch} × {c.job.sequence} tokens"
    batches = f"{m} micro-batch{'es' if m > 1 else ''}"
    yield f"activations: {batches} of {tokens}; {recompute} recomputed"
    p, why = c.mesh.pp, "2p to 4p"
    if m > 4 * p:
        why = "more than 4p, because fewer do not fit or do not divide"
    elif m < 2 * p:
        why = "less than 2p: the batch has no more"
    more = {
        "dp": f" and {in_seconds(time.data_hidden)} hidden by computing"
        if time.data_hidden
        else ", none hidden by computing",
        "pp": f"; {c.schedule} with {batches} ({why}), bubble {c.bubble:.1%}",
    }
    for axis, part in (("tp", "tensor"), ("dp", "data"), ("ep", "expert"), ("pp", "pipeline")):
        size, group = getattr(c.mesh, axis), c.group(axis)
        if size > 1:
            place = "inside a host" if group.num_hosts == 1 else f"over {group.num_hosts} hosts"
            sent, seconds = getattr(plan.traffic, part), getattr(time, part)
            moved = f"{in_gib(sent)} per step, {in_seconds(seconds)}"
            yield f"{axis} {size} {place}: {moved}{more.get(axis, '')}"
    if plan.traffic.offloaded:
        moved, rate = in_gib(plan.traffic.offloaded), costs.offload_rate(c) / 1e9
        yield f"offload: {moved} per step at {rate:.1f} GB/s, {in_seconds(time.offload)}"
    shown = [f"{k} {in_seconds(v)}" for k, v in time.parts.items() if v > 0.0005 * time.step]
    yield (
        f"time: {in_seconds(time.step)} = {' + '.join(shown)}, computing at"
        f" {c.cluster.hardware.utilisation:.0%} of the peak; {time.largest} dominates with"
        f" {time.parts[time.largest] / time.step:.1%}; {plan.tokens_per_s:,.0f} tokens/s"
    )


def plan(model: ModelShape | str, cluster: Cluster, job: Job) -> Plans:
    """Predicts memory, traffic and time of every system on every mesh; no rank is started.

    Args:
        model: a name such as "llama-7b", "gpt2-xl" or "mixtral-8x7b", the path of a transformers
            config.json or of its folder, or a shape.
        cluster: devices and their links.
        job: tokens of a step, and restrictions of the search.

    Raises:
        ValueError: the model is not known, the job's sizes do not multiply to the cluster's number
            of devices, or its tokens are not a whole number of sequences.
    """
    shape = model if isinstance(model, ModelShape) else find_model(model)
    job = dataclasses.replace(job, sequence=job.sequence or min(shape.context, job.tokens))
    num_sequences = job.tokens // job.sequence
    inside: list[Plan] = []
    outside: list[Plan] = []  # tensor parallelism over hosts ranks last
    refused: list[Refusal] = []
    for mesh in _meshes_of(shape, cluster, job):
        fault = mesh.fault(shape, job.sequence)
        if fault is None and num_sequences % mesh.dp:
            fault = f"dp {mesh.dp} does not divide {num_sequences} sequences"
        if fault is not None:
            refused.append(Refusal("", str(mesh), fault))
            continue
        ranked = inside if cluster.group(mesh.tp, 1).num_hosts == 1 else outside
        for system in SYSTEMS.values():
            # A single rank of several devices is considered only for "single".
            is_for_one, is_one = system.name == "single", mesh.num_ranks == 1
            is_unasked = bool(job.systems) and system.name not in job.systems
            if is_unasked or (is_for_one != is_one and (is_for_one or cluster.num_gpus > 1)):
                continue
            fault = system.fault(mesh, is_host=cluster.hardware.is_host)
            if fault is not None:
                refused.append(Refusal(system.label(mesh), str(mesh), fault))
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
    """All meshes with as many ranks as devices, and the sizes that the job requests.

    Includes those that the model does not support, and a single rank if no size is requested.
    """
    total = cluster.num_gpus
    wanted = (job.dp or 1) * (job.pp or 1) * (job.tp or 1)
    are_all_set = job.dp and job.pp and job.tp
    if total % wanted or (are_all_set and wanted != total):
        sizes = ", ".join(f"{name} {getattr(job, name)}" for name in ("dp", "pp", "tp"))
        raise ValueError(f"{sizes.replace(' 0', ' any')} do not multiply to {total} gpus")
    for tp, pp in product(_divisors(total), repeat=2):
        dp = total // (tp * pp)
        asked = ((job.dp, dp), (job.pp, pp), (job.tp, tp))
        if dp * tp * pp != total or any(size and size != own for size, own in asked):
            continue
        is_split = job.is_sequence_split
        if is_split is None:
            is_split = tp > 1 and job.sequence % tp == 0
        eps = [ep for ep in _divisors(dp) if shape.experts and shape.experts % ep == 0]
        for ep in [job.ep] if job.ep else eps or [1]:
            yield Mesh(dp, pp, tp, ep, is_split)
    if total > 1 and not (job.dp or job.pp or job.tp or job.ep):
        yield Mesh()


def by_rank(plans: list[Plan]) -> Iterator[Plan]:
    """Fastest first; plans within SAME_TIME of the fastest remaining one by their other costs.

    Those that send MUCH_MORE than the least of them come last, and then simpler systems, and less
    traffic, come first: a prediction does not know a step's time to 2 %.
    """
    left = sorted(plans, key=lambda plan: plan.time.step)
    while left:
        limit = SAME_TIME * left[0].time.step
        alike = [plan for plan in left if plan.time.step <= limit]
        left = left[len(alike) :]
        most = MUCH_MORE * min(plan.traffic.sent for plan in alike)
        alike.sort(key=lambda p: (p.traffic.sent > most, p.candidate.complexity, p.traffic.sent))
        yield from alike


def _best(
    shape: ModelShape, cluster: Cluster, job: Job, system: System, mesh: Mesh, schedule: str
) -> Plan | Refusal:
    """The fastest recomputation and number of micro-batches that fit; or why none does.

    A pipeline has at least 2p micro-batches, if there are. All numbers up to 4p are considered, and
    more if memory requires it. Without a pipeline the first one that fits is the best.
    """
    sequences = job.tokens // job.sequence // mesh.dp
    counts = [1] if system.is_lomo else _divisors(sequences)
    if mesh.pp > 1:
        counts = [m for m in counts if m >= 2 * mesh.pp] or counts[-1:]
    found: list[Plan] = []
    faults = [(math.inf, "")]  # with the bytes that are needed
    for checkpointing in job.checkpointings or CHECKPOINTINGS:
        for m in counts:
            why = mesh.schedule_fault(shape, schedule, m)
            if why is not None:
                faults[0] = math.inf, why
                continue
            of_step = checkpointing, m, sequences // m
            candidate = Candidate(shape, cluster, job, system, mesh, schedule, *of_step)
            memory = costs.memory_of(candidate)
            why = _does_not_fit(candidate, memory)
            if why is not None:
                faults.append((memory.device, why))
                continue
            traffic = costs.traffic_of(candidate)
            found.append(Plan(candidate, memory, traffic, costs.time_of(candidate, traffic)))
            if m >= 4 * mesh.pp or mesh.pp == 1:
                break  # more micro-batches take longer
    if found:
        return max(found, key=lambda plan: plan.tokens_per_s)
    _, reason = min(faults, key=itemgetter(0))
    if system.is_lomo:
        reason += "; an update inside the backward pass allows one micro-batch"
    where = f"{mesh}, {schedule}" if schedule else str(mesh)
    return Refusal(system.label(mesh), where, reason)


def _does_not_fit(candidate: Candidate, memory: costs.RankMemory) -> str | None:
    cluster = candidate.cluster
    if memory.device > cluster.usable_bytes:
        parts = {name: getattr(memory, name) for name in DEVICE_PARTS}
        largest = max(parts, key=parts.__getitem__)
        return (
            f"needs {in_gib(memory.device)} of {in_gib(cluster.usable_bytes)} usable:"
            f" {largest} alone"
            f" {in_gib(parts[largest])}"
        )
    of_host = memory.host * min(cluster.per_host, candidate.mesh.num_ranks)
    if of_host > cluster.hardware.host_memory_bytes:
        return (
            f"needs {in_gib(of_host)} of the host's memory, which has"
            f" {in_gib(cluster.hardware.host_memory_bytes)}"
        )
    return None
