"""How long a step takes: computing, communication that nothing hides, and the pipeline's bubble."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ringcomm.planner.cluster import Cluster
from ringcomm.planner.hardware import Hardware
from ringcomm.planner.job import Job
from ringcomm.planner.mesh import Candidate, System, bubble
from ringcomm.planner.models import ModelShape
from ringcomm.planner.rank_weights import RankPart, kept_by, layers_of, rank_part
from ringcomm.planner.traffic import Traffic, calls_of_tensor_parallelism

__all__ = ["StepTime", "compute_seconds", "time_of"]

BUCKET_BYTES = 25 << 20  # of gradients: DDP's and zero.shard's


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        compute: forward, backward and recomputation.
        tensor, expert, pipeline: communication of activations, which is not hidden but for a
            pipeline's between its first and last micro-batch.
        data: of weights and gradients, what computing does not hide.
        data_hidden: what it does hide; no part of the step.
        offload: to and from host memory or disks, which takes turns with computing.
        update: of weights and states, by the device's memory.
        bubble: in which a rank of a pipeline waits.
    """

    compute: float
    tensor: float
    expert: float
    pipeline: float
    data: float
    data_hidden: float
    offload: float
    update: float
    bubble: float

    @property
    def step(self) -> float:
        """All of it."""
        return sum(getattr(self, f.name) for f in fields(self)) - self.data_hidden

    @property
    def largest(self) -> str:
        """The part that takes longest."""
        parts = [field.name for field in fields(self) if field.name != "data_hidden"]
        return max(parts, key=lambda name: getattr(self, name))


def compute_seconds(
    shape: ModelShape, job: Job, cluster: Cluster, num_ranks: int, checkpointing: str
) -> float:
    """6 FLOP per token and weight, and 6 s h a layer for causal attention, shared by the ranks.

    A third more with full recomputation; with selective one that of attention alone.
    """
    hardware = cluster.hardware
    of_weights = 6.0 * job.tokens * shape.num_active_params
    of_attention = 6.0 * job.tokens * job.sequence * shape.query_width * shape.layers
    if checkpointing == "full":
        of_weights, of_attention = of_weights * 4 / 3, of_attention * 4 / 3
    elif checkpointing == "selective":
        of_attention *= 4 / 3
    rate = hardware.peak_flops[job.precision] * (job.utilisation or hardware.utilisation)
    return (of_weights + of_attention) / (num_ranks * rate)


def time_of(
    shape: ModelShape, job: Job, cluster: Cluster, candidate: Candidate, traffic: Traffic
) -> StepTime:
    """Of a step, by the rank that the first stage has."""
    mesh, hardware = candidate.mesh, cluster.hardware
    m = candidate.num_micro_batches
    compute = compute_seconds(shape, job, cluster, mesh.num_ranks, candidate.checkpointing)
    tensor = m * _tensor_seconds(shape, job, cluster, candidate)
    expert = m * _expert_seconds(shape, job, cluster, candidate)
    pipeline = _pipeline_seconds(shape, job, cluster, candidate)
    data, may_hide = _data_seconds(shape, job, cluster, candidate, traffic, compute)
    hidden = min(may_hide, data) * hardware.overlap
    offload = _offload_seconds(candidate, cluster, traffic)
    share = float(bubble(candidate.schedule or "1f1b", mesh.pp, m, job.virtual_stages))
    busy = compute + tensor + expert
    return StepTime(
        compute=compute,
        tensor=tensor,
        expert=expert,
        pipeline=pipeline,
        data=data - hidden,
        data_hidden=hidden,
        offload=offload,
        update=_update_seconds(shape, job, cluster, candidate),
        bubble=busy * share / (1 - share),
    )


def _message(shape: ModelShape, job: Job, candidate: Candidate) -> int:
    return job.itemsize * candidate.micro_batch * job.sequence * shape.hidden


def _tensor_seconds(shape: ModelShape, job: Job, cluster: Cluster, candidate: Candidate) -> float:
    """Of a micro-batch on the first stage."""
    halves = calls_of_tensor_parallelism(shape, job, candidate, 0)
    if not halves:
        return 0.0
    group, num_bytes = cluster.tensor_group(candidate.mesh), _message(shape, job, candidate)
    if candidate.mesh.is_sequence_split:
        return halves * group.half(num_bytes)
    return halves / 2 * group.all_reduce(num_bytes)


