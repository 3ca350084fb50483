"""The memory of a rank by part, the bytes that it sends in a step, and the time of the step.

docs/design/planner.md has the table of activations. Tensor parallelism shards activations between
two collectives. Sequence parallelism shards the others too, except the results of norms, which
ringcomm.nn keeps gathered.
"""

from dataclasses import dataclass, fields

from ringcomm.planner.candidate import Candidate, kept_by, ring_elems, sent_of_weights
from ringcomm.planner.job import STAGES_PER_RANK, Job, Mesh, live_micro_batches
from ringcomm.planner.models import ModelShape

_TOKEN_ID_BYTES = 8
# Bytes per token in ringcomm's cross-entropy: its class, and six sums in float32.
_LOSS_BYTES = 8 + 6 * 4
BUCKET_BYTES = 25 << 20  # per bucket of gradients: DDP's and zero.shard's default
_STATS_BYTES = 24  # per token in the vocabulary-parallel loss: ringcomm.ops.cross_entropy


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch on one rank."""

    layer: int  # kept by one layer
    boundary: int  # the layer's input alone, which full recomputation keeps
    embedding: int  # before the layers
    head: int  # after the layers: the last norm, the logits, the loss
    logits: int  # the part of `head` whose gradient appears in the backward pass


def activations_of(
    shape: ModelShape, job: Job, mesh: Mesh, micro_batch: int, *, fused_norms: bool = True
) -> Activations:
    """Activations of so many sequences at a time; the job has a sequence length.

    Norms keep their input alone if fused; torch's for CPUs keep two float32 numbers per element.
    """
    e, t = job.itemsize, mesh.tp
    tokens = micro_batch * job.sequence
    outside = t if mesh.is_sequence_split else 1  # ranks that share what is between layers
    width = tokens * shape.hidden
    norm = (e if fused_norms else 8) * width // outside + 4 * tokens // outside
    normed = e * width
    masks = width // outside if shape.dropout else 0
    # If there are more ranks than groups of heads, each rank has one group.
    kv_width = max(1, shape.kv_heads // t) * shape.head_dim
    attention = 2 * e * tokens * shape.query_width // t + 2 * e * tokens * kv_width
    attention += 4 * tokens * shape.heads // t
    inner = (4 if shape.gated else 2) * e * shape.ffn
    ffn = tokens * inner // t
    if shape.experts:
        # The router's probabilities, and for each of a token's experts its input and its output.
        ffn = tokens * (4 * shape.experts + shape.top_k * (inner // t + 2 * e * shape.hidden))
    logits = e * tokens * -(-shape.vocab // t)
    return Activations(
        layer=2 * (norm + normed + masks) + attention + ffn,
        boundary=e * width // outside,
        embedding=_TOKEN_ID_BYTES * tokens + masks,
        head=norm + normed + logits + _LOSS_BYTES * tokens,
        logits=logits,
    )


@dataclass(frozen=True)
class RankMemory:
    """Bytes of the rank that needs most; host and disk have offloaded bytes."""

    parameters: int
    gradients: int
    states: int
    activations: int  # for all live micro-batches
    buffers: int  # for gathers, reductions, recomputation, the logits' gradient and messages
    host: int = 0
    disk: int = 0

    @property
    def device(self) -> int:
        """All parts on the device."""
        return sum(getattr(self, field.name) for field in fields(self)[:5])


def memory_of(candidate: Candidate) -> RankMemory:
    """Memory of the fullest rank: of the first stage, or of the last, which has the logits."""
    stages = sorted({0, candidate.head_stage})
    return max((_of_stage(candidate, stage) for stage in stages), key=lambda memory: memory.device)


def _of_stage(candidate: Candidate, stage: int) -> RankMemory:
    c, is_end = candidate, stage == candidate.head_stage
    fused_norms = not c.cluster.hardware.is_host
    acts = activations_of(c.shape, c.job, c.mesh, c.micro_batch, fused_norms=fused_norms)
    layer = acts.boundary if c.checkpointing == "full" else acts.layer
    # Temporary memory: a layer's recomputation or the logits' gradient, and messages.
    passing = max(acts.logits * is_end, acts.layer - layer)
    if c.mesh.pp > 1:
        passing += 2 * c.message_bytes
    of_one = c.num_layers(stage) * layer + acts.embedding * (stage == 0)
    of_head = acts.head * is_end
    num_micro_batches = c.num_micro_batches if c.mesh.pp > 1 else 1
    live = live_micro_batches(c.schedule, c.mesh.pp, num_micro_batches, stage)
    # The head's backward pass follows its forward pass, so one micro-batch is live; all with GPipe.
    live_heads = live if c.schedule == "gpipe" else 1
    kept = c.kept(stage)
    return RankMemory(
        parameters=kept.parameters,
        gradients=kept.gradients,
        states=kept.states,
        activations=int(live * of_one) + int(live_heads * of_head),
        buffers=kept.buffers + passing,
        host=kept.elsewhere if c.system.states == "host" else 0,
        disk=kept.elsewhere if c.system.states == "disk" else 0,
    )


@dataclass(frozen=True)
class Traffic:
    """Bytes of one rank and step."""

    data: int = 0  # weights and gradients
    tensor: int = 0  # activations, sums of the loss, gradients of norms
    pipeline: int = 0  # activations and their gradients to the neighbours
    expert: int = 0  # tokens to and from the experts of other ranks
    offloaded: int = 0  # to and from host memory or disks

    @property
    def sent(self) -> int:
        """To other ranks."""
        return self.data + self.tensor + self.pipeline + self.expert


def traffic_of(candidate: Candidate) -> Traffic:
    """The traffic of the rank that sends most: of a pipeline's first, last or a middle stage."""
    pp = candidate.mesh.pp
    found = [traffic_of_stage(candidate, stage) for stage in sorted({0, min(1, pp - 1), pp - 1})]
    return max(found, key=lambda traffic: (traffic.sent, traffic.offloaded))


