"""The loss of causal language models of transformers, and its Trainer."""

import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ringcomm.integrations import accelerate
from ringcomm.ops.losses.cross_entropy import cross_entropy
from ringcomm.ops.losses.options import InPlace, check_inplace
from ringcomm.optim import InBackwardOptimizer
from ringcomm.parallel.loss import Batch, CountItems, PartLoss, count_of_mean
from ringcomm.parallel.model.cut import find_shards
from ringcomm.parallel.model.describe import unwrapped
from ringcomm.parallel.tensor.regions import gather_from_tp
from ringcomm.torch_names import TORCH_VERSION, AsDTensor


def patch_loss(
    model: Any, *, inplace: InPlace = False, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Any:
    """Makes a causal language model compute its loss with ringcomm.ops.cross_entropy.

    Without options, the loss and gradient are the same as before. Logits are not copied to fp32 and
    may be a DTensor sharded by class, as tensor parallelism produces it.

    Args:
        model: a model of transformers >= 4.46, such as AutoModelForCausalLM returns.
        inplace: as in cross_entropy: True, and the logits that the model returns can be read until
            the backward pass.
        label_smoothing: in [0, 1].
        z_loss: the factor of lse ** 2.

    Returns:
        `model`.

    Raises:
        TypeError: the model has no loss_function.
        ValueError: its loss is not ForCausalLMLoss, or `inplace` is unknown.
    """
    check_inplace(inplace, "mean")
    options = {"inplace": inplace, "label_smoothing": label_smoothing, "z_loss": z_loss}
    inner = unwrapped(model)
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
    inplace: InPlace = False,
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


def typed_logits(head: Any, _: Any, args: Any, output: Any) -> Any:
    """Gathers the logits of an output without a loss; makes others a DTensor."""
    is_tuple = isinstance(output, tuple)
    has_loss = output[0].dim() == 0 if is_tuple else output.loss is not None
    key: Any = int(has_loss) if is_tuple else "logits"
    logits, split = output[key], head.splits["weight"]
    if has_loss:
        split = replace(split, dim=logits.dim() - 1)
        make = partial(split.as_dtensor, group=head.group, name="the logits")
        logits = make(logits) if TORCH_VERSION >= (2, 13) else AsDTensor.apply(logits, make)
    else:
        logits = gather_from_tp(logits, [end - begin for begin, end in split.ranges], head.group)
    if is_tuple:
        return (*output[:key], logits, *output[key + 1 :])
    output[key] = logits
    return output


# ---- the loss in a model that parallelize() trains

_IN_PIPELINE = ("input_ids", "attention_mask", "position_ids")


# Classes whose own loss is a mean over the labels other than -100, or over rows.
_MEANS = ("MaskedLM", "TokenClassification", "SequenceClassification", "ImageClassification")


class LossInModel(PartLoss):
    """A model's own loss; in a pipeline its loss of logits.

    Known are ForCausalLMLoss, and what transformers' classifiers, masked language models and
    encoder-decoders compute. Others need count_items.
    """

    def __init__(
        self,
        model: Any,
        group: dist.ProcessGroup | None = None,
        blocks: Any = None,
        *,
        count_items: CountItems | None = None,
        is_whole: bool = False,
    ) -> None:
        """Of a model without wrappers, whose layers may be tensor-parallel over the group.

        `blocks` are those of a pipeline.
        """
        self._config, self._group = model.config, group
        owner: Any = next(base for base in type(model).__mro__ if "forward" in vars(base))
        code = inspect.unwrap(owner.forward).__code__
        # Whether label n + 1 is that of token n. T5 has the function, and computes another loss.
        is_called = "loss_function" in code.co_names
        self._is_shifted = is_called and is_causal_lm_loss(model.loss_function)
        # The routers' loss, which is a mean, is weighted together with that of the tokens.
        has_routers = getattr(model.config, "output_router_logits", False)
        takes_number = bool(code.co_flags & inspect.CO_VARKEYWORDS) and not has_routers
        loss: Any = _loss_of
        if blocks is not None:
            loss = partial(model.loss_function, vocab_size=model.config.vocab_size)
        super().__init__(loss, count_items or count_of_mean)
        self._counts_all = count_items is not None or not self._is_shifted
        self._divides = self._is_shifted and (blocks is not None or takes_number)
        self.shown = f"own loss of {owner.__name__}{' with count_items' if count_items else ''}"
        is_known = self._is_shifted or (
            owner.__module__.startswith("transformers.")
            and (model.config.is_encoder_decoder or owner.__name__.endswith(_MEANS))
            and not {"shift_labels", "shift_logits"}.intersection(code.co_varnames)
            and not (is_called and not model.loss_function.__module__.startswith("transformers."))
        )
        if not (is_known or is_whole or count_items):
            self.problem = (
                f"{type(model).__name__} has a loss of its own, which does not say which labels its"
                " mean is over: pass count_items=, such as count_items=lambda labels:"
                " labels.ne(-100).sum(), or pass loss_fn"
            )
        self.blocks = blocks
        head: Any = model.get_output_embeddings()
        ranges = head.splits["weight"].ranges if hasattr(head, "splits") else ()
        self._logit_sizes = [end - begin for begin, end in ranges]

    def checked(self, batch: Batch) -> Batch:
        """The batch with its arguments by name, or for a pipeline's first block.

        Raises ValueError for arguments that a pipeline does not pass on, and for packed sequences
        that the model does not separate.
        """
        if len(batch.args) > 1:
            raise TypeError(
                f"a model of transformers takes one tensor, input_ids, or a dict; got"
                f" {len(batch.args)} tensors"
            )
        kwargs = {**({"input_ids": batch.args[0]} if batch.args else {}), **batch.kwargs}
        _check_packed(self._config, kwargs)
        if self.blocks is None:
            return batch._replace(args=(), kwargs=kwargs)
        unknown = [name for name in kwargs if name not in _IN_PIPELINE]
        if unknown or "input_ids" not in kwargs:
            raise ValueError(
                f"a pipeline takes input_ids, attention_mask and position_ids, got {[*kwargs]}"
            )
        return batch._replace(args=(kwargs.pop("input_ids"),), kwargs=kwargs)

    def labels_of(self, batch: Batch) -> Tensor:
        """The labels of which those that are not -100 count; all of them for count_items."""
        if self._counts_all:
            return batch.targets
        return batch.kwargs.get("shift_labels", batch.targets[..., 1:])

    def arguments(self, targets: Tensor, num_own: float, num_items: float) -> dict[str, Any]:
        """The model's arguments for the loss; without labels only if its loss would be NaN."""
        # With a cache, transformers does not look for packed sequences.
        cache = {"use_cache": False} if self._is_shifted else {}
        if self._divides:
            return {"labels": targets, "num_items_in_batch": num_items, **cache}
        return {"labels": targets, **cache} if num_own else cache

    def result_of(self, output: Any) -> Tensor:
        """The logits of the whole vocabulary. Collective in a pipeline."""
        if self.blocks is None:
            return output.logits
        if self._group is None or self._group.size() == 1 or not self._logit_sizes:
            return output
        return gather_from_tp(output, self._logit_sizes, self._group)


def _loss_of(output: Any, *_: Any, **__: Any) -> Tensor:
    return output.loss


def _check_packed(config: Any, batch: Mapping[str, Any]) -> None:
    """Raises ValueError if sequences packed into a row would attend to each other.

    Positions that restart mark packed sequences. transformers sees them without an attention mask
    and a cache, and flash attention in batches of one row only.
    """
    positions, mask = batch.get("position_ids"), batch.get("attention_mask")
    uses_flash = "flash" in str(getattr(config, "_attn_implementation", ""))
    if "cu_seq_lens_q" in batch and positions is None and not uses_flash:
        raise ValueError(
            "cu_seq_lens_q is for flash attention only, and the model does not use it: pass"
            " position_ids that restart in each sequence"
        )
    if not isinstance(positions, Tensor) or positions.is_meta or positions.dim() != 2:
        return
    restarts = positions.diff(dim=1) != 1
    if isinstance(mask, Tensor) and mask.shape == positions.shape:
        restarts &= mask[:, 1:].bool() & mask[:, :-1].bool()  # not between padding and tokens
    if not restarts.any():
        return
    reason = None
    if mask is not None and mask.dim() == 2:
        reason = "with an attention_mask of two dimensions: leave it out"
    elif uses_flash and len(positions) > 1:
        reason = "by flash attention with several rows: pack all sequences into one row"
    elif importlib.util.find_spec("transformers.masking_utils") is None:
        reason = "by this version of transformers: update it"
    if reason is not None:
        raise ValueError(f"position_ids restart, but packed sequences are not separated {reason}")


# ---- the Trainer


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