def _expert_seconds(shape: ModelShape, job: Job, cluster: Cluster, candidate: Candidate) -> float:
    """Of a micro-batch: two all_to_alls a layer each way."""
    mesh = candidate.mesh
    if mesh.ep == 1:
        return 0.0
    routed = shape.top_k * _message(shape, job, candidate)
    routed //= mesh.tp if mesh.is_sequence_split else 1
    passes = 6 if candidate.checkpointing == "full" else 4
    calls = passes * layers_of(shape.layers, mesh.pp, 0)
    return calls * cluster.expert_group(mesh).all_to_all(routed * (mesh.ep - 1) / mesh.ep)


def _pipeline_seconds(shape: ModelShape, job: Job, cluster: Cluster, candidate: Candidate) -> float:
    """The way through all stages and back; what micro-batches send between may be hidden."""
    pp = candidate.mesh.pp
    if pp == 1:
        return 0.0
    hop = cluster.pipeline_group(candidate.mesh).hop(_message(shape, job, candidate))
    rounds = {"interleaved": job.virtual_stages, "zbv": 2}.get(candidate.schedule, 1)
    between = 2 * rounds * (candidate.num_micro_batches - 1)
    return hop * (2 * (pp * rounds - 1) + (1 - cluster.hardware.overlap) * between)


def _data_seconds(
    shape: ModelShape,
    job: Job,
    cluster: Cluster,
    candidate: Candidate,
    traffic: Traffic,
    compute: float,
) -> tuple[float, float]:
    """Of weights and gradients, and how much of it computing may hide.

    DistributedDataParallel hides gradients behind the last micro-batch's backward pass, and
    fully_shard gathers and reductions behind all computing. Stages 1 and 2, LOMO and offloaded
    weights communicate where they stand.
    """
    mesh, system, m = candidate.mesh, candidate.system, candidate.num_micro_batches
    if mesh.dp == 1:
        return 0.0, 0.0
    dense, experts = rank_part(shape, mesh, 0, candidate.head_stage)
    once = 0.0
    copies = 0.0
    groups = ((dense, cluster.data_group(mesh)), (experts, cluster.replica_group(mesh)))
    for part, group in groups:
        num_bytes = job.itemsize * part.num_elems
        if not num_bytes or group.num_ranks == 1:
            continue
        calls = _num_calls(part, system, num_bytes)
        collective = group.half if system.stage else group.all_reduce
        once += calls * collective(num_bytes / calls)
        if system.stage == 3:
            copies += m * num_bytes * _copy_seconds_per_byte(system, cluster.hardware)
    halves = {0: 1, 1: 2, 2: m + 1, 3: 3 * m}[system.stage]
    blocks = system.is_lomo or system.weights != "device" or system.stage in (1, 2)
    hiding = compute if system.stage == 3 else compute * 2 / 3 / m
    return halves * once + copies, 0.0 if blocks else hiding


def _copy_seconds_per_byte(system: System, hardware: Hardware) -> float:
    """Of a weight at stage 3, for a micro-batch.

    fully_shard copies what it has gathered, twice, and what it will reduce, to memory that is new;
    WeightShards gathers to such memory, and reduces gradients where they are.
    """
    new = 1 / hardware.new_memory_rate if hardware.new_memory_rate else 0.0
    return 2 * new if system.is_lomo else 3 * (2 / hardware.memory_rate + new)


def _num_calls(part: RankPart, system: System, num_bytes: int) -> int:
    """Collectives that all weights, or their gradients, take: by bucket, unit, or weight."""
    if system.is_lomo and system.stage == 0:
        return len(part.before) + part.num_layers * len(part.layer) + len(part.after)
    if system.stage == 3:
        return part.num_layers + 1
    return -(-num_bytes // BUCKET_BYTES)


def _offload_seconds(candidate: Candidate, cluster: Cluster, traffic: Traffic) -> float:
    """Each rank has its own way to the host; disks are the host's, and its ranks share them."""
    hardware = cluster.hardware
    tier = candidate.system.states
    if tier == "device":
        return 0.0
    if tier == "host":
        return traffic.offloaded / hardware.host_rate
    sharers = min(candidate.mesh.num_ranks, cluster.per_host)
    return traffic.offloaded * sharers / hardware.disk_rate


def _update_seconds(shape: ModelShape, job: Job, cluster: Cluster, candidate: Candidate) -> float:
    """States and masters are read and written, gradients read, weights written."""
    mesh, system = candidate.mesh, candidate.system
    dense, experts = rank_part(shape, mesh, 0, candidate.head_stage)
    owners = mesh.dp // mesh.ep
    moved = 0.0
    for part, sharers in ((dense, mesh.dp), (experts, owners)):
        kept = kept_by(part, system, job, sharers)
        share = sharers if system.stage else 1
        moved += 2 * kept.states + 2 * job.itemsize * part.num_elems / share
    return moved / cluster.hardware.memory_rate
