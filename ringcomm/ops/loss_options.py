"""What a cross-entropy is made of: options, their checks, and the operators' arguments in order."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from ringcomm.ops.vocab_shards import VocabShard

# What is known of each token: rows of the operators' results.
OUTPUTS = ("loss", "lse", "entropy", "accuracy")
_FP32 = torch.finfo(torch.float32)
LOGIT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class LossOptions(NamedTuple):
    """Arguments of ringcomm.ops.cross_entropy, checked."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float  # 0: none
    logit_scale: float
    reduction: str
    outputs: tuple[str, ...]

    @property
    def wants_more(self) -> bool:
        """Whether the pass over the logits must find more than the loss needs."""
        return "entropy" in self.outputs or "accuracy" in self.outputs

    def _for_logits(self, shard: VocabShard) -> tuple[Any, ...]:
        """What says which logits there are, and what they mean."""
        return shard.start, shard.size, self.ignore_index, self.logit_scale, self.softcap

    def for_stats(self, shard: VocabShard) -> tuple[Any, ...]:
        """The options of softmax_stats."""
        return *self._for_logits(shard), self.label_smoothing > 0, self.wants_more

    def for_loss(self, shard: VocabShard) -> tuple[Any, ...]:
        """The options of cross_entropy_loss."""
        return (
            shard.size,
            self.ignore_index,
            self.label_smoothing,
            self.z_loss,
            self.reduction,
        )

    def for_grad(self, shard: VocabShard) -> tuple[Any, ...]:
        """The options of cross_entropy_grad and cross_entropy_grad_."""
        return *self._for_logits(shard), self.label_smoothing, self.z_loss


class LossArguments(TypedDict, total=False):
    """The same as users give them, where a signature does not list them."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    logit_scale: float
    reduction: str
    outputs: Sequence[str]


def checked_options(
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    outputs: Sequence[str] = (),
) -> LossOptions:
    """The options, or ValueError naming the one that is out of its range."""
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is in [0, 1], got {label_smoothing!r}")
    if not 0 <= z_loss < math.inf:
        raise ValueError(f"z_loss is a number from 0 on, got {z_loss!r}")
    if softcap is not None and not _FP32.tiny <= softcap <= _FP32.max:
        raise ValueError(f"softcap is a positive number of fp32 or None, got {softcap!r}")
    if not abs(logit_scale) <= _FP32.max:
        raise ValueError(f"logit_scale is a finite number of fp32, got {logit_scale!r}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction is "mean", "sum" or "none", got {reduction!r}')
    unknown = [name for name in outputs if name not in OUTPUTS]
    if unknown:
        raise ValueError(f"outputs are some of {OUTPUTS}, got {unknown}")
    return LossOptions(
        ignore_index,
        label_smoothing,
        z_loss,
        softcap or 0.0,
        logit_scale,
        reduction,
        tuple(outputs),
    )


def checked_num_items(num_items: float | Tensor | None, reduction: str) -> Tensor | None:
    """`num_items` as a tensor, or ValueError where the reduction divides by nothing."""
    if num_items is None:
        return None
    if reduction != "mean":
        raise ValueError(f'num_items is for reduction="mean", got {reduction!r}')
    if isinstance(num_items, Tensor):
        if num_items.numel() != 1:
            raise ValueError(f"num_items is one number, got shape {tuple(num_items.shape)}")
        return num_items.detach().reshape([])
    return torch.tensor(float(num_items), dtype=torch.float64)


def check_class_weight(weight: Tensor | None, device: torch.device) -> None:
    """ValueError or TypeError where these are no weights of classes; how many is not looked at."""
    if weight is None:
        return
    if weight.dtype != torch.float32:
        raise TypeError(f"class weights are float32, got {weight.dtype}")
    if weight.dim() != 1:
        raise ValueError(f"one weight for each class, got shape {tuple(weight.shape)}")
    if weight.device != device:
        raise ValueError(f"class weights are wanted on {device}, and are on {weight.device}")
    if weight.requires_grad:
        raise ValueError("class weights get no gradient, and these require grad")


def check_targets(target: Tensor, shape: torch.Size, device: torch.device) -> None:
    """ValueError or TypeError where these are no class indices of tokens of a shape."""
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"targets are int64 or int32, or probabilities, got {target.dtype}")
    if target.shape != shape:
        raise ValueError(f"targets have shape {tuple(shape)}, got {tuple(target.shape)}")
    if target.device != device:
        raise ValueError(f"targets are wanted on {device}, and are on {target.device}")


def with_outputs(loss: Tensor, by_token: Tensor, target: Tensor, options: LossOptions) -> Any:
    """What the user gets: the loss in its shape, and the outputs by name if there are any."""
    if options.reduction == "none":
        loss = loss.view(target.shape)
    if not options.outputs:
        return loss
    named = dict(zip(OUTPUTS, by_token.unbind(0), strict=True))
    return loss, {name: named[name].view(target.shape) for name in options.outputs}
