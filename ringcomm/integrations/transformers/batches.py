"""Batches of models of transformers that have their own loss."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.integrations.transformers.training import loss_options_of
from ringcomm.parallel.asked_loss import is_integer
from ringcomm.parallel.batches import Batch
from ringcomm.parallel.loss import PartLoss
from ringcomm.parallel.tensor.regions import gather_from_tp

_IN_PIPELINE = ("input_ids", "attention_mask", "position_ids")


class LossInModel:
    """How a model of transformers is called for the loss of a part of a batch.

    Attributes:
        part_loss: the loss for a part, of the model's output.
        is_shifted: whether label n + 1 is that of token n, as with ForCausalLMLoss.

    A model that computes another loss is asked whether it is the mean over labels other than -100.
    """

    def __init__(self, model: Any, group: dist.ProcessGroup) -> None:
        """Of a model without wrappers, whose layers may be tensor-parallel over the group."""
        self._model_config, self._group = model.config, group
        self.is_shifted = False
        code = inspect.unwrap(type(model).forward).__code__
        with suppress(TypeError, ValueError):
            loss_options_of(model)
            self.is_shifted = "loss_function" in code.co_names  # T5 computes another one
        takes_more = bool(code.co_flags & inspect.CO_VARKEYWORDS)
        # The routers' loss, which is a mean, is weighted together with that of the tokens.
        has_routers = getattr(model.config, "output_router_logits", False)
        self._divides = self.is_shifted and takes_more and not has_routers
        self.part_loss: PartLoss
        if self._divides:
            self.part_loss = PartLoss(lambda output, _, num_items_in_batch: output.loss, asks=False)
        elif self.is_shifted:
            self.part_loss = PartLoss(lambda output, _: output.loss, asks=False)
        else:
            self.part_loss = _OtherLoss(lambda output, _: output.loss)
            self.part_loss.name = type(model).__name__
        head: Any = model.get_output_embeddings()
        ranges = head.splits["weight"].ranges if hasattr(head, "splits") else ()
        self._logit_sizes = [end - begin for begin, end in ranges]

    def checked(self, batch: Batch, *, in_pipeline: bool) -> Batch:
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
        _check_packed(self._model_config, kwargs)
        if not in_pipeline:
            return batch._replace(args=(), kwargs=kwargs)
        unknown = [name for name in kwargs if name not in _IN_PIPELINE]
        if unknown or "input_ids" not in kwargs:
            raise ValueError(
                f"a pipeline takes input_ids, attention_mask and position_ids, got {[*kwargs]}"
            )
        return batch._replace(args=(kwargs.pop("input_ids"),), kwargs=kwargs)

    def use_logits(self, model: Any) -> PartLoss:
        """Makes part_loss the model's loss as a function of logits and labels, for a pipeline."""
        loss = partial(model.loss_function, vocab_size=model.config.vocab_size)

        def mean(logits: Tensor, labels: Tensor) -> Tensor:  # over labels that only it knows
            return loss(logits, labels)

        self.part_loss = PartLoss(loss, asks=False) if self.is_shifted else PartLoss(mean)
        return self.part_loss

    def labels_of(self, batch: Batch) -> Tensor:
        """The labels of which those that are not -100 count."""
        if "shift_labels" in batch.kwargs:
            return batch.kwargs["shift_labels"]
        return batch.targets[..., 1:] if self.is_shifted else batch.targets

    def arguments(self, targets: Tensor, num_own: int, num_items: float) -> dict[str, Any]:
        """The model's arguments for the loss; without labels only if its loss would be NaN."""
        # With a cache, transformers does not look for packed sequences.
        cache = {"use_cache": False} if self.is_shifted else {}
        if self._divides:
            return {"labels": targets, "num_items_in_batch": num_items, **cache}
        return {"labels": targets, **cache} if num_own else cache

    def gathered(self, logits: Tensor) -> Tensor:
        """The logits of the whole vocabulary, of a pipeline's. Collective."""
        if self._group.size() == 1 or not self._logit_sizes:
            return logits
        return gather_from_tp(logits, self._logit_sizes, self._group)


class _OtherLoss(PartLoss):
    """A model's own loss, of which only its value is known. `name` is that of the model."""

    name = ""

    def _ask(self, output: Any, targets: Tensor) -> str:
        logits, kinds = getattr(output, "logits", None), self.labels(targets).kinds
        if not is_integer(targets) or (targets.dim() == 1 and not kinds):
            return ""  # a mean over rows
        if isinstance(logits, Tensor) and logits.shape[:-1] == targets.shape:
            flat = logits.detach().float().flatten(0, -2)
            with suppress(IndexError):
                wanted = nn.functional.cross_entropy(flat, targets.flatten())
                rtol = max(1e-4, 4 * torch.finfo(logits.dtype).eps)
                if torch.allclose(output.loss.detach().float(), wanted, rtol):
                    return ""
        return (
            f"{self.name} has a loss of its own, which is not the mean over labels other than -100,"
            " so losses of ranks and micro-batches cannot be weighted: pass loss_fn"
        )


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
