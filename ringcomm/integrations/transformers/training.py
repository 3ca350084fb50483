"""The loss of causal language models of transformers, and its Trainer."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.integrations.accelerate import adopt
from ringcomm.ops.losses.cross_entropy import cross_entropy
from ringcomm.optim import InBackwardOptimizer

__all__ = ["causal_lm_loss", "loss_options_of", "patch_loss", "prepare"]


def patch_loss(
    model: Any, *, inplace: bool = False, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Any:
    """Has a causal language model compute its loss with ringcomm.ops.cross_entropy.

    The same loss and gradient as before without the options; logits are not copied to fp32, and may
    be a DTensor sharded by class, as tensor parallelism leaves them.

    Args:
        model: such as AutoModelForCausalLM makes; of transformers from 4.46 on.
        inplace: where gradients are wanted the loss overwrites the logits with theirs: the model's
            output then holds no logits.
        label_smoothing: in [0, 1].
        z_loss: the factor of lse ** 2.

    Returns:
        `model`.

    Raises:
        TypeError: the model has no loss that can be set.
        ValueError: its loss is another one.
    """
    options = {"inplace": inplace, "label_smoothing": label_smoothing, "z_loss": z_loss}
    model.loss_function = partial(causal_lm_loss, **{**loss_options_of(model), **options})
    return model


def loss_options_of(model: Any) -> dict[str, Any]:
    """What the model's loss is called with besides; raises as patch_loss() for another loss."""
    if not isinstance(getattr(type(model), "loss_function", None), property):
        raise TypeError(
            f"{type(model).__name__} has no loss_function to set: it is no model of transformers"
            " from 4.46 on"
        )
    from transformers.loss.loss_utils import ForCausalLMLoss

    found = model.loss_function
    if getattr(found, "func", found) not in (ForCausalLMLoss, causal_lm_loss):
        name = getattr(found, "__name__", repr(found))
        raise ValueError(f"{type(model).__name__} has the loss {name}, not ForCausalLMLoss")
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
    """transformers' ForCausalLMLoss, with its arguments, for logits that a group may have in parts.

    With a group, logits (batch, length, classes) are of this rank's classes, from vocab_start on;
    label n + 1 is what token n predicts. The other options are those of patch_loss().
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
    """Has transformers' Trainer leave gradients to Lomo, AdaLomo or an optimizer of zero.shard().

        dist.init_process_group("ringcomm")  # before TrainingArguments, which do not know the name
        trainer = Trainer(model, args, train_dataset=data)  # which moves the model
        trainer.optimizer = zero.shard(model, torch.optim.AdamW(model.parameters()), stage=2)
        prepare(trainer).train()

    Trainer then wraps the model in no DistributedDataParallel, and max_grad_norm clips by the
    optimizer. Lomo is made with clip_grad_norm=args.max_grad_norm and, in several processes, with
    group=dist.group.WORLD; in one process it wants prepare() as well.

    Args:
        trainer: a Trainer with such an optimizer, before train().

    Returns:
        `trainer`.

    Raises:
        TypeError: it has no such optimizer.
        ValueError: max_grad_norm is not 0 and not clip_grad_norm of Lomo; an optimizer of
            zero.shard() would be saved by process 0 alone; or as
            ringcomm.integrations.accelerate.prepare().
    """
    args, optimizer = trainer.args, trainer.optimizer
    if isinstance(optimizer, InBackwardOptimizer):
        own = optimizer.options.clip_grad_norm
        if args.max_grad_norm > 0 and args.max_grad_norm != own:
            name = type(optimizer).__name__
            raise ValueError(
                f"max_grad_norm is {args.max_grad_norm} and clip_grad_norm of {name} is {own}: make"
                f" {name} with clip_grad_norm=args.max_grad_norm, or set max_grad_norm=0"
            )
    elif args.save_strategy != "no" and not args.save_only_model:
        raise ValueError(
            "Trainer would save the optimizer of process 0 only, which has only its own shards; "
            "set save_only_model=True, and save ringcomm.parallel.get_state_dict() yourself"
        )
    adopt(trainer.accelerator, optimizer, args.gradient_accumulation_steps)
    # Trainer would take norms itself where some gradients are DTensors and others used up.
    trainer._mixed_mesh_grads = False
    return trainer
