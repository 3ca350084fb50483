"""The passes over a linear layer and its loss, in blocks.

Hidden states are taken a block of tokens at a time: their logits, the loss's part of them and the
gradients that follow are made and dropped before the next block's. Where a block's gradients depend
on its own logits alone, the forward pass makes them too, for 6 * tokens * hidden * classes
operations. Else (a group, whose stats are exchanged first; a gradient for each token; float16,
which has no room for a gradient over the number of tokens; a fused update) the backward pass makes
the logits again: 8 instead of 6.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ringcomm.ops.losses.cross_entropy import loss_of_all_classes
from ringcomm.ops.losses.options import LossOptions, VocabShard

_ops: Any = torch.ops.ringcomm

# What the logits of a block may take; of 16-bit types an fp32 copy stands beside them for a while.
# Less makes the products slower, more only larger.
BLOCK_BYTES = 64 << 20
MIN_BLOCK_TOKENS = 64
MIN_BLOCK_CLASSES = 256

# Called with a slice of the weight's rows and their gradient in fp32.
FusedUpdate = Callable[[slice, Tensor], None]


# ---- blocks


def _slices(total: int, step: int) -> list[slice]:
    return [slice(begin, min(begin + step, total)) for begin in range(0, total, step)]


def _token_blocks(rows: Tensor, weight: Tensor) -> list[slice]:
    row_bytes = max(1, weight.shape[0]) * rows.element_size()
    return _slices(len(rows), max(MIN_BLOCK_TOKENS, BLOCK_BYTES // row_bytes))


def _class_blocks(rows: Tensor, weight: Tensor) -> list[slice]:
    column_bytes = max(1, len(rows)) * rows.element_size()
    return _slices(len(weight), max(MIN_BLOCK_CLASSES, BLOCK_BYTES // column_bytes))


def _logits(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(rows, weight, bias)


def _part_of(stats: Tensor, block: slice) -> Tensor:
    """The stats of a block of tokens, with the entry that tells the shards."""
    return torch.cat([stats[:-1][block], stats[-1:]])


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """total += left @ right in fp32, in place; operands of 16 bits as they are where they can."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    return total.addmm_(left.float(), right.float())


class _Gradients:
    """Gradients of the layer, as blocks of tokens add to them; in fp32 where they are sums."""

    def __init__(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, wanted: Sequence[bool]
    ) -> None:
        self.rows = torch.empty_like(rows) if wanted[0] else None
        self.weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        has_bias = wanted[2] and bias is not None
        self.bias = weight.new_zeros(len(weight), dtype=torch.float32) if has_bias else None

    def add(self, grad_logits: Tensor, rows: Tensor, weight: Tensor, block: slice) -> None:
        """What the logits of a block of tokens give."""
        if self.rows is not None:
            torch.mm(grad_logits, weight, out=self.rows[block])
        if self.weight is not None:
            _add_product(self.weight, grad_logits.t(), rows[block])
        if self.bias is not None:
            self.bias += grad_logits.sum(0, dtype=torch.float32)

    def tensors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.rows, self.weight, self.bias


def _denominator(
    target: Tensor,
    class_weight: Tensor | None,
    num_items: Tensor | None,
    shard: VocabShard,
    options: LossOptions,
) -> Tensor:
    """What the losses of the tokens are divided by; all targets are checked on the way.

    Stats say nothing here but how many classes there are, which their last entry does.
    """
    stats = torch.zeros([target.numel() + 1, 6], device=target.device)
    stats[-1, ::2] = float(shard.size)
    denominator: Tensor = _ops.cross_entropy_loss(
        stats, target, class_weight, num_items, *options.for_loss(shard)
    )[2]
    return denominator


