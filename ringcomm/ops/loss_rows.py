"""Logits, targets and stats for cross-entropy's kernels, checked as the CPU operators do."""

from typing import NamedTuple

import torch
from torch import Tensor

from ringcomm.ops.loss_options import LOGIT_DTYPES
from ringcomm.ops.triton_plans import VECTOR_BYTES

NUM_STATS = 6
# In place of the number of classes, where shards do not fit together; as kernels/token_losses.py.
DISAGREEMENT, GAP = -1, -2


class Rows(NamedTuple):
    """Logits and targets, checked, and what kernels take of them."""

    logits: Tensor
    target: Tensor
    weight: Tensor | None
    vocab_start: int
    num_classes: int

    @property
    def num_tokens(self) -> int:
        """The number of rows."""
        return self.logits.shape[0]

    @property
    def width(self) -> int:
        """Columns, padding included."""
        return self.logits.shape[1]

    @property
    def shard_weight(self) -> Tensor | None:
        """Weights from the shard's first class on."""
        return None if self.weight is None else self.weight[self.vocab_start :]

    @property
    def vector_elems(self) -> int:
        """Elements of 16 bytes."""
        return VECTOR_BYTES // self.logits.element_size()


def lead_of(tensor: Tensor) -> int:
    """Elements between the last 16-byte boundary and the tensor."""
    return tensor.data_ptr() % VECTOR_BYTES // tensor.element_size()


def checked_weight(weight: Tensor | None, vocab_size: int) -> Tensor | None:
    """Class weights, contiguous; TypeError or ValueError where they are none."""
    if weight is None:
        return None
    if weight.dtype != torch.float32:
        raise TypeError(f"ringcomm: class weights are float32, got {weight.dtype}")
    if weight.dim() != 1 or weight.shape[0] != vocab_size:
        raise ValueError(
            f"ringcomm: one weight for each of the {vocab_size} classes, got shape"
            f" {tuple(weight.shape)}"
        )
    return weight.contiguous()


def rows_of(
    logits: Tensor, target: Tensor, weight: Tensor | None, vocab_start: int, vocab_size: int
) -> Rows:
    """A shard's rows; TypeError or ValueError where these are no logits and targets."""
    if logits.dim() != 2 or (logits.stride(1) != 1 and logits.shape[1] > 1):
        raise ValueError(
            f"ringcomm: logits are rows of classes side by side, got shape {tuple(logits.shape)}"
            f" with strides {logits.stride()}"
        )
    if target.dim() != 1 or target.shape[0] != logits.shape[0]:
        raise ValueError(
            f"ringcomm: one target for each row of logits, got shape {tuple(target.shape)} for"
            f" logits of shape {tuple(logits.shape)}"
        )
    if target.dtype != torch.int64:
        raise TypeError(f"ringcomm: targets are int64, got {target.dtype}")
    if logits.dtype not in LOGIT_DTYPES:
        raise TypeError(f"ringcomm: logits are float32, float16 or bfloat16, got {logits.dtype}")
    if vocab_start < 0:
        raise ValueError(f"ringcomm: vocab_start is a number from 0 on, got {vocab_start}")
    width = logits.shape[1]
    num_classes = width if vocab_size < 0 else min(max(vocab_size - vocab_start, 0), width)
    weight = checked_weight(weight, vocab_size)
    return Rows(logits, target.contiguous(), weight, vocab_start, num_classes)


def check_stats(stats: Tensor, num_tokens: int) -> None:
    """ValueError where these are no stats of so many tokens."""
    wanted = (num_tokens + 1, NUM_STATS)
    if stats.dtype != torch.float32 or not stats.is_contiguous() or stats.shape != wanted:
        raise ValueError(
            f"ringcomm: stats for {num_tokens} tokens are contiguous float32 of {num_tokens + 1}"
            f" rows of {NUM_STATS}, got {stats.dtype} of shape {tuple(stats.shape)}"
        )


def check_classes(target: Tensor, vocab_size: int, ignore_index: int) -> None:
    """IndexError naming the first that is no class. Waits for the device."""
    is_wrong = (target != ignore_index) & ((target < 0) | (target >= vocab_size))
    wrong = is_wrong.nonzero()
    if len(wrong):
        first = int(wrong[0])
        raise IndexError(
            f"ringcomm: target {first} is {int(target[first])}, and there are {vocab_size} classes;"
            f" ignore_index is {ignore_index}"
        )


def check_shards(stats: Tensor, vocab_size: int) -> int:
    """The number of all shards' classes, or ValueError where it is none. Waits for the device."""
    size = int(stats[-1, 2])
    if size == DISAGREEMENT:
        raise ValueError(
            "ringcomm: the ranks' calls differ in vocab_size, ignore_index, logit_scale, softcap,"
            " label_smoothing or outputs"
        )
    if size == GAP:
        raise ValueError(
            "ringcomm: the shards of the vocabulary do not add up: they are not one behind another"
            " from 0 on; is every vocab_start right?"
        )
    if size <= 0 or vocab_size not in (-1, size):
        wanted = vocab_size if vocab_size >= 0 else "1 or more"
        raise ValueError(f"ringcomm: the shards have {size} classes of the vocabulary's {wanted}")
    return size
