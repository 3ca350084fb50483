"""Cross-entropy's operators on CUDA tensors, launched as the Triton kernels of ringcomm.kernels.

They do what csrc/bindings/ops/cross_entropy_ops.cc does for the CPU. Nothing waits for the device,
but for RINGCOMM_CHECK_TARGETS. Triton is imported by the first launch.
"""

from typing import Any

import torch
from torch import Tensor

from ringcomm import _C, env
from ringcomm.ops.losses.options import LOGIT_DTYPES
from ringcomm.ops.losses.token_losses_cuda import (
    NUM_STATS,
    Rows,
    check_classes,
    check_stats,
    cross_entropy_loss,
    denominator_of,
    lead_of,
    losses_of,
    merge_softmax_stats,
    rows_of,
    weight_sum_of,
)
from ringcomm.ops.triton_kernels import (
    VECTOR_BYTES,
    grad_plan,
    held_plan,
    kernels,
    mark_written,
    stats_plan,
    twice_plan,
)

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
    rows = rows_of(logits, target, weight, vocab_start, vocab_size)
    stats = logits.new_empty([rows.num_tokens + 1, NUM_STATS], dtype=torch.float32)
    _, _, _, way, _, digest = _C.softmax_shard_entry(
        vocab_start,
        vocab_size,
        ignore_index,
        logit_scale,
        softcap,
        rows.num_classes,
        wants_weighted,
        wants_more,
    )
    plan = stats_plan(rows.width)
    with torch.cuda.device_of(logits):
        kernels().rows.stats_kernel[(rows.num_tokens + 1,)](
            logits,
            rows.target,
            rows.shard_weight if wants_weighted else None,
            stats,
            lead_of(logits),
            logits.stride(0),
            rows.num_tokens,
            rows.num_classes,
            vocab_start,
            way,
            digest,
            ignore_index,
            logit_scale,
            softcap,
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
    grad_loss: Tensor,
    rows: Rows,
    stats: Tensor,
    denominator: Tensor,
    to: Tensor,
    vocab_start: int,
    vocab_size: int,
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
) -> None:
    """The gradient goes into `to`, which may be the logits."""
    logits = rows.logits
    check_stats(stats, rows.num_tokens)
    if grad_loss.dim() != 0 and grad_loss.numel() != rows.num_tokens:
        raise ValueError(
            "ringcomm: the loss's gradient is one number, or one for each of"
            f" {rows.num_tokens} tokens; got shape {tuple(grad_loss.shape)}"
        )
    if not logits.numel():
        return
    vector, plan = rows.vector_elems, grad_plan(rows.width, logits.element_size())
    lead, to_lead = lead_of(logits), lead_of(to)
    is_aligned = lead == to_lead and (logits.stride(0) - to.stride(0)) % vector == 0
    with torch.cuda.device_of(logits):
        kernels().rows.grad_kernel[(rows.num_tokens,)](
            grad_loss.to(torch.float32).contiguous(),
            int(grad_loss.dim() != 0),
            logits,
            to,
            rows.target,
            rows.weight,
            rows.shard_weight,
            weight_sum_of(rows.weight, label_smoothing),
            stats,
            denominator.to(torch.float64),
            lead,
            logits.stride(0),
            to_lead,
            to.stride(0),
            rows.num_tokens,
            rows.width,
            rows.num_classes,
            vocab_start,
            vocab_size,
            ignore_index,
            logit_scale,
            softcap,
            label_smoothing,
            z_loss,
            VEC=vector,
            BLOCK=plan.block,
            HAS_SOFTCAP=softcap != 0,
            SMOOTHS=label_smoothing != 0,
            HAS_PADDING=rows.num_classes < rows.width,
            IS_ALIGNED=is_aligned,
            num_warps=plan.num_warps,
        )


def cross_entropy_grad(
    grad_loss: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    denominator: Tensor,
    vocab_start: int,
    vocab_size: int,
    *options: Any,
) -> Tensor:
    """The gradient of the logits, as a new tensor."""
    rows = rows_of(logits, target, weight, vocab_start, vocab_size)
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _differentiate(grad_loss, rows, stats, denominator, grad, vocab_start, vocab_size, *options)
    return grad


def cross_entropy_grad_(
    grad_loss: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    denominator: Tensor,
    vocab_start: int,
    vocab_size: int,
    *options: Any,
) -> None:
    """The same in the place of the logits."""
    rows = rows_of(logits, target, weight, vocab_start, vocab_size)
    _differentiate(grad_loss, rows, stats, denominator, logits, vocab_start, vocab_size, *options)
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
    rows = rows_of(logits, target, weight, 0, vocab_size)
    if rows.num_classes != vocab_size:
        raise ValueError(
            f"ringcomm: the logits have {rows.width} columns for a vocabulary of {vocab_size}"
        )
    if env.checks_targets():
        check_classes(rows.target, vocab_size, ignore_index)
    denominator = denominator_of(rows.target, rows.weight, num_items, ignore_index, reduction)
    stats = logits.new_empty([rows.num_tokens + 1, NUM_STATS], dtype=torch.float32)
    held = held_plan(rows.width, (softcap != 0) + (weight is not None) + wants_more)
    plan = held or twice_plan(logits.element_size())
    with torch.cuda.device_of(logits):
        kernels().in_place.stats_and_grad_kernel[(rows.num_tokens + 1,)](
            logits,
            rows.target,
            rows.weight,
            weight_sum_of(rows.weight, label_smoothing),
            stats,
            denominator,
            lead_of(logits),
            logits.stride(0),
            rows.num_tokens,
            rows.width,
            rows.num_classes,
            ignore_index,
            logit_scale,
            softcap,
            label_smoothing,
            z_loss,
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
    return losses_of(
        stats,
        rows.target,
        rows.weight,
        denominator,
        vocab_size,
        ignore_index,
        label_smoothing,
        z_loss,
        reduction,
    )


# ---- scale_


def scale_(tensor: Tensor, factor: Tensor) -> None:
    """Multiplies rows in place by a number that the device reads; by 1 it touches nothing."""
    rows = tensor if tensor.dim() == 2 else tensor.view(1, -1)
    if rows.dtype not in LOGIT_DTYPES or (rows.stride(1) != 1 and rows.shape[1] > 1):
        raise ValueError(
            f"ringcomm: scale_ wants rows side by side of float32, float16 or bfloat16, got"
            f" {tensor.dtype} with strides {tensor.stride()}"
        )
    if rows.numel():
        plan = grad_plan(rows.shape[1], rows.element_size())
        with torch.cuda.device_of(rows):
            kernels().rows.scale_kernel[(rows.shape[0],)](
                rows,
                factor.to(rows.device),
                lead_of(rows),
                rows.stride(0),
                rows.shape[1],
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
