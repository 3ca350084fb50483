"""Distributes a model over all axes of a mesh in one call."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ringcomm.parallel import zero
from ringcomm.parallel.expert.layer import MixtureOfExperts
from ringcomm.parallel.flat_collectives import check_agreement
from ringcomm.parallel.loss import CountItems, Loss, PartLoss, parameters_of
from ringcomm.parallel.mesh import ParallelDims
from ringcomm.parallel.model.describe import describe
from ringcomm.parallel.model.starts import start_equal
from ringcomm.parallel.parallelized import Parallelized
from ringcomm.parallel.shards.units import default_units
from ringcomm.parallel.tensor.replicas import check_replicas
from ringcomm.parallel.tensor.splits import SplitModule
from ringcomm.parallel.zero.elementwise import REFUSED
from ringcomm.torch_names import reduce_unused, unwrapped

_SHARD_OPTIONS = [*parameters_of(zero.shard)][5:]  # but for the model, optimizer, stage and group
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


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
            those of rank 0. A causal language model of transformers (Llama, Qwen, Mistral, Mixtral,
            Phi, Gemma), which has plans for its parallelism. Or any model whose layers were already
            made for dims["tp"] and dims["ep"]; for a pipeline it must be an nn.Sequential, or a
            dict of blocks by name.
        dims: the mesh.
        optimizer: a function that returns a torch optimizer for this rank's parameters; with ZeRO
            or tensor parallelism it must update each element of a weight by itself, as AdamW and
            SGD do.
        loss_fn: a function of the model's output and the targets that returns a mean over labels.
            With a parameter num_items_in_batch it must return a sum divided by it, as Trainer's
            compute_loss_func. The first steps call it a few more times, with rows of the batch, and
            raise ValueError if it is no such mean, or trains weights that the model does not
            have. A loss that depends on its whole batch, such as
            a contrastive one, needs the parameter: return its mean times len(targets), divided by
            it. Default: the loss of the model of transformers, which shifts labels itself.
        count_items: a function of targets that returns the number of labels in loss_fn's mean, for
            one that shifts labels `lambda labels: labels[:, 1:].ne(-100).sum()`. Default: for
            targets of integers the elements other than -100, or than the ignore_index of loss_fn,
            with the class weights of nn.CrossEntropyLoss; for other targets the rows.
        zero_stage: 0: gradients are averaged over dims["batch"]. 1, 2: state, and gradients, are
            sharded over dims["batch"]. 3: weights too, over dims["fsdp"], with dims["dp"] replicas
            (HSDP). Default: 3 if fsdp is above 1, otherwise 0.
        sequence_parallel: shard the tokens over the tensor-parallel ranks between layers.
        schedule: the pipeline's schedule; see pipeline.Pipeline.
        num_microbatches: the number of micro-batches of a step. Default: 1, or with a pipeline 2
            per stage. Without a pipeline they run one after the other.
        recompute: keep only the inputs of layers for the backward pass, and recompute layers.
        gather_logits: see tensor_parallelize().
        shard_options: options of zero.shard() at stages 1 to 3: param_dtype, reduce_dtype,
            loss_scale, clip_grad_norm, bucket_bytes.

    Returns:
        The object that the training loop uses.

    Raises:
        TypeError: the model does not support an axis of dims, the optimizer needs whole weights, or
            an option is unknown.
        ValueError: axes or options cannot be combined, the model is on several devices, or ranks
            have different models or options. Nothing has been changed. Or the optimizer has
            parameters that are not in the model.

    Collective over the default group.
    """
    from ringcomm.parallel.pipeline import Pipeline

    stage = zero_stage if zero_stage is not None else (3 if dims.fsdp > 1 else 0)
    num = num_microbatches
    if num is None:
        num = 2 * dims.pp if dims.pp > 1 else 1
    elif num < 1:
        raise ValueError(f"num_microbatches must be a positive number, got {num}")
    _check_options(dims, stage, sequence_parallel, gather_logits, shard_options)
    whole = nn.ModuleList(model.values()) if isinstance(model, Mapping) else model
    options = stage, sequence_parallel, schedule, num, recompute, gather_logits
    inner = unwrapped(model)
    problem = _problem_of(model, inner, whole, dims, loss_fn, count_items)
    _check_model(whole, dims, options, problem)
    _start_equal(whole, dims, ("tp", "batch", "edp", "pp"))
    # With all experts on each tensor-parallel rank, layers have groups of one rank.
    if (dims.ep > 1 or dims.tp > 1) and _has_mixtral(whole):
        from ringcomm.integrations.transformers import expert_parallelize

        replicas = dims.group("edp") if dims.ep > 1 and dims["edp"].size() > 1 else None
        expert_parallelize(inner, group=dims.group("ep"), replica_group=replicas)
    if dims.tp > 1 and not _has(whole, SplitModule):
        from ringcomm.integrations.transformers import tensor_parallelize

        more: Any = {"sequence_parallel": sequence_parallel, "gather_logits": gather_logits}
        tensor_parallelize(inner, dims.group("tp"), **more)
    elif dims.pp == 1:
        _check_replicas(whole, dims)
    data_mesh = dims["hsdp"] if dims.dp > 1 else dims["fsdp"]
    if loss_fn is None:
        from ringcomm.integrations.transformers.batches import LossInModel

        loss: Any = LossInModel(inner, dims.group("tp"))
    else:
        loss = PartLoss(loss_fn, count_items)
    pipe = None
    if dims.pp > 1:
        was_meta = any(param.is_meta for param in whole.parameters())
        mesh = data_mesh if stage == 3 else None
        wrap = partial(_wrap_stage, dims=dims, mesh=mesh, was_meta=was_meta)
        row: tuple[Any, Any] = model, loss
        if loss_fn is None:
            from ringcomm.integrations.transformers.pipeline import pipeline_blocks

            row = pipeline_blocks(inner), loss.use_logits(inner)
        group = dims.group("pp")
        pipe = Pipeline(*row, schedule, num, group=group, recompute=recompute, wrap=wrap)
        model = pipe.module
    elif recompute:
        for layer in default_units(model):
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    made = optimizer(model.parameters())
    _check_optimizer(made, model, whole)
    if stage == 3 and pipe is None:
        made = zero.shard(model, made, 3, mesh=data_mesh, **shard_options)
    elif stage in (1, 2):
        made = zero.shard(model, made, stage, group=dims.group("batch"), **shard_options)
    return Parallelized(dims, model, made, pipe, loss, stage, num)


