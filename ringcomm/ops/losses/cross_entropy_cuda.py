"""Cross-entropy's operators on CUDA tensors, launched as the Triton kernels of ringcomm.kernels.

They do what csrc/bindings/ops/cross_entropy_ops.cc does for the CPU. Nothing waits for the device,
but for RINGCOMM_CHECK_TARGETS.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringcomm import _C, env
from ringcomm.ops.losses.token_losses_cuda import (
    NUM_STATS,
    check_classes,
    checked_weight,
    cross_entropy_loss,
    denominator_of,
    losses_of,
    merge_softmax_stats,
    weight_sum_of,
)
from ringcomm.ops.triton_kernels import (
    VECTOR_BYTES,
    grad_plan,
    held_plan,
    kernels,
    launch,
    lead_of,
    mark_written,
    stats_plan,
    twice_plan,
)


class _Rows(NamedTuple):
    """What kernels take of a shard's logits and targets."""

    target: Tensor
    weight: Tensor | None  # of all classes
    num_tokens: int
    width: int  # padding included
    num_classes: int
    vector_elems: int  # of 16 bytes


def _rows_of(
    logits: Tensor, target: Tensor, weight: Tensor | None, vocab_start: int, vocab_size: int
) -> _Rows:
    num_tokens, width = logits.shape
    num_classes = width if vocab_size < 0 else min(max(vocab_size - vocab_start, 0), width)
    vector_elems = VECTOR_BYTES // logits.element_size()
    weight = checked_weight(weight, vocab_size)
    return _Rows(target.contiguous(), weight, num_tokens, width, num_classes, vector_elems)


# ---- softmax_stats


def softmax_stats(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    vocab_start: int,
    vocab_size: int,
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    wants_weighted: bool,
    wants_more: bool,
) -> Tensor:
    """The stats of a shard's logits, shape (tokens + 1, 6)."""
    rows = _rows_of(logits, target, weight, vocab_start, vocab_size)
    num_entries = rows.num_tokens + 1
    stats = logits.new_empty([num_entries, NUM_STATS], dtype=torch.float32)
    options = (ignore_index, logit_scale, softcap)
    wants = (wants_weighted, wants_more)
    _, _, _, way, _, digest = _C.softmax_shard_entry(
        vocab_start, vocab_size, *options, rows.num_classes, *wants
    )
    shard_weight = None
    if wants_weighted and rows.weight is not None:
        shard_weight = rows.weight[vocab_start:]
    plan = stats_plan(rows.width)
    launch(
        kernels().cross_entropy.stats_kernel,
        (num_entries,),
        *(logits, rows.target, shard_weight, stats),
        *(lead_of(logits), logits.stride(0), rows.num_tokens, rows.num_classes),
        *(vocab_start, way, digest, *options),
        VEC=rows.vector_elems,
        BLOCK=plan.block,
        HAS_SOFTCAP=softcap != 0,
        WANTS_WEIGHTED=wants_weighted,
        WANTS_MORE=wants_more,
        num_warps=plan.num_warps,
    )
    return stats


# ---- cross_entropy_grad


def _differentiate(
    to: Tensor,
    grad_loss: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    denominator: Tensor,
    vocab_start: int,
    vocab_size: int,
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
) -> None:
    """The gradient goes into `to`, which may be the logits."""
    rows = _rows_of(logits, target, weight, vocab_start, vocab_size)
    if not logits.numel():
        return
    shard_weight = None if rows.weight is None else rows.weight[vocab_start:]
    weight_sum = weight_sum_of(rows.weight, label_smoothing)
    plan = grad_plan(rows.width, logits.element_size())
    lead, to_lead, stride, to_stride = lead_of(logits), lead_of(to), logits.stride(0), to.stride(0)
    grad_loss = grad_loss.to(torch.float32).contiguous()
    with torch.cuda.device_of(logits):
        kernels().cross_entropy.grad_kernel[(rows.num_tokens,)](
            *(grad_loss, int(grad_loss.dim() != 0), logits, to, rows.target),
            *(rows.weight, shard_weight, weight_sum, stats, denominator.to(torch.float64)),
            *(lead, stride, to_lead, to_stride, rows.num_tokens, rows.width, rows.num_classes),
            *(vocab_start, vocab_size, ignore_index),
            *(logit_scale, softcap, label_smoothing, z_loss),
            VEC=rows.vector_elems,
            BLOCK=plan.block,
            HAS_SOFTCAP=softcap != 0,
            SMOOTHS=label_smoothing != 0,
            HAS_PADDING=rows.num_classes < rows.width,
            IS_ALIGNED=lead == to_lead and (stride - to_stride) % rows.vector_elems == 0,
            num_warps=plan.num_warps,
        )


