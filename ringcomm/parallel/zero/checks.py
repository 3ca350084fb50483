"""What a model and its optimizer must be to be sharded, and to be sharded still at a step."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from ringcomm.parallel.expert.local_experts import refuse_experts
from ringcomm.parallel.flat_collectives import check_agreement
from ringcomm.parallel.model_axes import StagePart, axes_of
from ringcomm.parallel.model_units import check_can_materialize
from ringcomm.parallel.tensor.regions import summed_over
from ringcomm.parallel.weight_shards import find_shards
from ringcomm.parallel.zero.inner import KINDS, is_offloaded
from ringcomm.parallel.zero.options import ShardOptions

# By parameter, weakly, a weak reference to the optimizer that has sharded it.
_sharded: Any = WeakIdKeyDictionary()


def check_model(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: ShardOptions, is_flat: bool
) -> None:
    """Raises TypeError or ValueError where they cannot be sharded; nothing has been exchanged."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"wants a model and its optimizer, got a {type(model).__name__} first")
    if type(optimizer) not in KINDS:
        raise TypeError(
            "wants an AdamW or SGD of torch.optim or ringcomm.parallel.offload to shard, got"
            f" {type(optimizer).__name__}"
        )
    if options.offload_weights and not is_offloaded(optimizer):
        raise ValueError("offload_weights wants an optimizer of ringcomm.parallel.offload")
    if isinstance(model, DistributedDataParallel):
        raise ValueError("DistributedDataParallel reduces gradients itself: give model.module")
    refuse_experts(model, "zero.shard")
    if isinstance(model, StagePart) and not is_flat:
        raise ValueError(
            "stage 3 gathers weights around the model's forward, which a pipeline does not call:"
            " take stage 1 or 2, or Pipeline(wrap=lambda stage: fully_shard(stage, mesh=...))"
        )
    is_fp16 = options.grad_dtype == torch.float16
    if not is_flat and not options.offload_weights and options.loss_scale is not None and is_fp16:
        raise ValueError(
            "at stage 3 gradients are divided by loss_scale in reduce_dtype, and float16 would lose"
            " small ones: reduce_dtype=torch.float32, which is the default"
        )
    if options.clip_grad_norm is not None or options.loss_scale is not None:
        axes_of(model)  # raises for a piece of a pipeline
    names = {param: name for name, param in model.named_parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not params:
        raise ValueError("the optimizer has no parameters")
    strangers = [param for param in params if param not in names]
    if strangers:
        raise ValueError(
            f"the optimizer has a parameter of shape {tuple(strangers[0].shape)} that is not the"
            " model's"
        )
    missing = sorted(n for p, n in names.items() if p.requires_grad and p not in set(params))
    if missing:
        raise ValueError(
            f"{missing[0]} requires grad and is in no group of the optimizer, so that ranks would"
            " drift apart: add it, or requires_grad_(False)"
        )
    if not is_flat and not options.offload_weights:
        scalar = next((name for param, name in names.items() if param.dim() == 0), None)
        if scalar is not None:
            raise ValueError(
                f"{scalar} has no dimensions, which fully_shard of stage 3 cannot cut: give it one,"
                " or use stage 1 or 2"
            )
    for param in params:
        _check_param(param, names[param], options, is_flat)
    if len({param.device for param in params}) > 1:
        raise ValueError("the parameters are on several devices: one per rank")
    check_can_materialize(model)


def _check_param(param: nn.Parameter, name: str, options: ShardOptions, is_flat: bool) -> None:
    owner = _sharded.get(param)
    is_sharded = owner is not None and owner() is not None
    if is_sharded or find_shards(param) is not None or isinstance(param, DTensor):
        raise ValueError(f"{name} is sharded already")
    if not param.requires_grad:
        raise ValueError(f"{name} does not require grad: leave it out of the optimizer")
    if not is_flat and summed_over(param) is not None:
        raise ValueError(
            f"the gradient of {name} is summed over the ranks of a tensor-parallel group, which"
            " stages 1 and 2 keep up, and stage 3 does not"
        )
    takes_half = is_flat or options.offload_weights
    allowed = (torch.float32, torch.float16, torch.bfloat16) if takes_half else (torch.float32,)
    if param.dtype not in allowed:
        kinds = "float32, float16 or bfloat16" if takes_half else "float32"
        raise ValueError(f"{name} is {param.dtype}; weights to shard are {kinds}")
    dtype = options.param_dtype or param.dtype
    if options.reduce_dtype not in (None, torch.float32, dtype):
        raise ValueError(
            f"reduce_dtype is torch.float32 or {dtype}, the dtype of {name}, got"
            f" {options.reduce_dtype}"
        )
    if options.param_dtype is not None and param.dtype != torch.float32:
        raise ValueError(f"{name} is {param.dtype} already: param_dtype is for float32 weights")


def check_ranks(
    optimizer: torch.optim.Optimizer,
    stage: int,
    options: ShardOptions,
    group: dist.ProcessGroup,
) -> None:
    """Raises ValueError on all ranks where they disagree. Collective."""
    mine = {
        "stage": stage,
        "options": options,
        "optimizer": type(optimizer).__name__,
        "shapes": [[tuple(p.shape) for p in g["params"]] for g in optimizer.param_groups],
        "dtypes": [[str(p.dtype) for p in g["params"]] for g in optimizer.param_groups],
    }
    check_agreement(mine, group)


def mark_sharded(optimizer: torch.optim.Optimizer) -> None:
    """Its parameters cannot be sharded again while it is there."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            _sharded[param] = weakref.ref(optimizer)


def check_unchanged(model: nn.Module | None, known: set[nn.Parameter]) -> None:
    """Raises ValueError where a model has got weights that are not sharded."""
    if model is None:
        return
    for name, param in model.named_parameters():
        if param.requires_grad and param not in known:
            raise ValueError(
                f"{name} was added or replaced after zero.shard(), and is not updated: change the"
                " model first"
            )