def _start_equal(model: nn.Module, dims: ParallelDims, axes: Sequence[str]) -> None:
    """Replaces what ranks have in common by rank 0's weights and buffers. Collective."""
    own = [axis for axis in axes if dims[axis].size() > 1 and (axis != "edp" or dims.ep > 1)]
    start_equal(model, map(dims.group, own))


def _wrap_stage(stage: nn.Module, *, dims: ParallelDims, mesh: Any, was_meta: bool) -> nn.Module:
    """A stage of a pipeline, with equal weights on data-parallel ranks; sharded over a mesh."""
    _check_replicas(stage, dims)
    if was_meta:
        _start_equal(stage, dims, ("tp", "batch", "edp"))
    if mesh is not None:
        made: Any = fully_shard(stage, mesh=mesh)
        reduce_unused(made)
    return stage


def _check_replicas(module: nn.Module, dims: ParallelDims) -> None:
    """check_replicas() unless the ranks have different tokens, which may be dropped differently."""
    if all(getattr(part, "sequence_dim", None) is None for part in module.modules()):
        check_replicas(module, dims.group("tp"))


def _has(model: nn.Module, *kinds: type[nn.Module]) -> bool:
    return any(isinstance(module, kinds) for module in model.modules())


def _has_mixtral(model: nn.Module) -> bool:
    return any(type(module).__name__ == "MixtralSparseMoeBlock" for module in model.modules())


# ---- checks: before anything is changed


def _check_options(
    dims: ParallelDims,
    stage: int,
    sequence_parallel: bool,
    gather_logits: bool,
    shard_options: Mapping[str, Any],
) -> None:
    if unknown := shard_options.keys() - _SHARD_OPTIONS:
        raise TypeError(
            f"parallelize() has no option {', '.join(sorted(unknown))}; those of zero.shard() are"
            f" {', '.join(_SHARD_OPTIONS)}"
        )
    if gather_logits and dims.tp > 1 and dims.pp > 1:
        raise ValueError("gather_logits does not work in a pipeline: leave it out, or use pp 1")
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage must be 0, 1, 2 or 3, got {stage!r}")
    if dims.fsdp > 1 and stage == 0:
        raise ValueError(
            f"zero_stage 0 does not shard the model: use dp instead of fsdp {dims.fsdp}"
        )
    if stage == 3 and dims.fsdp == 1:
        raise ValueError(
            "zero_stage 3 shards over fsdp, which is 1: use a larger fsdp and a smaller dp"
        )
    if stage and dims.ep > 1:
        raise ValueError(
            f"zero_stage {stage} does not support expert parallelism (ep {dims.ep}): use"
            " zero_stage 0, or ep 1"
        )
    if sequence_parallel and dims.tp == 1:
        raise ValueError(
            "sequence_parallel shards tokens over the ranks of tp, which is 1: use a larger tp"
        )
    if sequence_parallel and stage == 3:
        raise ValueError(
            "sequence_parallel sums gradients of norms over the ranks of tp, which zero_stage 3"
            " does not support: use zero_stage 1 or 2"
        )
    if shard_options and (stage == 0 or (stage == 3 and dims.pp > 1)):
        where = (
            "zero_stage 0: use zero_stage 1 or 2"
            if stage == 0
            else "zero_stage 3 and pp, which is fully_shard inside a pipeline: use zero_stage 1 or"
            " 2, or pp 1"
        )
        names = ", ".join(sorted(shard_options))
        raise ValueError(f"{names} is an option of zero.shard(), which is not used with {where}")


