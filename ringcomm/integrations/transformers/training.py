"""The loss of causal language models of transformers, and its Trainer."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ringcomm.integrations.accelerate import adopt
from ringcomm.ops.losses.cross_entropy import cross_entropy
from ringcomm.optim import InBackwardOptimizer
from ringcomm.parallel.shards import find_shards


def patch_loss(
    model: Any, *, inplace: bool = False, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Any:
    """Makes a causal language model compute its loss with ringcomm.ops.cross_entropy.

    Without options, the loss and gradient are the same as before. Logits are not copied to fp32 and
    may be a DTensor sharded by class, as tensor parallelism produces it.

    Args:
        model: a model of transformers >= 4.46, such as AutoModelForCausalLM returns.
        inplace: if gradients are enabled, the loss overwrites the logits with their gradient. The
            model's output then has no logits.
        label_smoothing: in [0, 1].
        z_loss: the factor of lse ** 2.

    Returns:
        `model`.

    Raises:
        TypeError: the model has no loss_function.
        ValueError: its loss is not ForCausalLMLoss.
    """
    options = {"inplace": inplace, "label_smoothing": label_smoothing, "z_loss": z_loss}
    model.loss_function = partial(causal_lm_loss, **{**loss_options_of(model), **options})
    return model


def loss_options_of(model: Any) -> dict[str, Any]:
    """Further arguments of the model's loss; raises as patch_loss() for another loss."""
    if not isinstance(getattr(type(model), "loss_function", None), property):
        raise TypeError(
            f"{type(model).__name__} has no loss_function: a model of transformers >= 4.46 is"
            " needed"
        )
    from transformers.loss.loss_utils import ForCausalLMLoss

    found = model.loss_function
    if getattr(found, "func", found) not in (ForCausalLMLoss, causal_lm_loss):
        name = getattr(found, "__name__", repr(found))
        raise ValueError(f"{type(model).__name__} must have the loss ForCausalLMLoss, got {name}")
    return dict(getattr(found, "keywords", {}))


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    vocab_start: int | None = None,
    inplace: bool = False,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    **unused: Any,
) -> Tensor:
    """transformers' ForCausalLMLoss, with its arguments; logits may be sharded over a group.

    With a group, logits (batch, length, classes) have this rank's classes, starting at vocab_start.
    Token n predicts label n + 1. The other options are those of patch_loss().
    """
    if shift_labels is None:
        if labels is None:
            raise ValueError("the loss needs labels or shift_labels")
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    loss: Tensor = cross_entropy(
        logits,
        shift_labels.to(logits.device).reshape(logits.shape[:-1]),
        group=group,
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        num_items=num_items_in_batch,
        ignore_index=ignore_index,
        inplace=inplace and torch.is_grad_enabled(),
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )
    return loss


def prepare(trainer: Any) -> Any:
    """Makes transformers' Trainer leave gradients to Lomo, AdaLomo or an optimizer of zero.shard().

        dist.init_process_group("ringcomm")  # before TrainingArguments, which do not know the name
        trainer = Trainer(model, args, train_dataset=data)  # which moves the model
        trainer.optimizer = zero.shard(model, torch.optim.AdamW(model.parameters()), stage=2)
        prepare(trainer).train()

    Trainer then does not wrap the model in DistributedDataParallel, and max_grad_norm clips through
    the optimizer. Make Lomo with clip_grad_norm=args.max_grad_norm and, in several processes, with
    group=dist.group.WORLD. Lomo needs prepare() in one process as well.

    Args:
        trainer: a Trainer with such an optimizer, before train().

    Returns:
        `trainer`.

    Raises:
        TypeError: the trainer has no such optimizer.
        ValueError: max_grad_norm is neither 0 nor clip_grad_norm of Lomo; process 0 alone would
            save an optimizer of zero.shard(), or sharded weights; weights are sharded and
            predict_with_generate is set; or as ringcomm.integrations.accelerate.prepare().
    """
    args, optimizer = trainer.args, trainer.optimizer
    groups = getattr(optimizer, "param_groups", [])
    params = [param for group in groups for param in group["params"]]
    is_sharded = trainer.accelerator.num_processes > 1 and any(
        isinstance(param, DTensor) or find_shards(param) is not None for param in params
    )
    if is_sharded and args.save_strategy != "no":
        raise ValueError(
            "Trainer would save the weights of process 0 only, which has only its own shards; set"
            ' save_strategy="no", and save ringcomm.parallel.get_state_dict(full=True) yourself'
        )
    if is_sharded and getattr(args, "predict_with_generate", False):
        raise ValueError(
            "predict_with_generate runs the model a different number of times on each process, but"
            " each call gathers sharded weights on all of them: use zero.shard() at stage 1 or 2,"
            " or predict_with_generate=False"
        )
    if isinstance(optimizer, InBackwardOptimizer):
        own = optimizer.options.clip_grad_norm
        if args.max_grad_norm > 0 and args.max_grad_norm != own:
            name = type(optimizer).__name__
            raise ValueError(
                f"max_grad_norm is {args.max_grad_norm}, but clip_grad_norm of {name} is {own}:"
                f" make {name} with clip_grad_norm=args.max_grad_norm, or set max_grad_norm=0"
            )
    elif args.save_strategy != "no" and not args.save_only_model:
        raise ValueError(
            "Trainer would save the optimizer of process 0 only, which has only its own shards; "
            "set save_only_model=True, and save ringcomm.parallel.get_state_dict() yourself"
        )
    adopt(trainer.accelerator, optimizer, args.gradient_accumulation_steps, [trainer.model])
    # Trainer would compute norms itself, but some gradients are DTensors and others already freed.
    trainer._mixed_mesh_grads = False
    return trainer
