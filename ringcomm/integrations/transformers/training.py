"""The loss of causal language models of transformers, and its Trainer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ringcomm.integrations import accelerate
from ringcomm.ops.losses.cross_entropy import cross_entropy
from ringcomm.optim import InBackwardOptimizer
from ringcomm.parallel.model.describe import describe
from ringcomm.parallel.shards import find_shards


def patch_loss(
    model: Any, *, inplace: bool = False, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Any:
    """Makes a causal language model compute its loss with ringcomm.ops.cross_entropy.

    Without options, the loss and gradient are the same as before. Logits are not copied to fp32 and
    may be a DTensor sharded by class, as tensor parallelism produces it.

    Args:
        model: a model of transformers >= 4.46, such as AutoModelForCausalLM returns.
        inplace: as in cross_entropy: the outputs of a training step then have no logits.
        label_smoothing: in [0, 1].
        z_loss: the factor of lse ** 2.

    Returns:
        `model`.

    Raises:
        TypeError: the model has no loss_function.
        ValueError: its loss is not ForCausalLMLoss.
    """
    options = {"inplace": inplace, "label_smoothing": label_smoothing, "z_loss": z_loss}
    inner = describe(model).unwrapped
    inner.loss_function = partial(causal_lm_loss, **{**loss_options_of(inner), **options})
    return model


def loss_options_of(model: Any) -> dict[str, Any]:
    """Further arguments of the model's loss; raises as patch_loss() for another loss."""
    if not isinstance(getattr(type(model), "loss_function", None), property):
        raise TypeError(
            f"{type(model).__name__} has no loss_function: a model of transformers >= 4.46 is"
            " needed, without wrappers such as PEFT's"
        )
    found = model.loss_function
    if not is_causal_lm_loss(found):
        name = getattr(found, "__name__", repr(found))
        raise ValueError(f"{type(model).__name__} must have the loss ForCausalLMLoss, got {name}")
    return dict(getattr(found, "keywords", {}))


def is_causal_lm_loss(loss: Any) -> bool:
    """Whether a model's loss_function is ForCausalLMLoss, or causal_lm_loss() in its place."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    return getattr(loss, "func", loss) in (ForCausalLMLoss, causal_lm_loss)


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
        inplace=inplace,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )
    return loss


def register() -> None:
    """Makes Trainer know the backend "ringcomm", and Lomo, AdaLomo and zero.shard().

        register()
        args = TrainingArguments("runs", ddp_backend="ringcomm")
        optimizer = Lomo(model, lr=1e-2, group=dist.group.WORLD, clip_grad_norm=args.max_grad_norm)
        Trainer(model, args, train_dataset=data, optimizers=(optimizer, None)).train()

    Call it before TrainingArguments are made, on every rank. Trainers of other libraries that
    inherit from it know them as well. A Trainer moves its model when it is made: after that, call
    zero.shard(), and on GPUs make Lomo, and set trainer.optimizer.

    train() then does not wrap the model in DistributedDataParallel, and max_grad_norm clips through
    the optimizer. Lomo in several processes needs group=dist.group.WORLD. Other optimizers train as
    before. TrainingArguments take the name from Python only; their command line refuses it.

    Raises:
        ImportError: transformers or Accelerate is not installed.

    Before the first step, train() raises:
        ValueError: max_grad_norm is neither 0 nor clip_grad_norm of Lomo; process 0 alone would
            save an optimizer of zero.shard(), or sharded weights; weights are sharded and
            predict_with_generate is set; or as with ringcomm.integrations.accelerate.register().
    """
    import transformers

    accelerate.register()
    trainers: Any = transformers.Trainer
    if getattr(trainers, "knows_ringcomm", False):
        return
    create_of_others = trainers.create_optimizer

    def create_optimizer(trainer: Any, *options: Any, **names: Any) -> Any:
        optimizer = create_of_others(trainer, *options, **names)
        if accelerate.reduces(accelerate.unwrap(optimizer)):
            _leave_gradients(trainer, accelerate.unwrap(optimizer))
        return optimizer

    trainers.create_optimizer = create_optimizer
    trainers.knows_ringcomm = True


def _save_model(
    trainer: Any, save: Callable[..., None], output_dir: str | None = None, **options: Any
) -> None:
    """Trainer.save_model() of sharded weights, whose save_pretrained() all processes call."""
    if trainer.args.should_save:
        save(output_dir, **options)
    else:
        trainer.model.save_pretrained(output_dir or trainer.args.output_dir)


def _leave_gradients(trainer: Any, optimizer: Any) -> None:
    """Makes a Trainer leave gradients to an optimizer that reduces them; see register()."""
    args = trainer.args
    params = [param for group in optimizer.param_groups for param in group["params"]]
    is_sharded = trainer.accelerator.num_processes > 1 and any(
        isinstance(param, DTensor) or find_shards(param) is not None for param in params
    )
    if is_sharded and args.save_strategy != "no":
        raise ValueError(
            "Trainer would save the weights of process 0 only, which has only its own shards; set"
            ' save_strategy="no", and save ringcomm.parallel.get_state_dict(full=True) yourself'
        )
    if is_sharded:
        trainer.save_model = partial(_save_model, trainer, trainer.save_model)
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
    accelerate.adopt(
        trainer.accelerator, optimizer, args.gradient_accumulation_steps, [trainer.model]
    )
    # Trainer asks by the names of classes whether to shift labels; fully_shard has renamed them.
    for module in trainer.model.modules():
        if isinstance(module, FSDPModule):
            type(module).__name__ = type(module).__mro__[2].__name__
    # Trainer would compute norms itself, but some gradients are DTensors and others already freed.
    trainer._mixed_mesh_grads = False
