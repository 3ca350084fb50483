"""Distributes a model over all axes of a mesh in one call."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ringcomm.backend import resolve_group
from ringcomm.parallel import zero
from ringcomm.parallel.flat_collectives import agreeing
from ringcomm.parallel.loss import CountItems, Loss
from ringcomm.parallel.mesh import ParallelDims
from ringcomm.parallel.model.describe import Model, describe, start_equal
from ringcomm.parallel.model.refuse import Asked, refuse, refuse_split
from ringcomm.parallel.model.saving import save_full
from ringcomm.parallel.model.units import default_units, shard_units
from ringcomm.parallel.offload.optimizers import Offloaded
from ringcomm.parallel.optimizer_classes import optimizers_of, retire
from ringcomm.parallel.optimizer_kinds import needs_whole
from ringcomm.parallel.steps import Parallelized
from ringcomm.parallel.tensor.replicas import check_replicas
from ringcomm.parallel.torch_checks import asked
from ringcomm.parallel.zero.inner import ShardOptions

MakeOptimizer = Callable[
    [Iterable[nn.Parameter]], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
]


@torch.inference_mode(False)  # what it makes is trained later
def parallelize(
    model: Any,
    dims: ParallelDims,
    optimizer: MakeOptimizer,
    *,
    loss_fn: Loss | None = None,
    count_items: CountItems | None = None,
    zero_stage: int | None = None,
    sequence_parallel: bool = False,
    schedule: str = "1f1b",
    num_microbatches: int | None = None,
    recompute: bool = False,
    gather_logits: bool = False,
    elementwise: Collection[type] = (),
    whole: Collection[type] = (),
    **shard_options: Any,
) -> Parallelized:
    """Distributes a model over a mesh: tensor, sequence, expert, pipeline, data parallelism, ZeRO.

        dims = ParallelDims(dp=2, tp=2, pp=2)
        train = parallelize(model, dims, lambda params: torch.optim.AdamW(params, lr=3e-4))
        for batch in loader:                     # different rows on each rank of dims["batch"]
            loss = train.step(batch)             # or train.step(ids, labels)
            train.clip_grad_norm_(1.0)
            train.optimizer.step()
            train.optimizer.zero_grad()

    Each part can also be used separately: `tensor_parallelize` and `expert_parallelize` of
    ringcomm.integrations.transformers, `pipeline.Pipeline`, `zero.shard`, `average_gradients`.

    Args:
        model: of the same layers on all ranks; changed in place. Weights and buffers start from
            those of rank 0. A causal language model of transformers (Llama, Qwen, Mistral, Phi,
            Gemma; with experts Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V3). Or any model whose layers
            were already made for dims["tp"] and dims["ep"]; for a pipeline it must be an
            nn.Sequential, or a dict of blocks by name.
        dims: the mesh.
        optimizer: a function that returns a torch optimizer for parameters, or with ZeRO a list of
            them. With tp, pp, ep or zero_stage 0 it is called twice: with the model's parameters,
            before anything is changed, and with this rank's. Both results have the same parameter
            groups, so that schedulers made in it work. With tp the class must update each element
            of a weight by itself, as AdamW does, and with ZeRO, pipelines or sharded experts each
            weight (see zero.shard()).
        loss_fn: a function of the model's output and the targets that returns the mean loss:
            torch's or ringcomm's cross-entropy, NLL, MSE, L1 or BCE, as a module, a function or a
            functools.partial with options by name; any other one with count_items. Or one with a
            parameter num_items_in_batch, as Trainer's compute_loss_func, which returns a sum
            divided by it. With one rank of dims["batch"] and one micro-batch it may be any
            function. Default: the loss of the model of transformers, which shifts labels itself.
        count_items: a function of targets that returns the number of labels in the mean, for a loss
            that shifts labels `lambda labels: labels[:, 1:].ne(-100).sum()`. The losses of ranks
            and micro-batches are weighted by it; `len` weights them by rows, as for a contrastive
            loss of each part. Default: what a loss of torch or ringcomm has in its mean; with
            num_items_in_batch the labels other than -100, or the rows of other targets.
        zero_stage: 0: gradients are averaged over dims["batch"]. 1, 2: state, and gradients, are
            sharded over dims["batch"]. 3: weights too, over dims["fsdp"], with dims["dp"] replicas
            (HSDP); experts over dims["edp"]. Default: 3 if fsdp is above 1, otherwise 0.
        sequence_parallel: shard the tokens over the tensor-parallel ranks between layers.
        schedule: the pipeline's schedule; see pipeline.Pipeline.
        num_microbatches: the number of micro-batches of a step. Default: 1, or with a pipeline 2
            per stage. Without a pipeline they run one after the other.
        recompute: keep only the inputs of layers for the backward pass, and recompute layers.
        gather_logits: see tensor_parallelize().
        elementwise: see zero.shard(). Not asked for where only data is split, with zero_stage 0.
        whole: likewise.
        shard_options: options of zero.shard() at stages 1 to 3: param_dtype, reduce_dtype,
            loss_scale, clip_grad_norm, bucket_bytes.

    Returns:
        The object that the training loop uses.

    Raises:
        TypeError: the model does not support an axis of dims, an option is unknown, or the
            optimizer needs full weights, updates several together, or is of an unknown class. Or
            loss_fn does not say what its mean is over.
        ValueError: axes or options cannot be combined, the model is on several devices, or ranks
            have different models or options. Nothing has been changed. Or the optimizer has
            parameters that are not in the model.

    Collective over the default group.
    """
    # These two import torch.distributed.pipelining, and ringcomm.parallel itself.
    from ringcomm.parallel.adapter import Adapter
    from ringcomm.parallel.pipeline import Pipeline
    from ringcomm.parallel.pipeline.schedules import make_plan

    mesh_given: Any = dims
    tensor_options = {"sequence_parallel": sequence_parallel, "gather_logits": gather_logits}
    given: Any = optimizer
    world = resolve_group()
    with agreeing(world) as mine:  # before meshes are made
        if not isinstance(mesh_given, ParallelDims):
            got = type(mesh_given).__name__
            raise TypeError(f"dims must be a ParallelDims, such as ParallelDims(dp=2), got {got}")
        stage = zero_stage if zero_stage is not None else (3 if dims.fsdp > 1 else 0)
        num = num_microbatches
        if num is None:
            num = 2 * dims.pp if dims.pp > 1 else 1
        if isinstance(given, torch.optim.Optimizer):
            name = type(given).__name__
            why = f"optimizer must be a function that makes one: lambda params: {name}(params)"
            raise TypeError(why)
        make_plan(schedule, dims.pp, num)  # raises for one that there is not
        options_of_zero = _check_options(dims, stage, shard_options, **tensor_options)
        given_model = nn.ModuleList(model.values()) if isinstance(model, Mapping) else model
        described = describe(given_model)
        is_whole = dims.dp * dims.fsdp * num == 1
        numbers: Any = {"count_items": count_items, "is_whole": is_whole}
        adapter = Adapter(model, described, dims, loss_fn, **numbers)
        options = {"zero_stage": stage, "schedule": schedule, "num_microbatches": num}
        options |= {"recompute": recompute, **tensor_options}
        mine |= {"mesh": repr(dims), "options": repr(options)}
    is_split = max(dims.tp, dims.pp, dims.ep) > 1
    words: Any = {"elementwise": elementwise, "whole": whole}
    has_parts = is_split or stage > 0
    asks: Any = partial(needs_whole, is_copied=stage > 0, **words) if has_parts else None
    takes_list = stage in (1, 2) or (stage == 3 and dims.pp == 1)
    data_mesh, pipe = dims["hsdp"] if dims.dp > 1 else dims["fsdp"], None
    check_zero = partial(
        zero.check_arguments,
        options=options_of_zero,
        stage=stage,
        mesh=data_mesh if stage == 3 else None,
        words=(elementwise, whole),
    )
    first = _check_model(
        described, adapter, options, optimizer, asks, check_zero if takes_list else None
    )
    was_meta = described.has_meta
    start_equal(described, _groups_of(dims, "tp", "batch", "edp", "pp"))
    loss = adapter.split(**tensor_options)
    if dims.tp > 1 or dims.ep > 1:
        save_full(given_model)
    if dims.pp == 1 and (dims.tp == 1 or adapter.is_split):
        _check_replicas(given_model, dims)
    if dims.pp > 1:
        mesh = data_mesh if stage == 3 else None
        wrap = partial(_wrap_stage, dims=dims, mesh=mesh, was_meta=was_meta)
        row = loss.blocks, loss, schedule, num
        pipe = Pipeline(*row, group=dims.group("pp"), recompute=recompute, wrap=wrap)
        model = pipe.module
    elif recompute:
        for layer in default_units(model):
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    # At stage 0 it may copy weights when it is made: now they are those of rank 0.
    is_twice = is_split or stage == 0
    own: Any = describe(model) if is_split else described
    of_others = {*given_model.parameters()} - own.weights.keys()  # of other stages
    with agreeing(world):  # a stage of a pipeline may have no weights for it
        made: Any = optimizer([*model.parameters()]) if is_twice else first
        for each in optimizers_of(made):
            refuse_split(own, each, asks is not None and asks(each), of_others=of_others)
            if asks is not None:  # else layers that are split by hand ask at its first step
                asked.add(each)
    firsts = optimizers_of(first) if is_twice else ()
    for each, same in zip(firsts, optimizers_of(made), strict=False):
        if each is not same:
            each.param_groups = same.param_groups  # a scheduler that the function makes has them
            retire(each, "parallelize()")
            if isinstance(each, Offloaded):
                each.tier.close()
    if takes_list:
        where: Any = {"mesh": data_mesh} if stage == 3 else {"group": dims.group("batch")}
        made = zero.shard(own, made, stage, **where, **words, **shard_options)
    return Parallelized(dims, model, made, pipe, loss, stage, num)


def _groups_of(dims: ParallelDims, *axes: str) -> Iterator[dist.ProcessGroup]:
    """The groups of axes with several ranks; "edp" where experts are sharded."""
    for axis in axes:
        if dims[axis].size() > 1 and (axis != "edp" or dims.ep > 1):
            yield dims.group(axis)


def _wrap_stage(stage: nn.Module, *, dims: ParallelDims, mesh: Any, was_meta: bool) -> nn.Module:
    """A stage of a pipeline, with equal weights on data-parallel ranks; sharded over a mesh."""
    _check_replicas(stage, dims)
    described = describe(stage)
    if was_meta:
        start_equal(described, _groups_of(dims, "tp", "batch", "edp"))
    if mesh is not None:
        shard_units(described, dims.group("batch"), mesh, ())
    return stage


def _check_replicas(module: nn.Module, dims: ParallelDims) -> None:
    """check_replicas() unless the ranks have different tokens, which may be dropped differently."""
    if all(getattr(part, "sequence_dim", None) is None for part in module.modules()):
        check_replicas(module, dims.group("tp"))


# ---- checks: before anything is changed


def _check_model(
    described: Model,
    adapter: Any,
    options: Mapping[str, Any],
    optimizer: MakeOptimizer,
    asks: Any,
    check_zero: Callable[..., Any] | None,
) -> Any:
    """What `optimizer` returns for the unsplit model; `check_zero` checks it for zero.shard().

    Raises the same error on all ranks. Collective.
    """
    with agreeing(resolve_group()) as mine:
        refuse(described, Asked("parallelize", "parallelize", others=adapter.systems))
        adapter.check(
            sequence_parallel=options["sequence_parallel"], gather_logits=options["gather_logits"]
        )
        if options["recompute"] and adapter.dims.pp == 1 and not default_units(described.module):
            raise ValueError(
                "recompute=True is for the layers of a ModuleList or Sequential, and the model has"
                " none: leave it out, or use torch.utils.checkpoint in the model"
            )
        mine["loss"] = adapter.check_loss()
        made: Any = optimizer([*described.module.parameters()])
        if check_zero is not None:
            check_zero(described, optimizers_of(made))
        elif not isinstance(made, torch.optim.Optimizer):
            raise ValueError(
                "several optimizers together are one of zero.shard(): set zero_stage to 1, 2 or 3,"
                " with a pipeline to 1 or 2"
            )
        to_split = adapter.to_split()
        for each in optimizers_of(made):
            refuse_split(described, each, asks is not None and asks(each), to_split=to_split)
        # Ranks have different parts of layers that are split already.
        if not (adapter.is_split or adapter.has_experts):
            mine["names, shapes and dtypes of parameters"] = [
                (w.name, tuple(param.shape), str(param.dtype))
                for param, w in described.weights.items()
            ]
            mine["weights of parameter groups"] = [
                sorted(described.weights[param].name for param in group["params"])
                for each in optimizers_of(made)
                for group in each.param_groups
            ]
    return made


def _check_options(
    dims: ParallelDims,
    stage: int,
    shard_options: Mapping[str, Any],
    *,
    sequence_parallel: bool,
    gather_logits: bool,
) -> ShardOptions:
    """The options of zero.shard(); raises before anything is sent."""
    for name in ("units", "offload_weights"):
        if name in shard_options:
            raise TypeError(f"parallelize() has no {name}: zero.shard() has it")
    options = ShardOptions(**shard_options)
    given = ", ".join(sorted(shard_options))
    problems = {
        "gather_logits does not work in a pipeline: leave it out, or use pp=1": (
            gather_logits and dims.tp > 1 and dims.pp > 1
        ),
        f"zero_stage must be 0, 1, 2 or 3, got {stage!r}": stage not in (0, 1, 2, 3),
        f"zero_stage 0 does not shard the model: use dp instead of fsdp {dims.fsdp}": (
            dims.fsdp > 1 and stage == 0
        ),
        "zero_stage 3 shards over fsdp, which is 1: use a larger fsdp and a smaller dp": (
            stage == 3 and dims.fsdp == 1
        ),
        "sequence_parallel shards tokens over the ranks of tp, which is 1: use a larger tp": (
            sequence_parallel and dims.tp == 1
        ),
        "sequence_parallel sums gradients of norms over the ranks of tp, which zero_stage 3 does"
        " not support: use zero_stage=1 or 2": sequence_parallel and stage == 3,
        f"zero_stage=0 does not use zero.shard() and has no {given}: use zero_stage=1 or 2": (
            shard_options and stage == 0
        ),
        f"with pp > 1, zero_stage=3 uses fully_shard and has no {given}: use zero_stage=1 or 2, or"
        " pp=1": shard_options and stage == 3 and dims.pp > 1,
    }
    for problem, is_so in problems.items():
        if is_so:
            raise ValueError(problem)
    return options
