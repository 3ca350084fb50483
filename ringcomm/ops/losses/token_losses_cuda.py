"""Cross-entropy's operators on stats of CUDA tensors: to merge them, and to losses."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm import env
from ringcomm.ops.losses.options import LOGIT_DTYPES
from ringcomm.ops.triton_kernels import VECTOR_BYTES, kernels

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


TOKEN_BLOCK = 128  # of kernels over tokens
COUNT_BLOCK = 2048  # of those that are one program


# ---- merge_softmax_stats


def merge_gathered(gathered: Tensor, num_ranks: int) -> Tensor:
    """The stats of all ranks, one behind the other, as those of whole rows."""
    num_entries = gathered.shape[0] // num_ranks
    merged = gathered.new_empty([num_entries, NUM_STATS])
    with torch.cuda.device_of(gathered):
        kernels().tokens.merge_kernel[(_num_blocks(num_entries, TOKEN_BLOCK),)](
            gathered, merged, num_entries, NUM_RANKS=num_ranks, BLOCK=TOKEN_BLOCK, num_warps=4
        )
    return merged


def merge_softmax_stats(stats: Tensor, group_name: str) -> Tensor:
    """The ranks' stats merged in rank order, after an all_gather by the group's own backend."""
    if (
        stats.dtype != torch.float32
        or stats.dim() != 2
        or stats.shape[0] < 1
        or stats.shape[1] != NUM_STATS
        or not stats.is_contiguous()
    ):
        raise ValueError(
            f"ringcomm: stats are contiguous float32 of rows of {NUM_STATS}, got {stats.dtype} of"
            f" shape {tuple(stats.shape)}"
        )
    resolve: Any = dist.distributed_c10d._resolve_process_group
    group = resolve(group_name)
    gathered = stats.new_empty([group.size() * stats.shape[0], NUM_STATS])
    dist.all_gather_into_tensor(gathered, stats, group=group)
    return merge_gathered(gathered, group.size())


def _num_blocks(num_elems: int, block: int) -> int:
    return -(-num_elems // block)


# ---- cross_entropy_loss


def denominator_of(
    target: Tensor,
    weight: Tensor | None,
    num_items: Tensor | None,
    ignore_index: int,
    reduction: str,
) -> Tensor:
    """What the losses' sum is divided by: float64, on the target's device."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"ringcomm: reduction is mean, sum or none, got '{reduction}'")
    if reduction != "mean":
        return target.new_ones([], dtype=torch.float64)
    if num_items is not None:
        if num_items.device == target.device:
            return num_items.detach().reshape([]).to(torch.float64, copy=True)
        # A number of the host's. To copy it over would wait for the device.
        return target.new_full([], num_items.item(), dtype=torch.float64)
    denominator = target.new_empty([], dtype=torch.float64)
    with torch.cuda.device_of(target):
        kernels().tokens.count_kernel[(1,)](
            target,
            weight,
            denominator,
            target.numel(),
            0 if weight is None else weight.numel(),
            ignore_index,
            BLOCK=COUNT_BLOCK,
            num_warps=8,
        )
    return denominator


def weight_sum_of(weight: Tensor | None, label_smoothing: float) -> Tensor | None:
    """The sum of all classes' weights, on the device, where smoothing needs it."""
    if weight is None or label_smoothing == 0:
        return None
    return weight.sum(dtype=torch.float64)


def losses_of(
    stats: Tensor,
    target: Tensor,
    weight: Tensor | None,
    denominator: Tensor,
    vocab_size: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The results of cross_entropy_loss, from stats that are merged."""
    num_tokens = target.numel()
    by_token = stats.new_empty([4, num_tokens])
    tokens = kernels().tokens
    with torch.cuda.device_of(stats):
        if num_tokens:
            tokens.loss_kernel[(_num_blocks(num_tokens, TOKEN_BLOCK),)](
                stats,
                target,
                weight,
                weight_sum_of(weight, label_smoothing),
                by_token,
                num_tokens,
                vocab_size,
                ignore_index,
                label_smoothing,
                z_loss,
                SMOOTHS=label_smoothing != 0,
                BLOCK=TOKEN_BLOCK,
                num_warps=4,
            )
        if reduction == "none":
            return by_token[0].clone(), by_token, denominator
        loss = stats.new_empty([])
        tokens.reduce_kernel[(1,)](
            by_token, denominator, loss, num_tokens, BLOCK=COUNT_BLOCK, num_warps=8
        )
    return loss, by_token, denominator


def cross_entropy_loss(
    stats: Tensor,
    target: Tensor,
    weight: Tensor | None,
    num_items: Tensor | None,
    vocab_size: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, what is known of each token, and the denominator."""
    target = target.contiguous()
    check_stats(stats, target.numel())
    if weight is not None and vocab_size < 0:
        vocab_size = weight.numel()
    weight = checked_weight(weight, vocab_size)
    if env.checks_targets():
        check_classes(target, check_shards(stats, vocab_size), ignore_index)
    denominator = denominator_of(target, weight, num_items, ignore_index, reduction)
    return losses_of(
        stats,
        target,
        weight,
        denominator,
        vocab_size,
        ignore_index,
        label_smoothing,
        z_loss,
        reduction,
    )