# ---- autograd


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """The products of the layer have the dtype that they are given."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


class LinearCrossEntropy(torch.autograd.Function):
    """Loss and what is known of the tokens, of hidden states and a layer."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        num_items: Tensor | None,
        shard: VocabShard,
        options: LossOptions,
        fused_update: FusedUpdate | None,
        has_backward: bool,
    ) -> tuple[Tensor, Tensor]:
        """The loss and what is known of each token; where it can, the gradients too."""
        ctx.options, ctx.shard, ctx.fused_update = options, shard, fused_update
        ctx.is_done = (
            has_backward  # which the inputs do not tell under no_grad
            and any(ctx.needs_input_grad[:3])
            and shard.group_name is None
            and options.reduction != "none"
            and fused_update is None
            and rows.dtype != torch.float16
        )
        make = _with_gradients if ctx.is_done else _without_gradients
        loss, by_token = make(ctx, rows, weight, bias, target, class_weight, num_items)
        ctx.mark_non_differentiable(by_token)
        return loss, by_token

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Any, ...]:
        """The gradients of hidden states, weight and bias."""
        none = (None,) * 7
        if ctx.is_done:
            return *(_scaled(grad, grad_loss, ctx.dtype) for grad in ctx.saved_tensors), *none
        rows, weight, bias, target, class_weight, stats, denominator = ctx.saved_tensors

        def differentiate(logits: Tensor, block: slice, shard: VocabShard) -> Tensor:
            """In place, of a block of tokens."""
            upstream = grad_loss[block] if grad_loss.dim() else grad_loss
            _ops.cross_entropy_grad_(
                upstream,
                logits,
                target[block],
                class_weight,
                _part_of(stats, block),
                denominator,
                *ctx.options.for_grad(shard),
            )
            return logits

        # backward() may be called where autocast is on, which would round what is summed in fp32.
        with without_autocast(rows.device):
            grads: tuple[Tensor | None, ...]
            if ctx.fused_update is not None:
                grads = _update_by_class(ctx, rows, weight, bias, differentiate)
            else:
                sums = _Gradients(rows, weight, bias, ctx.needs_input_grad)
                for block in _token_blocks(rows, weight):
                    logits = _logits(rows[block], weight, bias)
                    sums.add(differentiate(logits, block, ctx.shard), rows, weight, block)
                    del logits  # before the next block's
                grads = sums.tensors()
        rounded = [None if grad is None else grad.to(rows.dtype) for grad in grads]
        return (*rounded, *none)


def _scaled(grad: Tensor | None, factor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A product, rounded; of a large fp32 sum without a second one beside it."""
    if grad is None or grad.dtype == dtype:
        return None if grad is None else grad * factor
    result = torch.empty_like(grad, dtype=dtype)
    for block in _slices(len(grad), max(1, BLOCK_BYTES * len(grad) // max(1, grad.nbytes))):
        result[block] = grad[block] * factor
    return result


def _with_gradients(
    ctx: Any,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    num_items: Tensor | None,
) -> tuple[Tensor, Tensor]:
    options, shard = ctx.options, ctx.shard
    sums = _Gradients(rows, weight, bias, ctx.needs_input_grad)
    denominator = _denominator(target, class_weight, num_items, shard, options)
    parts = []
    for block in _token_blocks(rows, weight):
        logits = _logits(rows[block], weight, bias)
        _, part, _ = _ops.cross_entropy_and_grad_(
            logits,
            target[block],
            class_weight,
            denominator,
            *options.for_grad(shard)[1:],
            "mean",
            options.wants_more,
        )
        parts.append(part)
        sums.add(logits, rows, weight, block)
        del logits  # before the next block's
    by_token = torch.cat(parts, 1) if parts else rows.new_empty([4, 0], dtype=torch.float32)
    ctx.save_for_backward(*sums.tensors())
    ctx.dtype = rows.dtype
    return (by_token[0].sum(dtype=torch.float64) / denominator).float(), by_token


def _without_gradients(
    ctx: Any,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    num_items: Tensor | None,
) -> tuple[Tensor, Tensor]:
    options, shard = ctx.options, ctx.shard
    stats = rows.new_empty([len(rows) + 1, 6], dtype=torch.float32)
    # Without tokens there still is the entry that tells the shards.
    for block in _token_blocks(rows, weight) or [slice(0, 0)]:
        logits = _logits(rows[block], weight, bias)
        part = _ops.softmax_stats(logits, target[block], class_weight, *options.for_stats(shard))
        stats[:-1][block], stats[-1] = part[:-1], part[-1]
    stats, loss, by_token, denominator = loss_of_all_classes(
        stats, target, class_weight, num_items, shard, options
    )
    ctx.save_for_backward(rows, weight, bias, target, class_weight, stats, denominator)
    return loss, by_token


def _update_by_class(
    ctx: Any,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    differentiate: Callable[[Tensor, slice, VocabShard], Tensor],
) -> tuple[Tensor | None, None, Tensor | None]:
    """Gradients where those of the weight's rows go to the update, a block of classes at a time."""
    grad_rows = torch.zeros_like(rows, dtype=torch.float32) if ctx.needs_input_grad[0] else None
    grad_bias = bias.new_empty(len(bias), dtype=torch.float32) if bias is not None else None
    for block in _class_blocks(rows, weight):
        part = weight[block]
        logits = _logits(rows, part, None if bias is None else bias[block])
        shard = ctx.shard._replace(start=ctx.shard.start + block.start)
        grad_logits = differentiate(logits, slice(0, len(rows)), shard)
        del logits
        if grad_rows is not None:
            _add_product(grad_rows, grad_logits, part)
        if grad_bias is not None:
            grad_bias[block] = grad_logits.sum(0, dtype=torch.float32)
        grad_part = rows.new_zeros([len(part), rows.shape[1]], dtype=torch.float32)
        ctx.fused_update(block, _add_product(grad_part, grad_logits.t(), rows))
        del grad_logits
    return grad_rows, None, grad_bias
