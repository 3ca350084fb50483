"""The tables: what goes together in training, and what is refused, by which error.

The first three train the small network of pair_models.py with every option of the library's
optimizers and layers. The others train a Llama of transformers by whole systems: what users do
between steps, what they put around a model, and ranks of a mesh that differ.
"""

from __future__ import annotations

from collections.abc import Iterator

from pair_table import Case, Table

# Of changes of weights of the Llama, and of what a loop sees, as a share of their norm.
TOLERANCE = 1e-4

ZERO = Table.of(
    """
    stage: 1 | 2 | 3 | infinity
    optimizer: sgd | adamw | muon and adamw | adafactor | shampoo | schedule-free
    state: device | host | file
    dtype: float32 | bfloat16 | float16 | bfloat16 weights
    reduce dtype: default | 16 bits
    accumulation: 1 | 3 | 3 with no_sync
    clipping: none | option | optimizer | torch
    loss scale: none | fixed | dynamic | GradScaler
    gradients: all | none on rank 1 | none on any rank | none in the first micro-batch
        | layer skipped on rank 1
    weights: plain | frozen | tied
    groups: one | decay first | no decay first
    recompute: no | yes | reentrant
    resume: no | same ranks | one rank | torch's state dict
    compile: no | yes
    around: nothing | DDP | fully_shard before | Accelerate | Trainer
    backend: ringcomm | gloo
    """,
    r"""
    around: DDP
        RuntimeError: DistributedDataParallel|flatten
        the model itself: zero.shard reduces gradients
    stage: 3; dtype: float16; reduce dtype: 16 bits; loss scale: fixed or dynamic
        ValueError: reduce_dtype
        reduce_dtype=torch.float32, the default
    around: fully_shard before
        ValueError: already sharded
        one of the two
    stage: 1 or 2 or infinity; clipping: torch
        RuntimeError: optimizer\.clip_grad_norm_
        optimizer.clip_grad_norm_(max_norm), or the option clip_grad_norm=
        besides state: host
    stage: 1 or 2 or infinity; loss scale: GradScaler
        RuntimeError: loss_scale=
        the option loss_scale=, and optimizer.scale(loss).backward()
        besides state: host
    around: Accelerate or Trainer; loss scale: GradScaler
        ValueError: GradScaler.*loss_scale="dynamic"
        mixed_precision="no", and the option loss_scale=
    stage: infinity; state: device
        ValueError: ringcomm.parallel.offload
        an optimizer of ringcomm.parallel.offload
    stage: infinity; dtype: bfloat16 or float16
        ValueError: param_dtype
        a model of 16-bit weights: model.to(dtype)
        besides state: host
    stage: infinity; resume: torch's state dict
        RuntimeError: ringcomm\.parallel\.get_state_dict
        ringcomm.parallel.get_state_dict() and set_state_dict()
        besides state: host
        late
    stage: infinity; backend: gloo
        ValueError: ringcomm
        a group of backend ringcomm
        besides state: host
    stage: infinity; compile: yes
        RuntimeError: torch.compile
        stage 3, or no torch.compile
        besides state: host
    stage: 3; dtype: bfloat16 weights
        ValueError: float32
        float32 weights and param_dtype=torch.bfloat16
    stage: infinity; accumulation: 3 with no_sync
        RuntimeError: no_sync\(\)
        accumulation without it, or another stage
        besides state: host
    stage: infinity; gradients: none on rank 1
        RuntimeError: some ranks only, which zero.shard
        stage 1 or 2, or a loss that uses every weight on every rank
        besides state: host; backend: ringcomm
    stage: infinity; gradients: layer skipped on rank 1
        MismatchError
        stage 1 or 2, or a loss that uses every weight on every rank
        besides state: host
        only with backend: ringcomm
    stage: 3; gradients: layer skipped on rank 1
        MismatchError
        stage 1 or 2, or a loss that uses every layer on every rank
        only with backend: ringcomm
    """,
    """
    dtype: float32; reduce dtype: 16 bits
    accumulation: 1; gradients: none in the first micro-batch
    accumulation: 3 with no_sync; around: Accelerate or Trainer
    """,
)

