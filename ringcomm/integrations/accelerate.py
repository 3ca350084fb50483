"""Lomo, AdaLomo and zero.shard() under Hugging Face Accelerate."""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ringcomm.optim import InBackwardOptimizer
from ringcomm.parallel.tensor.splits import tensor_groups_of
from ringcomm.parallel.zero import ZeroOptimizer

__all__ = ["register"]

# Accelerate's names of what shards or reduces by itself.
_OWN_SYSTEMS = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA")


def register() -> None:
    """Makes Accelerate know the backend "ringcomm", and Lomo, AdaLomo and zero.shard().

        register()
        accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="ringcomm")])
        optimizer = Lomo(model, lr=1e-2, group=dist.group.WORLD, clip_grad_norm=1.0)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    Call it before an Accelerator or TrainingArguments are made, on every rank; for Trainer call
    register() of ringcomm.integrations.transformers.

    Such an optimizer reduces the gradients: accelerator.prepare() then does not wrap the model in
    DistributedDataParallel. accelerator.backward() applies the optimizer's loss scale, and
    accelerator.clip_grad_norm_() clips through it. An optimizer of zero.shard() accepts any
    max_norm. Lomo accepts only its own clip_grad_norm, and the call returns None:
    optimizer.grad_norm is known after step(). The model must already be on its device, because the
    optimizer was made for it. Other optimizers train as before.

    Raises:
        ImportError: Accelerate is not installed, or of a version whose Accelerator is another.

    Accelerator() raises ValueError if it gets the backend in a single process without torchrun.
    accelerator.prepare() raises:
        TypeError: the Accelerator has, or gets, another optimizer than one such optimizer.
        ValueError: Accelerate uses FSDP, DeepSpeed or similar, or a GradScaler; Lomo has different
            accumulation_steps; the optimizer's group has different processes from the accelerator;
            the model has tensor-parallel layers; weights are not on the device of the accelerator.
    """
    from accelerate import Accelerator, PartialState, __version__

    if getattr(Accelerator, "knows_ringcomm", False):
        return
    if not hasattr(PartialState, "_prepare_backend"):
        raise ImportError(
            f"ringcomm: register() does not fit Accelerate {__version__}; it is tested with 1.15"
        )
    prepare_of_others, backend_of_others = Accelerator.prepare, PartialState._prepare_backend

    def prepare_backend(
        state: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> tuple[str | None, Any]:
        if backend != "ringcomm":
            return backend_of_others(state, cpu, sagemaker_dp, backend)
        _, distributed_type = backend_of_others(state, cpu, sagemaker_dp)
        if distributed_type.name == "NO":
            raise ValueError(
                'Accelerate has one process, and no use for backend="ringcomm": start it with'
                " torchrun, or leave the backend out"
            )
        return backend, distributed_type

    def prepare(accelerator: Any, *objects: Any, **options: Any) -> Any:
        given = [unwrap(obj) for obj in objects if isinstance(obj, torch.optim.Optimizer)]
        before = vars(accelerator).setdefault("optimizers_so_far", WeakSet())
        optimizers = [*before, *given]
        adopted = getattr(accelerator, "adopted", None)
        own = adopted or next(filter(reduces, optimizers), None)
        if own is not None and any(optimizer is not own for optimizer in optimizers):
            raise TypeError(
                f"an Accelerator with {type(own).__name__} does not reduce gradients, and takes no"
                f" other optimizer, got {[type(one).__name__ for one in optimizers]}: make another"
                " Accelerator for it"
            )
        if own is not adopted:
            models = [obj for obj in objects if isinstance(obj, nn.Module)]
            adopt(accelerator, own, accelerator.gradient_accumulation_steps, models)
        before.update(given)
        return prepare_of_others(accelerator, *objects, **options)

    PartialState._prepare_backend = prepare_backend
    Accelerator.prepare = prepare
    Accelerator.knows_ringcomm = True


def unwrap(optimizer: Any) -> Any:
    """The optimizer in Accelerate's wrapper."""
    return optimizer.optimizer if hasattr(optimizer, "accelerator_state") else optimizer


def reduces(optimizer: Any) -> bool:
    """Whether an optimizer reduces gradients itself."""
    return isinstance(optimizer, (InBackwardOptimizer, ZeroOptimizer))


def adopt(
    accelerator: Any, optimizer: Any, num_micro_batches: int, models: Iterable[nn.Module]
) -> None:
    """Makes an Accelerator leave gradients to an optimizer that reduces them; see register()."""
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
        optimizer._check_unchanged()
        run = partial(type(accelerator).backward, accelerator)
        accelerator.backward = lambda loss, **options: run(optimizer.scale(loss), **options)
        accelerator.save_state = _refuse_save
    accelerator.clip_grad_norm_ = partial(_clip_grad_norm, optimizer)
    accelerator.clip_grad_value_ = partial(_clip_value, optimizer)
    # evaluation_mode only leaves out the wrapper that reduces gradients.
    placed = {"device_placement": False, "evaluation_mode": True}
    own_prepare = partial(type(accelerator).prepare_model, accelerator)
    accelerator.prepare_model = lambda model, *_, **__: own_prepare(model, **placed)
    accelerator.adopted = optimizer


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
