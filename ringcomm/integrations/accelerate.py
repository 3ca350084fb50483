"""Lomo, AdaLomo and zero.shard() under Hugging Face Accelerate."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ringcomm.optim import InBackwardOptimizer
from ringcomm.parallel.model_axes import tensor_groups_of
from ringcomm.parallel.zero import ZeroOptimizer

__all__ = ["prepare"]

# Accelerate's names of what shards or reduces by itself.
_OWN_SYSTEMS = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA")


def prepare(accelerator: Any, *objects: Any) -> Any:
    """accelerator.prepare() without DistributedDataParallel, for Lomo, AdaLomo and zero.shard().

        dist.init_process_group("ringcomm")  # before Accelerator(), which does not know the name
        accelerator = Accelerator(cpu=True)
        optimizer = Lomo(model, lr=1e-2, group=dist.group.WORLD, clip_grad_norm=1.0)
        model, optimizer, loader = prepare(accelerator, model, optimizer, loader)

    The optimizer reduces the gradients. accelerator.backward() applies its loss scale, and
    accelerator.clip_grad_norm_() clips through it. An optimizer of zero.shard() accepts any
    max_norm. Lomo accepts only its own clip_grad_norm, and the call returns None:
    optimizer.grad_norm is known after step().

    Args:
        accelerator: an Accelerator that has prepared no model yet.
        objects: as for accelerator.prepare(); exactly one of them is such an optimizer. The model
            must already be on its device, because the optimizer was made for it.

    Returns:
        The same as accelerator.prepare().

    Raises:
        TypeError: there is not exactly one such optimizer.
        ValueError: Accelerate uses FSDP, DeepSpeed or similar, or a GradScaler; Lomo has different
            accumulation_steps; the optimizer's group has different processes from the accelerator;
            the model has tensor-parallel layers; weights are not on the device of the accelerator.
    """
    optimizers = [obj for obj in objects if isinstance(obj, torch.optim.Optimizer)]
    if len(optimizers) != 1:
        raise TypeError(f"prepare() takes one optimizer, got {len(optimizers)}")
    models = [obj for obj in objects if isinstance(obj, nn.Module)]
    adopt(accelerator, optimizers[0], accelerator.gradient_accumulation_steps, models)
    return accelerator.prepare(*objects)


def adopt(
    accelerator: Any, optimizer: Any, num_micro_batches: int, models: Iterable[nn.Module]
) -> None:
    """Makes an Accelerator leave gradients to an optimizer that reduces them; see prepare()."""
    if not isinstance(optimizer, (InBackwardOptimizer, ZeroOptimizer)):
        raise TypeError(
            "prepare() takes Lomo, AdaLomo or an optimizer of zero.shard(), got "
            f"{type(optimizer).__name__}; give other optimizers to accelerator.prepare()"
        )
    name = type(optimizer).__name__
    system = accelerator.distributed_type.name
    if system in _OWN_SYSTEMS:
        raise ValueError(
            f"both {name} and {system} of Accelerate would reduce gradients: use only one of them"
        )
    if accelerator.scaler is not None:
        raise ValueError(
            f'mixed_precision="fp16" has a GradScaler, which {name} cannot use: set'
            f' mixed_precision="no" and loss_scale="dynamic" of {name}'
        )
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if param.device.type != accelerator.device.type:
            raise ValueError(
                f"a weight is on {param.device}, but the accelerator on {accelerator.device}:"
                f" move the model there before you make {name}"
            )
    if tensor_groups_of(models):
        raise ValueError(
            "the model has tensor-parallel layers, whose ranks need the same rows, but Accelerate"
            " and Trainer give each process its own: train it with ringcomm.parallel.parallelize()"
        )
    _check_ranks(accelerator, optimizer)
    if isinstance(optimizer, InBackwardOptimizer):
        own = optimizer.options.accumulation_steps
        if own != num_micro_batches:
            raise ValueError(
                f"gradient_accumulation_steps is {num_micro_batches}, but accumulation_steps of"
                f" {name} is {own}: make them equal"
            )
        accelerator.backward = partial(_backward, accelerator, optimizer)
    else:
        run = accelerator.backward
        accelerator.backward = lambda loss, **options: run(optimizer.scale(loss), **options)
        accelerator.save_state = _refuse_save
    accelerator.clip_grad_norm_ = partial(_clip_grad_norm, optimizer)
    accelerator.clip_grad_value_ = partial(_clip_value, optimizer)
    # evaluation_mode only leaves out the wrapper that reduces gradients.
    placed = {"device_placement": False, "evaluation_mode": True}
    own_prepare = accelerator.prepare_model
    accelerator.prepare_model = lambda model, *_, **__: own_prepare(model, **placed)


def _check_ranks(accelerator: Any, optimizer: Any) -> None:
    """Raises ValueError if the ranks that average gradients are not those that have the data."""
    own, num = getattr(optimizer, "group", None), accelerator.num_processes
    if isinstance(optimizer, InBackwardOptimizer):
        own = optimizer.options.group
    if own is None:  # its weights are sharded over their own group
        return
    size = 1 if own == "none" else own.size()
    if size != num:
        raise ValueError(
            f"{type(optimizer).__name__} averages gradients over {size} processes, but Accelerate"
            f" has {num}: make it with group=dist.group.WORLD, and start processes with torchrun"
        )


def _backward(
    accelerator: Any, optimizer: InBackwardOptimizer, loss: Tensor, **options: Any
) -> None:
    if options:
        raise ValueError(f"backward() with Lomo takes only the loss, got {sorted(options)}")
    optimizer.backward(loss / accelerator.gradient_accumulation_steps)


def _clip_grad_norm(
    optimizer: InBackwardOptimizer | ZeroOptimizer,
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    norm_type: float = 2,
) -> Tensor | None:
    """Clips; raises ValueError if Lomo's step() would clip differently."""
    name = type(optimizer).__name__
    given = {parameters} if isinstance(parameters, Tensor) else set(parameters)
    if any(param not in given for group in optimizer.param_groups for param in group["params"]):
        raise ValueError(f"{name} clips by the norm of all its weights: pass model.parameters()")
    if norm_type != 2:
        raise ValueError(
            f"{name} clips by the 2-norm of all gradients: norm_type must be 2, got {norm_type}"
        )
    if isinstance(optimizer, ZeroOptimizer):
        return optimizer.clip_grad_norm_(max_norm)
    if max_norm not in (optimizer.options.clip_grad_norm, math.inf):
        raise ValueError(
            f"clip_grad_norm_() with max_norm {max_norm} finds no gradients, because {name} has "
            f"applied them; make it with clip_grad_norm={max_norm}"
        )
    return None


def _clip_value(optimizer: Any, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
    if getattr(optimizer.options, "clip_grad_value", None) != clip_value:
        raise ValueError(
            f"clip_grad_value_() finds no gradients, because {type(optimizer).__name__} has"
            " applied them; use the option clip_grad_value= of Lomo and AdaLomo"
        )


def _refuse_save(*_: Any, **__: Any) -> None:
    raise ValueError(
        "save_state() would save the optimizer of process 0 only, which has only its own shards; "
        "save ringcomm.parallel.get_state_dict(model, optimizer) instead"
    )