LOMO = Table.of(
    """
    optimizer: Lomo | AdaLomo
    weights in: replicas | fully_shard | replicas without group=
    dtype: float32 | bfloat16 weights
    reduce dtype: default | 16 bits
    rounding: nearest | stochastic | split
    accumulation: 1 | 3
    clipping: none | norm | norm in two passes | value | torch
    loss scale: none | fixed | dynamic | GradScaler
    gradients: all | none on rank 1 | none on any rank | none in the first micro-batch
        | layer skipped on rank 1
    weights: plain | frozen | tied
    groups: one | decay first | no decay first
    given: model | parameters
    overlap: no | yes
    recompute: no | yes | reentrant
    resume: no | same ranks
    compile: no | yes
    around: nothing | DDP | Accelerate | Trainer
    backend: ringcomm | gloo
    """,
    """
    weights in: replicas or replicas without group=; around: DDP
        ValueError|RuntimeError: DistributedDataParallel
        the model itself, and group=
    weights in: fully_shard; around: DDP
        RuntimeError: DistributedDataParallel|flatten
        the model itself: its gradients are reduced
    weights in: replicas without group=
        ValueError: group=dist.group.WORLD
        group=dist.group.WORLD; group="none" for ranks that train apart
    clipping: torch
        RuntimeError: clip_grad_norm=
        the option clip_grad_norm=
        late
    loss scale: GradScaler
        RuntimeError: loss_scale=
        the option loss_scale=, and optimizer.scale(loss).backward()
        late
    around: Accelerate or Trainer; loss scale: GradScaler
        ValueError: GradScaler.*loss_scale="dynamic"
        mixed_precision="no", and the option loss_scale=
    clipping: norm in two passes; accumulation: 3
        ValueError: cannot accumulate
        clip_mode="deferred"
    weights in: fully_shard; gradients: none on rank 1
        RuntimeError: some ranks
        replicas with group=, or a loss that uses every weight on every rank
    weights in: fully_shard; gradients: layer skipped on rank 1
        MismatchError
        replicas with group=, or a loss that uses every weight on every rank
        only with backend: ringcomm
        late
    """,
    """
    dtype: float32; rounding: stochastic or split
    dtype: float32; reduce dtype: 16 bits
    accumulation: 1; gradients: none in the first micro-batch
    weights in: fully_shard; overlap: yes
    given: model; groups: decay first or no decay first
    """,
    also=(  # gradients that wait for step() beside those that are used
        "weights in: fully_shard; accumulation: 3; gradients: none in the first micro-batch; "
        "around: Trainer",
    ),
)

PIPELINES = "pipeline 2 x data 2 or pipeline 2 x tensor 2 or pipeline 2 x sequence 2"
BY_HAND = Table.of(
    """
    mesh: tensor 2 x data 2 | sequence 2 x data 2 | pipeline 2 x data 2 | pipeline 2 x tensor 2
        | pipeline 2 x sequence 2 | experts 2 x data 4 | experts 4 x data 4
    trained by: optimizer | DDP | fully_shard | zero 1 | zero 2 | zero 3 | Lomo
    optimizer: sgd | adamw
    dtype: float32 | bfloat16 weights
    accumulation: 1 | 3
    clipping: none | function | option | torch
    loss scale: none | fixed | dynamic | GradScaler
    weights: plain | frozen | tied
    groups: one | no decay first
    recompute: no | yes
    resume: no | same ranks | one rank | another mesh
    backend: ringcomm | gloo
    """,
    rf"""
    mesh: {PIPELINES}; trained by: zero 3
        ValueError: which a pipeline does not call
        stage 1 or 2, or Pipeline(wrap=lambda stage: fully_shard(stage, mesh=...))
    mesh: sequence 2 x data 2 or pipeline 2 x sequence 2; trained by: fully_shard
        ValueError: sequence_dim.*fully_shard
        DistributedDataParallel, or zero.shard at stage 1 or 2
    mesh: sequence 2 x data 2; trained by: zero 3
        ValueError: summed over the ranks of a tensor-parallel group
        stage 1 or 2
    mesh: {PIPELINES}; trained by: Lomo; clipping: option
        ValueError: only the gradients of this rank's pipeline stages
        zero.shard
    mesh: {PIPELINES}; trained by: Lomo; loss scale: fixed or dynamic
        ValueError: only the gradients of this rank's pipeline stages
        zero.shard
    mesh: {PIPELINES}; trained by: Lomo; weights: tied
        ValueError: shared by stages
        zero.shard at stage 1 or 2
    trained by: Lomo; clipping: function
        RuntimeError: clip_grad_norm=
        the option clip_grad_norm= of Lomo
        late
    clipping: torch
        RuntimeError: parallel\.clip_grad_norm_|optimizer\.clip_grad_norm_|clip_grad_norm=
        ringcomm.parallel.clip_grad_norm_(model, max_norm)
        besides mesh: tensor 2 x data 2 or pipeline 2 x data 2 or experts 4 x data 4
        late
    loss scale: GradScaler
        RuntimeError: loss_scale=
        torch's ShardedGradScaler; the option loss_scale= of zero.shard() or Lomo
        besides mesh: tensor 2 x data 2 or pipeline 2 x data 2 or experts 4 x data 4
        late
    trained by: zero 3; dtype: bfloat16 weights
        ValueError: float32
        float32 weights and param_dtype=torch.bfloat16
    """,
    """
    trained by: optimizer or DDP or fully_shard; clipping: option
    trained by: optimizer or DDP or fully_shard; loss scale: fixed or dynamic
    trained by: Lomo; optimizer: adamw
    """,
    also=("mesh: experts 4 x data 4; trained by: zero 3; recompute: yes",),
)

