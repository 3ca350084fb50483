"""ZeRO (Rajbhandari et al. 2020): optimizer state, gradients and weights sharded over ranks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ringcomm.backend import resolve_group
from ringcomm.parallel.expert.local_experts import refuse_experts
from ringcomm.parallel.flat_collectives import check_agreement, device_of, local_of
from ringcomm.parallel.model_axes import StagePart, stage_part_of
from ringcomm.parallel.shards import find_shards
from ringcomm.parallel.shards.units import check_can_materialize, materialize
from ringcomm.parallel.tensor.regions import summed_over
from ringcomm.parallel.tensor.splits import split_params
from ringcomm.parallel.zero.elementwise import check_elementwise, is_offloaded
from ringcomm.parallel.zero.flat import FlatZero
from ringcomm.parallel.zero.infinity import ZeroInfinity as ZeroInfinity
from ringcomm.parallel.zero.optimizer import (
    Given,
    ShardOptions,
    ZeroOptimizer,
    is_sharded,
    sharded_by,
)
from ringcomm.parallel.zero.prediction import predict_memory, predict_traffic
from ringcomm.parallel.zero.stage3 import HOOK_AT_STAGE_3, Zero3
from ringcomm.torch_names import broadcast_coalesced_, flat_mesh, root_mesh

__all__ = ["ZeroOptimizer", "predict_memory", "predict_traffic", "shard"]


def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    stage: int,
    *,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    units: Iterable[nn.Module] | None = None,
    bucket_bytes: int = 25 << 20,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    loss_scale: float | Literal["dynamic"] | None = None,
    offload_weights: bool = False,
    resume: bool = False,
    clip_grad_norm: float | None = None,
) -> ZeroOptimizer:
    """Shards the training of a model over the ranks of a group; every rank has different rows.

        optimizer = zero.shard(model, torch.optim.AdamW(model.parameters()), stage=2)
        for batch in batches:
            optimizer.scale(loss_of(model, batch)).backward()  # scale() is for loss_scale
            optimizer.step()
            optimizer.zero_grad()

    Stage 1 shards the optimizer's state, stage 2 also gradients, stage 3 also weights;
    predict_memory() and predict_traffic() predict the cost. Gradients are averaged over the ranks.
    Weights and buffers start from rank 0's; weights stay bitwise equal on all ranks. Buffers that
    the forward pass changes, such as BatchNorm's running statistics, then differ between ranks;
    DistributedDataParallel would broadcast rank 0's before each forward. Use SyncBatchNorm, or
    broadcast model.buffers() before evaluating and saving.

    At stages 1 and 2 gradients are in the optimizer, and operators on `param.grad` raise: clip by
    optimizer.clip_grad_norm_() or clip_grad_norm=, and scale by loss_scale=. Ranks may use
    different weights there, and make different numbers of backward passes before step().

    Args:
        model: changed in place. At stages 1 and 2 its weights move into flat buckets; at
            stage 3 they become DTensors, and fully_shard is applied to the model. It may be on the
            meta device: modules are then initialized by reset_parameters(), at stage 3 unit by
            unit, and rank 0's values are used.
        optimizer: over the model's weights, with any parameter groups and hyper-parameters: AdamW
            or SGD of torch.optim or ringcomm.parallel.offload, or any other class that updates each
            element of a weight by itself. shard() makes three steps of other classes on a small
            weight and on its parts, and refuses a class whose results differ, or that keeps tensors
            outside of its state. Step hooks and state move to the returned optimizer. The given one
            raises afterwards, but has the same parameter groups: schedulers made for it work.
        stage: 1, 2 or 3. Stages 2 and 3 reduce each micro-batch, except in the optimizer's
            no_sync(), and stage 3 gathers weights for each.
        mesh: a one-dimensional DeviceMesh, instead of group. At stage 3 also two-dimensional,
            ("replicate", "shard"): weights are sharded over the second and replicated over the
            first (HSDP). Weights that are DTensors of torch's tensor parallelism
            (parallelize_module) need stage 3 and dimensions of the same DeviceMesh.
        group: None for the default group; of any backend. With ringcomm shards differ by one
            element; with other backends they are padded when they are sent.
        units: at stage 3 the modules whose weights are gathered together. Default: the entries of
            every outermost ModuleList, or Sequential without one. Weights that several units share
            belong to the root. All ranks must run the same units in the same order.
        bucket_bytes: at stages 1 and 2, the maximum size of a bucket of weights; a larger weight
            has its own bucket. Stage 2 keeps unsharded gradients of one bucket at a time.
        param_dtype: torch.bfloat16 or float16: keep float32 weights and their gradients in 16 bits,
            and shards of the float32 weights. Frozen weights and floating-point inputs of the
            model's forward are cast too; buffers are not.
        reduce_dtype: the dtype in which gradients are accumulated and reduced. Default: float32.
            The dtype of 16-bit weights halves the gradients' memory at stages 1 and 2, and their
            traffic.
        loss_scale: a factor for float16, or "dynamic": starts at 2**16, halves after an overflow,
            doubles after 2000 good steps. An overflow on any rank skips the step on all ranks.
        offload_weights: at stage 3 keep weights and gradients in the same tier as the state of an
            optimizer of ringcomm.parallel.offload (ZeRO-Infinity). The model must be on the CPU or
            the meta device; it may have 16-bit weights, for which there are float32 masters. With a
            path, every step ends with a commit. All ranks must use the same weights in each
            backward pass; otherwise all ranks raise.
        resume: with offload_weights, continue after the last step with complete files; from the
            initial weights if there is none.
        clip_grad_norm: multiply all gradients by min(1, clip_grad_norm / norm), with the norm over
            all ranks and dimensions of a mesh. Without loss_scale, a norm that is not finite
            raises. Alternatively call the optimizer's clip_grad_norm_().

    Returns:
        A torch.optim.Optimizer over the same groups.

    Raises:
        TypeError: the optimizer does not update each element by itself.
        ValueError: the model and the optimizer do not match, or the model is wrapped in
            DistributedDataParallel or already sharded; a weight has hooks that would not see its
            gradient; an option is out of range; ranks have different arguments. Nothing has been
            changed.

    Collective: exchanges one object of options and shapes, with broadcasts of weights and buffers.
    """
    options = ShardOptions(
        bucket_bytes=bucket_bytes,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        loss_scale=loss_scale,
        clip_grad_norm=clip_grad_norm,
        offload_weights=offload_weights,
        resume=resume,
    )
    if stage not in (1, 2, 3):
        raise ValueError(f"stage must be 1, 2 or 3, got {stage!r}")
    if units is not None and stage != 3:
        raise ValueError("units= is for stage 3 only")
    if offload_weights and stage != 3:
        raise ValueError("offload_weights is for stage 3 only")
    names = _checked_names(model, optimizer, options, stage, mesh)
    is_grid = mesh is not None and mesh.ndim == 2
    if is_grid and (stage != 3 or offload_weights or group is not None):
        raise ValueError(
            "a mesh of two dimensions needs stage 3, without group and offload_weights"
        )
    resolved = flat_mesh(mesh).get_group() if is_grid else resolve_group(group, mesh)
    mine = {
        "stage": stage,
        "options": options,
        "optimizer": type(optimizer).__name__,
        "shapes": [[tuple(p.shape) for p in g["params"]] for g in optimizer.param_groups],
        "dtypes": [[str(p.dtype) for p in g["params"]] for g in optimizer.param_groups],
        "buffers": [(tuple(buffer.shape), str(buffer.dtype)) for buffer in model.buffers()],
    }
    check_agreement(mine, resolved)
    state = optimizer.state_dict()
    given = Given(model, optimizer, stage, resolved, mesh, units, options, names)
    made: ZeroOptimizer
    if offload_weights:  # WeightShards broadcasts buffers
        made = ZeroInfinity(given)
    elif stage == 3:
        made = Zero3(given)
    else:
        materialize(model, [*names], device_of(resolved))
        made = FlatZero(given)
    if not offload_weights:
        broadcast_coalesced_(map(local_of, model.buffers()), resolved)
    _retire(optimizer)
    sharded_by.update(dict.fromkeys(made.all_params(), weakref.ref(made)))
    if state["state"]:
        made.load_state_dict(state)
    return made


def _retire(optimizer: torch.optim.Optimizer) -> None:
    """Makes the optimizer that was given to zero.shard() raise before it writes anything."""
    optimizer.register_step_pre_hook(_refuse_use)  # a scheduler has replaced `step`
    for name in ("zero_grad", "add_param_group", "state_dict", "load_state_dict"):
        setattr(optimizer, name, _refuse_use)


def _refuse_use(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        "this optimizer was given to zero.shard() and no longer has the weights: use the"
        " optimizer that zero.shard() returned"
    )


# ---- checks, before anything is sent or changed


def _checked_names(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: ShardOptions,
    stage: int,
    mesh: DeviceMesh | None,
) -> dict[nn.Parameter, str]:
    """The weights' names; raises TypeError or ValueError if they cannot be sharded."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a model as the first argument, got a {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"expected an optimizer as the second argument, got a {type(optimizer).__name__}"
        )
    if options.offload_weights and not is_offloaded(optimizer):
        raise ValueError("offload_weights needs an optimizer of ringcomm.parallel.offload")
    if isinstance(model, DistributedDataParallel):
        raise ValueError("DistributedDataParallel reduces gradients itself: pass model.module")
    refuse_experts(model, "zero.shard")
    if isinstance(model, StagePart) and stage == 3:
        raise ValueError(
            "stage 3 gathers weights around the model's forward, which a pipeline does not call:"
            " use stage 1 or 2, or Pipeline(wrap=lambda stage: fully_shard(stage, mesh=...))"
        )
    if options.looks_first:
        stage_part_of(model)  # raises for a piece of a pipeline
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise ValueError(f"{name or 'the model'} is already sharded by fully_shard")
    names = {param: name for name, param in model.named_parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not params:
        raise ValueError("the optimizer has no parameters")
    for param in params:
        if param not in names:
            raise ValueError(
                f"the optimizer has a parameter of shape {tuple(param.shape)} that is not in the"
                " model"
            )
    if len({param.device for param in params}) > 1:
        raise ValueError("the parameters of a rank must be on one device, got several")
    by_fsdp = stage == 3 and not options.offload_weights
    if by_fsdp and options.loss_scale is not None and options.grad_dtype == torch.float16:
        raise ValueError(
            "at stage 3 gradients are divided by loss_scale in reduce_dtype, and float16 would "
            "lose small ones: use reduce_dtype=torch.float32, the default"
        )
    for param, (_, split) in split_params(model).items() if by_fsdp else ():
        if any(begin == end for begin, end in split.ranges):
            raise ValueError(
                f"{names[param]} has no part for some tensor-parallel ranks, and fully_shard of"
                " stage 3 takes no empty parts: use stage 1 or 2, or fewer ranks"
            )
    trained = set(params)
    for param, name in names.items():
        refusals = _refusals(name, param, options, stage, mesh, is_trained=param in trained)
        for reason, is_refused in refusals.items():
            if is_refused:
                raise ValueError(reason)
        if isinstance(param, DTensor) and optimizer.state:
            raise ValueError(
                f"{name} is a DTensor, and the optimizer has already made a step: pass a new"
                " optimizer to zero.shard()"
            )
    check_can_materialize(model)
    check_elementwise(optimizer)
    return names


def _refusals(
    name: str,
    param: nn.Parameter,
    options: ShardOptions,
    stage: int,
    mesh: DeviceMesh | None,
    *,
    is_trained: bool,
) -> dict[str, bool]:
    """What zero.shard() refuses of a weight, and whether it is so; is_trained: by the optimizer."""
    by_fsdp = stage == 3 and not options.offload_weights
    has_owner = is_sharded(param) or find_shards(param) is not None
    is_spread, own = isinstance(param, DTensor), getattr(param, "device_mesh", None)
    has_mesh = by_fsdp and mesh is not None
    is_missing = param.requires_grad and not is_trained
    refusals = {
        f"{name} requires grad and is in no parameter group of the optimizer, so that its replicas"
        " would diverge: add it, or call requires_grad_(False)": is_missing,
        f"{name} is already sharded": has_owner,
        f"{name} has no dimensions, so fully_shard of stage 3 cannot shard it: give it one, or use"
        " stage 1 or 2": by_fsdp and param.dim() == 0,
        f"{name} is a DTensor: only stage 3 without offload_weights shards such weights, with"
        " mesh=, other dimensions of the DeviceMesh that they are on": is_spread and not has_mesh,
        f"{name} is a DTensor on {own}: mesh= must be other dimensions of the same DeviceMesh, got"
        f" {mesh}": is_spread and has_mesh and not _are_apart(own, mesh),
    }
    if not is_trained:
        return refusals
    early, late = param._backward_hooks, param._post_accumulate_grad_hooks
    is_full, is_cast = param.dtype == torch.float32, options.param_dtype is not None
    takes = (torch.float32,) if by_fsdp else (torch.float32, torch.float16, torch.bfloat16)
    kinds = "float32" if by_fsdp else "float32, float16 or bfloat16"
    dtype, given = options.param_dtype or param.dtype, options.reduce_dtype
    is_reducible = given in (None, torch.float32, dtype)
    return refusals | {
        f"{name} does not require grad: leave it out of the optimizer": not param.requires_grad,
        f"the gradient of {name} is summed over the ranks of a tensor-parallel group, which stage 3"
        " does not support: use stage 1 or 2": stage == 3 and summed_over(param) is not None,
        f"{name} {HOOK_AT_STAGE_3}": by_fsdp and bool(early),
        f"{name} has a hook of register_post_accumulate_grad_hook(), which would see the gradient"
        " of one rank and one backward pass: remove it, or use register_hook()": bool(late),
        f"{name} must be {kinds} to be sharded, got {param.dtype}": param.dtype not in takes,
        f"reduce_dtype must be torch.float32 or {dtype}, the dtype of {name}, got"
        f" {given}": not is_reducible,
        f"param_dtype is for float32 weights, but {name} is {param.dtype}": is_cast and not is_full,
    }


def _are_apart(own: Any, other: Any) -> bool:
    """Whether the meshes are different dimensions of one DeviceMesh, such as fully_shard needs."""
    shared = set(own.mesh.flatten().tolist()) & set(other.mesh.flatten().tolist())
    roots = [root_mesh(mesh).mesh.flatten().tolist() for mesh in (own, other)]
    return len(shared) <= 1 and roots[0] == roots[1] and bool(other.mesh_dim_names)