def traffic_of_stage(candidate: Candidate, stage: int) -> Traffic:
    """The traffic of the first rank of one pipeline stage."""
    c, mesh, m = candidate, candidate.mesh, candidate.num_micro_batches
    data = sum(sent_of_weights(part, c.system, c.job, n, m) for part, n in c.parts(stage))
    if c.shape.tied and c.head_stage != 0 and stage in (0, c.head_stage):
        # A tied embedding on two stages: an all_reduce of two ranks.
        data += c.job.itemsize * -(-c.shape.vocab // mesh.tp) * c.shape.hidden
    # Of a micro-batch: forward to the next stage, and back to the one before. Interleaved stages
    # are a ring of two rounds; the V form has two of each.
    ends = (stage == 0) + (stage == mesh.pp - 1)
    messages = {"interleaved": 4 - ends, "zbv": 2 * (2 - ends)}.get(c.schedule, 2 - ends)
    kept = c.kept(stage)
    return Traffic(
        data=data,
        tensor=m * _tensor_bytes(c, stage),
        pipeline=m * c.message_bytes * messages,
        expert=m * (_calls_of_experts(c, stage) * c.routed_bytes * (mesh.ep - 1) // mesh.ep),
        offloaded=kept.streamed + m * kept.streamed_each,
    )


def _calls_of_tensor_parallelism(candidate: Candidate, stage: int) -> int:
    """Halves of all_reduces, of b·s·h each, in a micro-batch's passes on a stage.

    A layer has two all_reduces forward and two backward, or as many reduce-scatters and
    all-gathers; recomputation repeats what comes before its last one. The embedding has one, and
    the head's input has one.
    """
    again = 2 + candidate.mesh.is_sequence_split if candidate.checkpointing == "full" else 0
    ends = 2 * ((stage == 0) + (stage == candidate.head_stage))
    return (8 + again) * candidate.num_layers(stage) + ends


def _calls_of_experts(candidate: Candidate, stage: int) -> int:
    """all_to_alls of a micro-batch: tokens go and come back, and so do their gradients."""
    per_layer = 6 if candidate.checkpointing == "full" else 4
    return per_layer * candidate.num_layers(stage)


def _tensor_bytes(candidate: Candidate, stage: int) -> int:
    """Of a micro-batch."""
    shape, job, mesh = candidate.shape, candidate.job, candidate.mesh
    t, num_layers = mesh.tp, candidate.num_layers(stage)
    halves = _calls_of_tensor_parallelism(candidate, stage)
    is_head = stage == candidate.head_stage
    e, tokens = job.itemsize, candidate.micro_batch * job.sequence
    if mesh.is_sequence_split:
        sent = halves * (t - 1) * e * tokens // t * shape.hidden
        # Gradients of norms and biases, which each rank applies to its own tokens.
        for unit, num_units in ((shape.layer, num_layers), (shape.head, int(is_head))):
            alike = [w for w in unit if w.split is None and len(w.shape) == 1]
            sent += e * num_units * sum(ring_elems(weight.num_elems, t) for weight in alike)
    else:
        sent = halves // 2 * e * ring_elems(tokens * shape.hidden, t)
    if is_head:
        sent += _STATS_BYTES * ring_elems(tokens + 1, t)
    copies = t // shape.kv_heads
    if copies > 1:  # several ranks have the same heads
        elems = 2 * shape.head_dim * (shape.hidden + ("qkv" in shape.biases)) * num_layers
        sent += e * ring_elems(elems, copies)
    return sent


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. Activations' communication is not hidden, but between micro-batches."""

    compute: float  # forward, backward and recomputation
    tensor: float
    expert: float
    pipeline: float
    data: float  # weights and gradients, not hidden by computing
    data_hidden: float  # weights and gradients, hidden by computing; not part of the step
    offload: float  # not hidden by computing
    update: float  # of weights and states, limited by the device's memory
    bubble: float  # in which a pipeline rank waits

    @property
    def parts(self) -> dict[str, float]:
        """The parts of the step, by name."""
        return {name: seconds for name, seconds in vars(self).items() if name != "data_hidden"}

    @property
    def step(self) -> float:
        """The whole step."""
        return sum(self.parts.values())

    @property
    def largest(self) -> str:
        """The part that takes longest."""
        return max(self.parts, key=self.parts.__getitem__)


def compute_flops(shape: ModelShape, job: Job, checkpointing: str) -> float:
    """6 FLOP per token and weight, and 6 s h a layer for causal attention, of all ranks.

    A third more with recomputation.
    """
    of_weights = 6.0 * job.tokens * shape.num_active_params
    of_attention = 6.0 * job.tokens * job.sequence * shape.query_width * shape.layers
    return (of_weights + of_attention) * (4 / 3 if checkpointing == "full" else 1)


def time_of(candidate: Candidate, traffic: Traffic) -> StepTime:
    """The time of a step, of a rank of the first stage."""
    c, hardware, m = candidate, candidate.cluster.hardware, candidate.num_micro_batches
    rate = hardware.peak_flops[c.job.precision] * hardware.utilisation
    compute = compute_flops(c.shape, c.job, c.checkpointing) / (c.mesh.num_ranks * rate)
    group, size = c.group("tp"), c.message_bytes
    half = group.half(size) if c.mesh.is_sequence_split else group.all_reduce(size) / 2
    tensor = m * _calls_of_tensor_parallelism(c, 0) * half
    routed = c.routed_bytes * (c.mesh.ep - 1) / c.mesh.ep
    expert = m * _calls_of_experts(c, 0) * c.group("ep").all_to_all(routed)
    data, may_hide = _data_seconds(c, compute)
    hidden = min(may_hide, data) * hardware.overlap
    moved = 0.0  # states and masters are read and written, gradients read, weights written
    for part, num_ranks in c.parts(0):
        states = kept_by(part, c.system, c.job, num_ranks).states
        weights = c.job.itemsize * part.num_elems / (num_ranks if c.system.stage else 1)
        moved += 2 * (states + weights)
    # Messages through all stages and back; those of later micro-batches may be hidden.
    rounds = STAGES_PER_RANK.get(c.schedule, 1)
    hops = 2 * (c.mesh.pp * rounds - 1) + (1 - hardware.overlap) * 2 * rounds * (m - 1)
    return StepTime(
        compute=compute,
        tensor=tensor,
        expert=expert,
        pipeline=hops * c.group("pp").hop(size) if c.mesh.pp > 1 else 0.0,
        data=data - hidden,
        data_hidden=hidden,
        offload=traffic.offloaded / offload_rate(c) if c.system.states != "device" else 0.0,
        update=moved / hardware.memory_rate,
        bubble=(compute + tensor + expert) * c.bubble / (1 - c.bubble),
    )


def _data_seconds(candidate: Candidate, compute: float) -> tuple[float, float]:
    """Of weights and gradients, and how much of it computing may hide.

    DistributedDataParallel overlaps gradients with the last micro-batch's backward pass, and
    fully_shard overlaps gathers and reductions with all computing. Stages 1 and 2, LOMO on replicas
    and offloaded weights block while they communicate.
    """
    system, m, hardware = candidate.system, candidate.num_micro_batches, candidate.cluster.hardware
    new = 1 / hardware.new_memory_rate if hardware.new_memory_rate else 0.0
    # Per byte at stage 3: fully_shard copies what it has gathered, twice, and what it will reduce,
    # to new memory.
    copy_s = 3 * (2 / hardware.memory_rate + new)
    once = copies = 0.0
    for (part, num_ranks), axis in zip(candidate.parts(0), ("dp", "replicas"), strict=True):
        num_bytes = candidate.job.itemsize * part.num_elems
        if not num_bytes or num_ranks == 1:
            continue
        # Collectives that all weights, or their gradients, take: by bucket, unit, or weight.
        calls, group = -(-num_bytes // BUCKET_BYTES), candidate.group(axis)
        if system.stage == 3:
            calls = part.num_layers + 1
        elif system.is_lomo:
            calls = len(part.before) + part.num_layers * len(part.layer) + len(part.after)
        collective = group.half if system.stage else group.all_reduce
        once += calls * collective(num_bytes / calls)
        if system.stage == 3:
            copies += m * num_bytes * copy_s
    halves = {0: 1, 1: 2, 2: m + 1, 3: 3 * m}[system.stage]
    is_on_replicas = system.is_lomo and system.stage == 0
    blocks = is_on_replicas or system.weights != "device" or system.stage in (1, 2)
    hiding = compute if system.stage == 3 else compute * 2 / 3 / m
    return halves * once + copies, 0.0 if blocks else hiding


def offload_rate(candidate: Candidate) -> float:
    """Bytes per second: each rank has its own link to the host; a host's ranks share its disks."""
    hardware, cluster = candidate.cluster.hardware, candidate.cluster
    if candidate.system.states == "host":
        return hardware.host_rate
    return hardware.disk_rate / min(candidate.mesh.num_ranks, cluster.per_host)
