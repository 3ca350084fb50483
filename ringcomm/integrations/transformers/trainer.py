"""Optimizers that reduce gradients themselves, under transformers' Trainer."""

from __future__ import annotations

from typing import Any

from ringcomm.integrations.accelerate import adopt
from ringcomm.optim import InBackwardOptimizer

__all__ = ["prepare"]


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
            ringcomm.integrations.accelerate.adopt().
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
            "Trainer saves the optimizer of process 0, which has its own shards alone: set"
            " save_only_model=True, and save ringcomm.parallel.get_state_dict() yourself"
        )
    adopt(trainer.accelerator, optimizer, args.gradient_accumulation_steps)
    # Trainer would take norms itself where some gradients are DTensors and others used up.
    trainer._mixed_mesh_grads = False
    return trainer