def _check_model(
    whole: nn.Module, dims: ParallelDims, options: Any, problem: Exception | None
) -> None:
    """Raises the same error on all ranks. Collective."""
    facts = {"mesh": repr(dims), "options": repr(options), "problem of the model": repr(problem)}
    if not _has(whole, SplitModule, MixtureOfExperts):
        params = whole.named_parameters()
        shapes = [(name, tuple(param.shape), str(param.dtype)) for name, param in params]
        digest = zlib.crc32(repr(shapes).encode())
        facts["names, shapes and dtypes of parameters"] = f"{len(shapes)} of digest {digest:08x}"
    check_agreement(facts, dist.group.WORLD)  # type: ignore[arg-type]
    if problem is not None:
        raise problem


def _check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, whole: nn.Module) -> None:
    """Raises TypeError for an optimizer that needs whole weights, if it has split ones.

    And ValueError for one with weights that are not in the whole model.
    """
    kinds = {kind.__name__ for kind in type(optimizer).__mro__}
    given = {param for group in optimizer.param_groups for param in group["params"]}
    weights = describe(model).weights
    for param in given - weights.keys() - set(whole.parameters()):
        raise ValueError(
            f"the optimizer has a parameter of shape {tuple(param.shape)} that is not in the"
            " model, so each rank would have its own: make it a part of the model"
        )
    for name in kinds & REFUSED.keys():
        for param, weight in weights.items():
            if param in given and weight.layer is not None and weight.layer.group.size() > 1:
                raise TypeError(
                    f"{name} {REFUSED[name]}, but {weight.name} is split over tensor-parallel"
                    " ranks: use another optimizer, such as AdamW, or tp 1"
                )


def _problem_of(
    model: Any,
    inner: Any,
    whole: nn.Module,
    dims: ParallelDims,
    loss_fn: Loss | None,
    count_items: CountItems | None,
) -> Exception | None:
    devices = sorted({str(param.device) for param in whole.parameters()})
    if len(devices) > 1:
        return ValueError(f"the model is on {' and '.join(devices)}: move it to one device")
    name = type(model).__name__
    if isinstance(model, DistributedDataParallel):
        return TypeError("the model is in DistributedDataParallel: pass its .module instead")
    if count_items is not None and loss_fn is None:
        return ValueError("count_items counts the labels of loss_fn: pass loss_fn as well")
    config = getattr(getattr(inner, "base_model", None), "config", None)
    is_peft = hasattr(model, "get_base_model")
    if is_peft and (dims.tp > 1 or dims.pp > 1):
        return TypeError(
            f"{name} of PEFT has no plan for tp {dims.tp} and pp {dims.pp}: use dp or fsdp"
        )
    if is_peft and loss_fn is None and model.active_peft_config.is_prompt_learning:
        return TypeError(f"{name} of PEFT adds tokens, whose labels are unknown: pass loss_fn")
    if loss_fn is None and config is None:
        return ValueError(f"{name} is not a model of transformers and has no loss: pass loss_fn")
    has_tp = _has(whole, SplitModule) or getattr(config, "base_model_tp_plan", None)
    if dims.tp > 1 and not has_tp:
        return TypeError(
            f"tp is {dims.tp}, but {name} has neither a tensor-parallel plan nor layers such as"
            " ringcomm.nn.ColumnParallelLinear"
        )
    if dims.ep > 1 and not (_has_mixtral(whole) or _has(whole, MixtureOfExperts)):
        return TypeError(
            f"ep is {dims.ep}, but {name} has neither experts of Mixtral nor layers of"
            " ringcomm.nn.MixtureOfExperts"
        )
    is_row = isinstance(model, nn.Sequential | nn.ModuleList | Mapping)
    if dims.pp > 1 and loss_fn is not None and not is_row:
        return TypeError(
            f"pp is {dims.pp}, but {name} is neither an nn.Sequential nor a dict of blocks; for a"
            " model of transformers, which has its own loss, leave loss_fn out"
        )
    if dims.pp > 1 and loss_fn is None and getattr(config, "output_router_logits", False):
        return ValueError(
            "a pipeline does not compute the routers' loss: set output_router_logits to False, or"
            " use pp 1"
        )
    return None
