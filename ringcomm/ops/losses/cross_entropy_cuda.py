"""Cross-entropy's operators on CUDA tensors, launched as the Triton kernels of ringcomm.kernels.

They match kernels/losses/torch_cross_entropy.cc, which is for the CPU. They do not wait for the
device, except with RINGCOMM_CHECK_TARGETS. ringcomm.ops.cross_entropy has checked their arguments.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm import _kernels
from ringcomm._extension import HAS_CUDA
from ringcomm.ops import triton_kernels as plans
from ringcomm.ops.losses.options import has_rows
from ringcomm.ops.losses.soft_targets import check_classes
from ringcomm.ops.triton_kernels import kernels, launch, lead_of, on_cuda
from ringcomm.options import checks_targets
from ringcomm.torch_names import group_named

_NUM_STATS = 6
# Replaces the number of classes if shards do not fit together; as kernels/losses/token_losses.py.
_DISAGREEMENT, _GAP = -1, -2

# ---- arguments


def _checked_shards(stats: Tensor, vocab_size: int) -> int:
    """The number of classes of all shards; raises ValueError if invalid. Waits for the device."""
    size = int(stats[-1, 2])
    if size == _DISAGREEMENT:
        raise ValueError(
            "ringcomm: the ranks' calls differ in vocab_size, ignore_index, logit_scale, softcap,"
            " label_smoothing or outputs"
        )
    if size == _GAP:
        raise ValueError(
            "ringcomm: the ranks' shards of the vocabulary must be adjacent and begin at class"
            " 0; check vocab_start on every rank"
        )
    if size <= 0 or vocab_size not in (-1, size):
        wanted = vocab_size if vocab_size >= 0 else "1 or more"
        raise ValueError(
            f"ringcomm: the shards have {size} classes in all, but the vocabulary has {wanted}"
        )
    return size


def _rows_of(
    logits: Tensor, target: Tensor, weight: Tensor | None, vocab_start: int, vocab_size: int
) -> tuple[Tensor, Tensor | None, int, int, int]:
    """Targets, weights of all classes, tokens, columns, and how many of these are classes."""
    num_tokens, width = logits.shape
    num_classes = width if vocab_size < 0 else min(max(vocab_size - vocab_start, 0), width)
    weight = None if weight is None else weight.contiguous()
    return target.contiguous(), weight, num_tokens, width, num_classes


# ---- softmax_stats and merge_softmax_stats


@on_cuda
def softmax_stats(logits: Tensor, target: Tensor, weight: Tensor | None, *given: Any) -> Tensor:
    """The stats of a shard's logits, shape (tokens + 1, 6)."""
    vocab_start, vocab_size, ignore_index, scale, softcap, wants_weighted, wants_more = given
    rows = _rows_of(logits, target, weight, vocab_start, vocab_size)
    target, weight, num_tokens, width, num_classes = rows
    num_entries = num_tokens + 1
    stats = logits.new_empty([num_entries, _NUM_STATS], dtype=torch.float32)
    options = (ignore_index, scale, softcap)
    _, _, _, way, _, digest = _kernels.softmax_shard_entry(
        vocab_start, vocab_size, *options, num_classes, wants_weighted, wants_more
    )
    shard_weight = weight[vocab_start:] if wants_weighted and weight is not None else None
    launch(
        kernels().cross_entropy.stats_kernel,
        (num_entries,),
        *(logits, target, shard_weight, stats),
        *(lead_of(logits), logits.stride(0), num_tokens, num_classes),
        *(vocab_start, way, digest, ignore_index, scale, softcap or None),
        WANTS_WEIGHTED=wants_weighted,
        WANTS_MORE=wants_more,
        **plans.stats_plan(width).constants(logits),
    )
    return stats


