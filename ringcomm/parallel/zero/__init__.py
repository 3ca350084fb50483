"""ZeRO (Rajbhandari et al. 2020): optimizer state, gradients and weights sharded over ranks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from ringcomm.backend import resolve_group
from ringcomm.parallel.expert.local_experts import refuse_experts
from ringcomm.parallel.flat_collectives import check_agreement, device_of
from ringcomm.parallel.model_axes import StagePart, refuse_piece
from ringcomm.parallel.offload.optimizers import local_of
from ringcomm.parallel.shards import find_shards
from ringcomm.parallel.shards.units import check_can_materialize, materialize
from ringcomm.parallel.tensor.regions import summed_over
from ringcomm.parallel.zero.elementwise import check_elementwise, is_offloaded
from ringcomm.parallel.zero.flat import FlatZero
from ringcomm.parallel.zero.guards import refuse_hooks, retire
from ringcomm.parallel.zero.infinity import ZeroInfinity as ZeroInfinity
from ringcomm.parallel.zero.optimizer import ShardOptions, ZeroOptimizer
from ringcomm.parallel.zero.prediction import predict_memory, predict_traffic
from ringcomm.parallel.zero.stage3 import Zero3
from ringcomm.torch_names import broadcast_coalesced_, flat_mesh, root_mesh

__all__ = ["ZeroOptimizer", "predict_memory", "predict_traffic", "shard"]

# Keyed weakly by parameter: a weak reference to the optimizer that has sharded it.
_sharded: Any = WeakIdKeyDictionary()


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
        model: changed in place. At stages 1 and 2 its weights become views of flat buckets; at
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
    _check_model(model, optimizer, options, stage, mesh)
    if mesh is not None and mesh.ndim == 2:
        if stage != 3 or offload_weights or group is not None:
            raise ValueError(
                "a mesh of two dimensions needs stage 3, without group and offload_weights"
            )
        resolved = flat_mesh(mesh).get_group()
    else:
        resolved = resolve_group(group, mesh)
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
    made: ZeroOptimizer
    if offload_weights:  # WeightShards broadcasts buffers
        made = ZeroInfinity(model, optimizer, resolved, options, units)
    elif stage == 3:
        made = Zero3(model, optimizer, resolved, options, units, mesh)
    else:
        materialize(model, list(model.parameters()), device_of(resolved))
        made = FlatZero(model, optimizer, stage, resolved, options)
    if not offload_weights:
        broadcast_coalesced_(map(local_of, model.buffers()), resolved)
    retire(optimizer)
    for param in made.all_params():
        _sharded[param] = weakref.ref(made)
    if state["state"]:
        made.load_state_dict(state)
    return made


# ---- checks, before anything is sent or changed


def _check_model(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: ShardOptions,
    stage: int,
    mesh: DeviceMesh | None,
) -> None:
    """Raises TypeError or ValueError if they cannot be sharded."""
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
        refuse_piece(model)
    _check_params(model, optimizer, options, stage, mesh)
    check_can_materialize(model)
    check_elementwise(optimizer)


def _check_params(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: ShardOptions,
    stage: int,
    mesh: DeviceMesh | None,
) -> None:
    names = {param: name for name, param in model.named_parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not params:
        raise ValueError("the optimizer has no parameters")
    strangers = [param for param in params if param not in names]
    if strangers:
        raise ValueError(
            f"the optimizer has a parameter of shape {tuple(strangers[0].shape)} that is not in"
            " the model"
        )
    missing = sorted(n for p, n in names.items() if p.requires_grad and p not in set(params))
    if missing:
        raise ValueError(
            f"{missing[0]} requires grad and is in no parameter group of the optimizer, so that "
            "its replicas would diverge: add it, or call requires_grad_(False)"
        )
    uses_fsdp = stage == 3 and not options.offload_weights
    for param, name in names.items():
        owner = _sharded.get(param)
        if (owner is not None and owner() is not None) or find_shards(param) is not None:
            raise ValueError(f"{name} is already sharded")
        if uses_fsdp and param.dim() == 0:
            raise ValueError(
                f"{name} has no dimensions, so fully_shard of stage 3 cannot shard it: give it"
                " one, or use stage 1 or 2"
            )
        if isinstance(param, DTensor):
            _check_dtensor(model, param, name, mesh if uses_fsdp else None)
            if optimizer.state:
                raise ValueError(
                    f"{name} is a DTensor, and the optimizer has already made a step: pass a new"
                    " optimizer to zero.shard()"
                )
    if uses_fsdp and options.loss_scale is not None and options.grad_dtype == torch.float16:
        raise ValueError(
            "at stage 3 gradients are divided by loss_scale in reduce_dtype, and float16 would "
            "lose small ones: use reduce_dtype=torch.float32, the default"
        )
    for param in params:
        _check_param(param, names[param], options, stage)
    if len({param.device for param in params}) > 1:
        raise ValueError("the parameters of a rank must be on one device, got several")


def _check_dtensor(model: nn.Module, param: DTensor, name: str, mesh: DeviceMesh | None) -> None:
    """Checks weights of torch's tensor parallelism; fully_shard shards another mesh dimension."""
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError(f"{name} is already sharded by fully_shard")
    if mesh is None:
        raise ValueError(
            f"{name} is a DTensor: only stage 3 without offload_weights shards such weights, with"
            " mesh=, other dimensions of the DeviceMesh that they are on"
        )
    own = param.device_mesh
    shared = set(own.mesh.flatten().tolist()) & set(mesh.mesh.flatten().tolist())
    roots = [root_mesh(found).mesh.flatten().tolist() for found in (own, mesh)]
    if len(shared) > 1 or roots[0] != roots[1] or not mesh.mesh_dim_names:
        raise ValueError(
            f"{name} is a DTensor on {own}: mesh= must be other dimensions of the same"
            f" DeviceMesh, got {mesh}"
        )


def _check_param(param: nn.Parameter, name: str, options: ShardOptions, stage: int) -> None:
    if not param.requires_grad:
        raise ValueError(f"{name} does not require grad: leave it out of the optimizer")
    if stage == 3 and summed_over(param) is not None:
        raise ValueError(
            f"the gradient of {name} is summed over the ranks of a tensor-parallel group, which "
            "stage 3 does not support: use stage 1 or 2"
        )
    if stage == 3 and not options.offload_weights:
        refuse_hooks(param, name)
    if param._post_accumulate_grad_hooks:
        raise ValueError(
            f"{name} has a hook of register_post_accumulate_grad_hook(), which would see the"
            " gradient of one rank and one backward pass: remove it, or use register_hook()"
        )
    takes_half = stage < 3 or options.offload_weights
    allowed = (torch.float32, torch.float16, torch.bfloat16) if takes_half else (torch.float32,)
    if param.dtype not in allowed:
        kinds = "float32, float16 or bfloat16" if takes_half else "float32"
        raise ValueError(f"{name} must be {kinds} to be sharded, got {param.dtype}")
    dtype = options.param_dtype or param.dtype
    if options.reduce_dtype not in (None, torch.float32, dtype):
        raise ValueError(
            f"reduce_dtype must be torch.float32 or {dtype}, the dtype of {name}, got"
            f" {options.reduce_dtype}"
        )
    if options.param_dtype is not None and param.dtype != torch.float32:
        raise ValueError(f"param_dtype is for float32 weights, but {name} is {param.dtype}")