BETWEEN = Table.of(
    """
    system: zero 1 | zero 2 | zero 3 | infinity | Lomo | AdaLomo | tensor | pipeline | mesh
    between steps: none | eval | input gradient | deepcopy | generate | state_dict
        | exception in forward | exception in backward | save and load | freeze
    buffers: none | random | BatchNorm
    labels: full | padded | none on a rank
    scheduler: after | before
    seeds: equal | per rank
    optimizer: AdamW | SGD | Adam | a user's class | Adafactor
    leaving: together | one by one
    """,
    r"""
    system: zero 3; between steps: deepcopy
        RuntimeError: cannot be copied
        get_state_dict(model, full=True), and an average of the weights in it
    system: infinity; between steps: deepcopy
        RuntimeError: cannot be copied
        get_state_dict(model, full=True)
    system: infinity; between steps: state_dict
        RuntimeError: get_state_dict
        ringcomm.parallel.get_state_dict()
    system: infinity; optimizer: Adam or a user's class or Adafactor
        TypeError|ValueError: ringcomm\.parallel\.offload
        an optimizer of ringcomm.parallel.offload
    system: tensor or mesh; optimizer: Adafactor
        TypeError: Adafactor needs full weights
        another optimizer, such as AdamW
    system: tensor or mesh; between steps: deepcopy
        RuntimeError: cannot be copied
        get_state_dict(model, full=True)
    system: pipeline; between steps: input gradient or generate
        TypeError|RuntimeError|AttributeError: [Pp]ipeline
        step() and evaluate(): a rank has a part of the model
    system: pipeline; between steps: deepcopy
        TypeError|RuntimeError: copied
        get_state_dict(train, full=True)
    system: pipeline; between steps: exception in forward or exception in backward
        ValueError|RuntimeError|RingcommError: an error of the user's|was aborted|stage
        a new process group and Pipeline: other ranks cannot wait for the stage
    system: pipeline; between steps: freeze
        ValueError: make a new Pipeline
        a new Pipeline of the same blocks
    """,
    """
    # These are the optimizers, and are made of the model.
    system: Lomo or AdaLomo; optimizer: SGD or Adam or a user's class or Adafactor
    system: Lomo or AdaLomo; scheduler: before
    """,
)

# What a person's program has around a model.
PROGRAM = Table.of(
    """
    system: zero 1 | zero 2 | zero 3 | infinity | Lomo | AdaLomo | data | tensor | pipeline | mesh
    loss: the model's | mean | shifts labels | ignore_index=-1 | class weights | sum / num_items
    wrapper: none | DDP | torch.compile | checkpoint_wrapper | adapters | a user's module
    default dtype: float32 | bfloat16 | float64
    first forward: training | no_grad | inference_mode
    trained: always | thawed | never
    seeds: equal | per rank
    memory format: contiguous | transposed | channels_last
    """,
    """
    wrapper: DDP
        ValueError|TypeError: DistributedDataParallel
        the model itself
    wrapper: a user's module; system: data; loss: the model's
        ValueError: has no loss: pass loss_fn
        loss_fn
    wrapper: torch.compile; system: infinity
        RuntimeError: torch.compile
        stage 3, or no torch.compile
    wrapper: a user's module or adapters; system: tensor or pipeline or mesh
        ValueError|TypeError: is not a model of transformers|has no|tensor-parallel plan
        the model itself; data parallelism and ZeRO for adapters
    memory format: transposed or channels_last; system: zero 3 or infinity
        NotImplementedError|ValueError: contiguous
        contiguous weights, or stage 1 or 2
    trained: thawed; system: Lomo or AdaLomo
        ValueError: requires grad since .* was made, which does not train it
        add_param_group()
    trained: thawed; system: pipeline
        ValueError|RingcommError: make a new Pipeline|was aborted
        a new Pipeline of the same blocks
    """,
    """
    # A user's loss in a pipeline gets a user's blocks, which are taken out of the wrapper.
    wrapper: DDP; system: pipeline; loss: mean or shifts labels or ignore_index=-1 or class weights
    wrapper: DDP; system: pipeline; loss: sum / num_items
    """,
)

