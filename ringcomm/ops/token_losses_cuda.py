"""Cross-entropy's operators on stats of CUDA tensors: to merge them, and to losses."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm import env
from ringcomm.ops.loss_rows import (
    NUM_STATS,
    check_classes,
    check_shards,
    check_stats,
    checked_weight,
)
from ringcomm.ops.triton_kernels import kernels

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