def cross_entropy_grad(grad_loss: Tensor, logits: Tensor, *given: Any) -> Tensor:
    """The gradient of the logits, as a new tensor."""
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _differentiate(grad, grad_loss, logits, *given)
    return grad


def cross_entropy_grad_(grad_loss: Tensor, logits: Tensor, *given: Any) -> None:
    """The same in the place of the logits."""
    _differentiate(logits, grad_loss, logits, *given)
    mark_written(logits)


# ---- cross_entropy_and_grad_


def cross_entropy_and_grad_(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    num_items: Tensor | None,
    vocab_size: int,
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
    wants_more: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of all classes' logits, which become their gradient."""
    rows = _rows_of(logits, target, weight, 0, vocab_size)
    if env.checks_targets():
        check_classes(rows.target, vocab_size, ignore_index)
    denominator = denominator_of(rows.target, rows.weight, num_items, ignore_index, reduction)
    stats = logits.new_empty([rows.num_tokens + 1, NUM_STATS], dtype=torch.float32)
    held = held_plan(rows.width, (softcap != 0) + (weight is not None) + wants_more)
    plan = held or twice_plan(logits.element_size())
    terms = (label_smoothing, z_loss)
    launch(
        kernels().cross_entropy_in_place.stats_and_grad_kernel,
        (rows.num_tokens + 1,),
        *(logits, rows.target, rows.weight, weight_sum_of(rows.weight, label_smoothing)),
        *(stats, denominator, lead_of(logits), logits.stride(0)),
        *(rows.num_tokens, rows.width, rows.num_classes),
        *(ignore_index, logit_scale, softcap, *terms),
        VEC=rows.vector_elems,
        BLOCK=plan.block,
        HAS_SOFTCAP=softcap != 0,
        SMOOTHS=label_smoothing != 0,
        HAS_PADDING=rows.num_classes < rows.width,
        WANTS_MORE=wants_more,
        IS_HELD=held is not None,
        num_warps=plan.num_warps,
    )
    mark_written(logits)
    options = (vocab_size, ignore_index, *terms, reduction)
    return losses_of(stats, rows.target, rows.weight, denominator, *options)


# ---- scale_


def scale_(tensor: Tensor, factor: Tensor) -> None:
    """Multiplies rows in place by a number that the device reads; by 1 it touches nothing."""
    rows = tensor if tensor.dim() == 2 else tensor.view(1, -1)
    if rows.numel():
        plan = grad_plan(rows.shape[1], rows.element_size())
        launch(
            kernels().cross_entropy.scale_kernel,
            (rows.shape[0],),
            *(rows, factor.to(rows.device), lead_of(rows), rows.stride(0), rows.shape[1]),
            VEC=VECTOR_BYTES // rows.element_size(),
            BLOCK=plan.block,
            num_warps=plan.num_warps,
        )
    mark_written(tensor)


_CUDA = torch.library.Library("ringcomm", "IMPL", "CUDA")
for _launcher in (
    softmax_stats,
    merge_softmax_stats,
    cross_entropy_loss,
    cross_entropy_grad,
    cross_entropy_grad_,
    cross_entropy_and_grad_,
    scale_,
):
    _CUDA.impl(_launcher.__name__, _launcher)