# Ranks that do different things on a mesh: on four ranks, and on eight.
_MESH_AXES = """
    zero: 1 | 0 | 2 | 3
    schedule: {schedules}
    used: all | others on each rank | one rank alone | by nobody
    tied: no | yes
    sizes: even | uneven
    between steps: none | save and load
    seeds: equal | per rank
"""
_WITH_FSDP = (
    "fsdp x pp or fsdp x tp or dp x fsdp or fsdp x pp x tp or dp x fsdp x pp or dp x fsdp x tp"
)
_MESH_REFUSED = f"""
    mesh: dp x tp or dp x pp or pp x tp or dp x pp x tp; zero: 3
        ValueError: shards over fsdp, which is 1
        a larger fsdp and a smaller dp
    mesh: {_WITH_FSDP}; zero: 0
        ValueError: use dp instead of fsdp
        dp instead of fsdp
    mesh: fsdp x pp or fsdp x pp x tp or dp x fsdp x pp; zero: 3; schedule: zbv; tied: yes
        ValueError: which ends the tie
        another schedule, such as 1f1b, or stage 1 or 2
"""
_WITHOUT_PP = "dp x tp or fsdp x tp or dp x fsdp or dp x fsdp x tp"
_MESH_MEANINGLESS = f"""
    mesh: {_WITHOUT_PP}; schedule: gpipe or interleaved or zero-bubble or zbv
    mesh: pp x tp; used: others on each rank or one rank alone
    mesh: dp x pp or fsdp x pp or dp x fsdp or dp x fsdp x pp; sizes: uneven
"""
MESHES = Table.of(
    f"""
    mesh: dp x tp | dp x pp | fsdp x pp | fsdp x tp | dp x fsdp | pp x tp
    {_MESH_AXES.format(schedules="1f1b | gpipe | interleaved | zero-bubble | zbv").strip()}
    labels: full | padded | none on a rank
    optimizer: AdamW | SGD
    micro-batches: 2 | 4
    recompute: no | yes
    """,
    _MESH_REFUSED,
    _MESH_MEANINGLESS,
)
CUBES = Table.of(
    f"""
    mesh: dp x pp x tp | fsdp x pp x tp | dp x fsdp x pp | dp x fsdp x tp
    {_MESH_AXES.format(schedules="1f1b | interleaved | zbv").strip()}
    """,
    _MESH_REFUSED,
    _MESH_MEANINGLESS,
    strength=3,
)

# By the title of a section of docs/reference/pairs.md; and those of whole loops.
TABLES = {
    "zero.shard": ZERO,
    "Lomo and AdaLomo": LOMO,
    "Meshes": BY_HAND,
    "Between steps": BETWEEN,
    "A person's program": PROGRAM,
    "Meshes whose ranks differ": MESHES,
    "Meshes of three axes": CUBES,
}
LOOPS = tuple(TABLES)[3:]
# Where a table's cases run.
_WHERE = {
    "zero.shard": "on 2 ranks ",
    "Lomo and AdaLomo": "on 2 ranks ",
    "Meshes": "on 4 ranks ",
    "Between steps": "on 2 ranks, and 4 for mesh (dp 2 x tp 2 with ZeRO-2), ",
    "A person's program": "on as many ranks (data: dp 2 without ZeRO) ",
    "Meshes whose ranks differ": "of parallelize() on 4 ranks ",
    "Meshes of three axes": "of parallelize() on 8 ranks ",
}


def section(name: str) -> str:
    """A table's part of docs/reference/pairs.md, which tools/site_pages.py puts there."""
    table = TABLES[name]
    kinds = {2: "pairs", 3: "triples"}[table.strength]
    num, num_refused = len(table.covering), len(table.refusals)
    lines = [
        f"{num} cases {_WHERE[name]}cover all {kinds}; {num_refused} cases are refused.",
        *("", "| feature | values |", "|---|---|"),
        *(f"| {axis} | {' · '.join(values)} |" for axis, values in table.axes.items()),
        *("", "Refused:", "", "| combination | error | use instead |", "|---|---|---|"),
    ]
    for refused in table.refused:
        error = refused.raises.split(": ")[0].replace("|", " or ")
        late = ", in the first step()" if refused.is_late else ""
        lines.append(f"| {refused.when} | {error}{late} | {refused.instead} |")
    return "\n".join(lines)


def views_of(case: Case) -> Iterator[Case]:
    """A case, and for each axis of its mesh the system that it is."""
    yield case
    if "zero" not in case or "system" in case:
        return
    axes, stage = case["mesh"].split(" x "), case["zero"]
    systems = [name for axis, name in (("pp", "pipeline"), ("tp", "tensor")) if axis in axes]
    # fully_shard in a pipeline, with an optimizer of torch, is not zero.shard().
    if stage != "0" and not (stage == "3" and "pp" in axes):
        systems.append(f"zero {stage}")
    for system in systems:
        yield {**case, "system": system}
