"""Cross-entropy's operators on stats of CUDA tensors: to merge them, and to losses.

ringcomm.ops.cross_entropy has checked their arguments, but for the number of class weights.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm import env
from ringcomm.ops.triton_kernels import COUNT_BLOCK, TOKEN_BLOCK, kernels, launch

NUM_STATS = 6
# In place of the number of classes, where shards do not fit together; as kernels/token_losses.py.
DISAGREEMENT, GAP = -1, -2


def checked_weight(weight: Tensor | None, vocab_size: int) -> Tensor | None:
    """Class weights, contiguous; ValueError where they are of another number of classes."""
    if weight is None:
        return None
    if weight.shape[0] != vocab_size:
        raise ValueError(
            f"ringcomm: one weight for each of the {vocab_size} classes, got shape"
            f" {tuple(weight.shape)}"
        )
    return weight.contiguous()


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


def _checked_shards(stats: Tensor, vocab_size: int) -> int:
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


# ---- merge_softmax_stats


def merge_gathered(gathered: Tensor, num_ranks: int) -> Tensor:
    """The stats of all ranks, one behind the other, as those of whole rows."""
    num_entries = gathered.shape[0] // num_ranks
    merged = gathered.new_empty([num_entries, NUM_STATS])
    grid = (-(-num_entries // TOKEN_BLOCK),)
    constants = {"NUM_RANKS": num_ranks, "BLOCK": TOKEN_BLOCK, "num_warps": 4}
    launch(kernels().token_losses.merge_kernel, grid, gathered, merged, num_entries, **constants)
    return merged


def merge_softmax_stats(stats: Tensor, group_name: str) -> Tensor:
    """The ranks' stats merged in rank order, after an all_gather by the group's own backend."""
    resolve: Any = dist.distributed_c10d._resolve_process_group
    group = resolve(group_name)
    gathered = stats.new_empty([group.size() * stats.shape[0], NUM_STATS])
    dist.all_gather_into_tensor(gathered, stats, group=group)
    return merge_gathered(gathered, group.size())


# ---- cross_entropy_loss


def denominator_of(
    target: Tensor,
    weight: Tensor | None,
    num_items: Tensor | None,
    ignore_index: int,
    reduction: str,
) -> Tensor:
    """What the losses' sum is divided by: float64, on the target's device."""
    if reduction != "mean":
        return target.new_ones([], dtype=torch.float64)
    if num_items is not None:
        if num_items.device == target.device:
            return num_items.detach().reshape([]).to(torch.float64, copy=True)
        # A number of the host's. To copy it over would wait for the device.
        return target.new_full([], num_items.item(), dtype=torch.float64)
    denominator = target.new_empty([], dtype=torch.float64)
    num_weights = 0 if weight is None else weight.numel()
    launch(
        kernels().token_losses.count_kernel,
        (1,),
        *(target, weight, denominator, target.numel(), num_weights, ignore_index),
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
    if num_tokens:
        weight_sum = weight_sum_of(weight, label_smoothing)
        launch(
            kernels().token_losses.loss_kernel,
            (-(-num_tokens // TOKEN_BLOCK),),
            *(stats, target, weight, weight_sum, by_token, num_tokens),
            *(vocab_size, ignore_index, label_smoothing, z_loss),
            SMOOTHS=label_smoothing != 0,
            BLOCK=TOKEN_BLOCK,
            num_warps=4,
        )
    if reduction == "none":
        return by_token[0].clone(), by_token, denominator
    loss = stats.new_empty([])
    kernel = kernels().token_losses.reduce_kernel
    launch(kernel, (1,), by_token, denominator, loss, num_tokens, BLOCK=COUNT_BLOCK, num_warps=8)
    return loss, by_token, denominator


def cross_entropy_loss(
    stats: Tensor,
    target: Tensor,
    weight: Tensor | None,
    num_items: Tensor | None,
    vocab_size: int,
    ignore_index: int,
    *terms: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, what is known of each token, and the denominator."""
    target = target.contiguous()
    if weight is not None and vocab_size < 0:
        vocab_size = weight.numel()
    weight = checked_weight(weight, vocab_size)
    if env.checks_targets():
        check_classes(target, _checked_shards(stats, vocab_size), ignore_index)
    denominator = denominator_of(target, weight, num_items, ignore_index, terms[-1])
    return losses_of(stats, target, weight, denominator, vocab_size, ignore_index, *terms)