def merge_gathered(gathered: Tensor, num_ranks: int) -> Tensor:
    """Merges the concatenated stats of all ranks into those of full rows."""
    num_entries = gathered.shape[0] // num_ranks
    merged = gathered.new_empty([num_entries, _NUM_STATS])
    given = (gathered, merged, num_entries)
    grid = (-(-num_entries // plans.TOKENS["BLOCK"]),)
    launch(kernels().token_losses.merge_kernel, grid, *given, NUM_RANKS=num_ranks, **plans.TOKENS)
    return merged


@on_cuda
def merge_softmax_stats(stats: Tensor, group_name: str) -> Tensor:
    """The ranks' stats merged in rank order, after an all_gather by the group's own backend."""
    group = group_named(group_name)
    gathered = stats.new_empty([group.size() * stats.shape[0], _NUM_STATS])
    dist.all_gather_into_tensor(gathered, stats, group=group)
    return merge_gathered(gathered, group.size())


# ---- cross_entropy_loss


def _denominator_of(
    target: Tensor, num_items: Tensor | None, reduction: str
) -> tuple[Tensor, Tensor | None]:
    """The divisor of the sum of losses, in float64, and the targets whose weights it has to get."""
    if reduction != "mean":
        return target.new_ones([], dtype=torch.float64), None
    if num_items is None:
        return target.new_empty([], dtype=torch.float64), target
    if num_items.device == target.device:
        return num_items.detach().reshape([]).to(torch.float64, copy=True), None
    # A host number. Copying it would wait for the device.
    return target.new_full([], num_items.item(), dtype=torch.float64), None


def _weight_sum_of(weight: Tensor | None, label_smoothing: float) -> Tensor | None:
    """The sum of all classes' weights, on the device, where smoothing needs it."""
    if weight is None or label_smoothing == 0:
        return None
    return weight.sum(dtype=torch.float64)


def _losses_of(
    stats: Tensor, target: Tensor, weight: Tensor | None, *given: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The results of cross_entropy_loss, from merged stats; `counted` as of _denominator_of."""
    denominator, counted, *options, reduction = given
    _, _, label_smoothing, _ = options
    num_tokens = target.numel()
    by_token = stats.new_empty([4, num_tokens])
    if num_tokens:
        weight_sum = _weight_sum_of(weight, label_smoothing)
        launch(
            kernels().token_losses.loss_kernel,
            (-(-num_tokens // plans.TOKENS["BLOCK"]),),
            *(stats, target, weight, weight_sum, by_token, num_tokens),
            *options,
            SMOOTHS=label_smoothing != 0,
            **plans.TOKENS,
        )
    if reduction == "none":
        return by_token[0].clone(), by_token, denominator
    loss = stats.new_empty([])
    given = (denominator, loss, by_token, counted, weight, num_tokens, *options[:2])
    launch(kernels().token_losses.reduce_kernel, (1,), *given, **plans.ONE_PROGRAM)
    return loss, by_token, denominator


@on_cuda
def cross_entropy_loss(
    stats: Tensor,
    target: Tensor,
    weight: Tensor | None,
    num_items: Tensor | None,
    vocab_size: int,
    ignore_index: int,
    *terms: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the loss, the per-token results, and the denominator."""
    target = target.contiguous()
    if weight is not None and vocab_size < 0:
        vocab_size = weight.numel()
    weight = None if weight is None else weight.contiguous()
    if checks_targets():
        check_classes(target, _checked_shards(stats, vocab_size), ignore_index)
    denominator = _denominator_of(target, num_items, terms[-1])
    return _losses_of(stats, target, weight, *denominator, vocab_size, ignore_index, *terms)


# ---- cross_entropy_grad


def _differentiate(to: Tensor, grad_loss: Tensor, logits: Tensor, *given: Any) -> None:
    """Writes the gradient into `to`, which may be the logits."""
    target, weight, stats, denominator, *options = given
    vocab_start, vocab_size, ignore_index, scale, softcap, label_smoothing, z_loss = options
    if not logits.numel():
        return
    rows = _rows_of(logits, target, weight, vocab_start, vocab_size)
    target, weight, num_tokens, width, num_classes = rows
    shard_weight = None if weight is None else weight[vocab_start:]
    weight_sum = _weight_sum_of(weight, label_smoothing)
    lead, to_lead, stride, to_stride = lead_of(logits), lead_of(to), logits.stride(0), to.stride(0)
    grad_loss = grad_loss.to(torch.float32).contiguous()
    element_bytes = logits.element_size()
    launch(
        kernels().cross_entropy.grad_kernel,
        (num_tokens,),
        *(grad_loss, int(grad_loss.dim() != 0), logits, to, target),
        *(weight, shard_weight, weight_sum, stats, denominator.to(torch.float64)),
        *(lead, stride, to_lead, to_stride, num_tokens, width, num_classes),
        *(vocab_start, vocab_size, ignore_index, scale, softcap or None, label_smoothing, z_loss),
        SMOOTHS=label_smoothing != 0,
        HAS_PADDING=num_classes < width,
        IS_ALIGNED=lead == to_lead
        and (stride - to_stride) * element_bytes % plans.VECTOR_BYTES == 0,
        **plans.grad_plan(width, element_bytes).constants(logits),
    )


@on_cuda
def cross_entropy_grad(grad_loss: Tensor, logits: Tensor, *given: Any) -> Tensor:
    """The gradient of the logits, as a new tensor."""
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _differentiate(grad, grad_loss, logits, *given)
    return grad


@on_cuda
def cross_entropy_grad_(grad_loss: Tensor, logits: Tensor, *given: Any) -> None:
    """Overwrites the logits with their gradient."""
    _differentiate(logits, grad_loss, logits, *given)
    _kernels.mark_written(logits)


# ---- cross_entropy_and_grad_ and scale_


@on_cuda
def cross_entropy_and_grad_(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    num_items: Tensor | None,
    vocab_size: int,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of unsharded logits; overwrites them with their gradient.

    Uses the kernel for clusters of sm_90 if it supports the call, else Triton's.
    """
    ignore_index, logit_scale, softcap, label_smoothing, z_loss, reduction, wants_more = options
    rows = _rows_of(logits, target, weight, 0, vocab_size)
    target, weight, num_tokens, width, num_classes = rows
    if checks_targets():
        check_classes(target, vocab_size, ignore_index)
    given = (target, weight, num_items, num_classes)
    if HAS_CUDA:
        from ringcomm import _cuda

        if (results := _cuda.cross_entropy_by_clusters(logits, *given, *options)) is not None:
            return results
    denominator, counted = _denominator_of(target, num_items, reduction)
    if counted is not None:
        tokens = (counted, weight, num_tokens, vocab_size, ignore_index)
        kernel = kernels().token_losses.reduce_kernel
        launch(kernel, (1,), denominator, None, None, *tokens, **plans.ONE_PROGRAM)
    stats = logits.new_empty([num_tokens + 1, _NUM_STATS], dtype=torch.float32)
    held = plans.held_plan(width, (softcap != 0) + (weight is not None) + wants_more)
    plan = held or plans.twice_plan(logits.element_size())
    launch(
        kernels().cross_entropy.stats_and_grad_kernel,
        (num_tokens + 1,),
        *(logits, target, weight, _weight_sum_of(weight, label_smoothing)),
        *(stats, denominator, lead_of(logits), logits.stride(0)),
        *(num_tokens, width, num_classes),
        *(ignore_index, logit_scale, softcap or None, label_smoothing, z_loss),
        SMOOTHS=label_smoothing != 0,
        HAS_PADDING=num_classes < width,
        WANTS_MORE=wants_more,
        IS_HELD=held is not None,
        **plan.constants(logits),
    )
    _kernels.mark_written(logits)
    terms = (vocab_size, ignore_index, label_smoothing, z_loss, reduction)
    return _losses_of(stats, target, weight, denominator, None, *terms)


@on_cuda
def scale_(tensor: Tensor, factor: Tensor) -> None:
    """Multiplies in place by a number read on the device; the factor 1 writes nothing.

    A matrix may have contiguous rows or, as the gradient of a transposed tensor, columns.
    """
    rows = tensor if tensor.dim() == 2 else tensor.view(1, -1)
    if not has_rows(rows):
        rows = rows.t()
    if not has_rows(rows):
        raise ValueError(f"scale_ needs rows or columns without gaps, got {tensor.stride()}")
    if rows.numel():
        launch(
            kernels().cross_entropy.scale_kernel,
            (rows.shape[0],),
            *(rows, factor.to(rows.device), lead_of(rows), rows.stride(0), rows.shape[1]),
            **plans.grad_plan(rows.shape[1], rows.element_size()).constants(rows),
        )
    _kernels.mark_written(tensor)
