"""Cross-entropy of a linear layer's outputs, in blocks: the logits are never all materialized.

Hidden states are processed in blocks of tokens: the logits of a block, their part of the loss and
their gradients are computed and freed before the next block. If a block's gradients depend only on
its own logits, the forward pass computes them too, with 6 * tokens * hidden * classes operations.
Otherwise the backward pass recomputes the logits, with 8 instead of 6. This is so with a group,
whose stats are exchanged first; for a gradient per token; for float16, where a gradient divided by
the number of tokens would underflow; and for a fused update.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import linear
from typing_extensions import Unpack

from ringcomm.backend import resolve_group
from ringcomm.ops.collectives import summed
from ringcomm.ops.losses.cross_entropy import cross_entropy, loss_of_all_classes
from ringcomm.ops.losses.linear_blocks import LayerGradients, class_blocks, scaled, token_blocks
from ringcomm.ops.losses.options import (
    DTYPES,
    LossArguments,
    LossOptions,
    VocabShard,
    check_targets,
    checked_num_items,
    checked_options,
    checked_weight,
    find_vocab_shard,
    first_order_only,
    with_outputs,
)
from ringcomm.ops.triton_kernels import add_product

_ops: Any = torch.ops.ringcomm

# Called with a range of the weight's rows and their gradient in fp32.
FusedUpdate = Callable[[slice, Tensor], None]
_Differentiate = Callable[[Tensor, slice, VocabShard], None]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    class_weight: Tensor | None = None,
    num_items: float | Tensor | None = None,
    sequence_parallel: bool = False,
    fused_update: FusedUpdate | None = None,
    accumulate_dtype: torch.dtype | None = None,
    **options: Unpack[LossArguments],
) -> Any:
    """cross_entropy(hidden @ weight.T + bias, target), without the logits in memory.

    Gradients of hidden, weight and bias are rounded to their dtype once. Those of hidden are
    rounded again if the loss's own gradient is not 1, and when ranks add their parts. On CUDA the
    weight's gradient is rounded once per block of tokens (256 MiB of logits) unless
    `accumulate_dtype` is float32, and again if the loss's own gradient is not 1. Under
    torch.autocast hidden, weight and bias may have any of the dtypes and are cast first, as for a
    linear layer. Second derivatives are not supported.

    Args:
        hidden: shape (..., H), float32, float16 or bfloat16; with a group the same on all ranks,
            unless sequence_parallel, and requires_grad must be equal on all ranks. float64 as in
            cross_entropy, with all logits in memory and without fused_update.
        weight: shape (V, H), of hidden's dtype: the rows of this rank's V classes.
        target: shape (...), integers: classes of the whole vocabulary, of all tokens.
        bias: shape (V,), of hidden's dtype; None for none.
        group: as in cross_entropy.
        mesh: as in cross_entropy.
        vocab_start: as in cross_entropy.
        vocab_size: as in cross_entropy.
        class_weight: the `weight` of cross_entropy.
        num_items: as in cross_entropy.
        sequence_parallel: `hidden` is this rank's equal share of the first dimension, which is
            gathered; its gradient is reduce-scattered instead of all-reduced.
        fused_update: a function called in the backward pass with a slice of the weight's rows and
            their gradient in fp32, once for each row. It updates those rows in place. The weight's
            gradient is then not materialized: weight.grad stays None, even if the weight requires
            grad.
        accumulate_dtype: the dtype in which the weight's gradient is summed over blocks of tokens:
            float32, or hidden's dtype, which needs no memory besides the gradient itself. None (the
            default): float32 on a CPU, hidden's dtype on CUDA.
        options: as in cross_entropy.

    Returns and raises as cross_entropy. Collective if there is a group, in the forward pass and,
    for hidden's gradient, in the backward pass; blocks until the result is available.
    """
    checked = checked_options(**options)
    divisor = checked_num_items(num_items, checked.reduction)
    if mesh is not None:
        group = resolve_group(group, mesh)
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if hasattr(tensor, "placements"):
            raise TypeError(
                f"{name} is a DTensor: call the loss inside the forward of a model of fully_shard,"
                " and with tensor parallelism pass to_local() with group="
            )
    class_weight = checked_weight(hidden, class_weight, group, "hidden")
    hidden, weight, bias = _autocast(hidden, weight, bias)
    _check_layer(hidden, weight, bias)
    if accumulate_dtype not in (None, torch.float32, hidden.dtype):
        raise ValueError(
            f"accumulate_dtype must be float32 or hidden's dtype {hidden.dtype}, got"
            f" {accumulate_dtype}"
        )
    if fused_update is not None and accumulate_dtype not in (None, torch.float32):
        raise ValueError(
            f"fused_update needs gradients in float32, got accumulate_dtype={accumulate_dtype}"
        )
    if sequence_parallel and (group is None or hidden.dim() == 1):
        raise ValueError("sequence_parallel needs group=, whose ranks share the tokens")
    tokens = hidden.shape[:-1]
    if sequence_parallel:
        tokens = torch.Size([tokens[0] * resolve_group(group).size(), *tokens[1:]])
    check_targets(target, tokens, hidden.device)
    if hidden.dtype == torch.float64:
        if fused_update is not None:
            raise TypeError("fused_update does not support float64")
        given64: Any = {"vocab_start": vocab_start, "vocab_size": vocab_size, **options}
        logits = linear(hidden, weight, bias)
        return cross_entropy(logits, target, weight=class_weight, num_items=num_items, **given64)
    shard = find_vocab_shard(weight.shape[0], group, vocab_start, vocab_size, class_weight)
    if sequence_parallel:
        hidden = _ops.all_gather(hidden, shard.group_name)
    rows = hidden.reshape(target.numel(), hidden.shape[-1])
    with _without_autocast(hidden.device):
        summed_over = None if sequence_parallel else shard.group_name
        has_backward = torch.is_grad_enabled()
        how = (shard, checked, fused_update, accumulate_dtype, has_backward, summed_over)
        given = (target.reshape(-1).long(), class_weight, divisor)
        loss, by_token = _LinearCrossEntropy.apply(rows, weight, bias, *how, *given)
    return with_outputs(loss, by_token, target, checked)


# ---- arguments


def _autocast(hidden: Tensor, *layer: Tensor | None) -> tuple[Any, ...]:
    """Casts operands as torch.autocast does for a linear layer."""
    device = hidden.device.type
    if hidden.is_meta or not torch.is_autocast_enabled(device):
        return hidden, *layer
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        tensor.to(dtype) if tensor is not None and tensor.dtype in DTYPES else tensor
        for tensor in (hidden, *layer)
    )


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Disables autocast: products keep the dtype of their operands."""
    if device.type == "meta":  # which has none
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def _check_layer(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if hidden.dim() == 0 or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"hidden of shape (..., H) needs a weight of shape (V, H), got {tuple(hidden.shape)}"
            f" and {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"the bias must have shape {tuple(weight.shape[:1])}, got {tuple(bias.shape)}"
        )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != hidden.dtype:
            raise TypeError(
                f"hidden and the {name} must have the same dtype, got {hidden.dtype} and"
                f" {tensor.dtype}"
            )
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(
                f"hidden and the {name} must be on the same device, got {hidden.device} and"
                f" {tensor.device}"
            )


# ---- autograd


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss and per-token results from hidden states and a layer."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        shard: VocabShard,
        options: LossOptions,
        fused_update: FusedUpdate | None,
        sum_dtype: torch.dtype | None,
        has_backward: bool,
        summed_over: str | None,
        *given: Any,
    ) -> tuple[Tensor, Tensor]:
        """Also computes the gradients if possible; `given`: target, class_weight, num_items."""
        ctx.options, ctx.shard, ctx.fused_update = options, shard, fused_update
        ctx.sum_dtype, ctx.summed_over = sum_dtype, summed_over
        ctx.is_done = (
            has_backward  # the inputs do not show this under no_grad
            and any(ctx.needs_input_grad[:3])
            and shard.group_name is None
            and options.reduction != "none"
            and fused_update is None
            and rows.dtype != torch.float16
        )
        make = _with_gradients if ctx.is_done else _without_gradients
        loss, by_token = make(ctx, rows, weight, bias, *given)
        ctx.mark_non_differentiable(by_token)
        return loss, by_token

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Any, ...]:
        none = (None,) * 9
        if ctx.is_done:
            return *(scaled(grad, grad_loss, ctx.dtype) for grad in ctx.saved_tensors), *none
        # Only once: an update writes into the saved weight.
        rows, weight, bias, *known = ctx.saved_tensors
        differentiate = functools.partial(_differentiate, ctx, grad_loss, known)
        # backward() may run under autocast, which would round fp32 sums.
        with _without_autocast(rows.device):
            make = _grads_by_token if ctx.fused_update is None else _update_by_class
            grads = make(ctx, differentiate, rows, weight, bias)
        grads = tuple(None if grad is None else grad.to(rows.dtype) for grad in grads)
        if ctx.summed_over is not None and grads[0] is not None:
            # Each rank has the part of the gradient that is of its classes.
            grads = summed(grads[0], ctx.summed_over, True), *grads[1:]
        return *grads, *none


def _with_gradients(
    ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, *given: Any
) -> tuple[Tensor, Tensor]:
    target, class_weight, num_items = given
    options, shard = ctx.options, ctx.shard
    sums = LayerGradients(rows, weight, bias, ctx.needs_input_grad, ctx.sum_dtype)
    # Computes the divisor of the losses and checks all targets. Only the last entry of the stats is
    # used, which has the number of classes.
    stats = torch.zeros([target.numel() + 1, 6], dtype=torch.float32, device=target.device)
    stats[-1, ::2] = float(shard.size)
    terms = options.for_loss(shard)
    denominator = _ops.cross_entropy_loss(stats, target, class_weight, num_items, *terms)[2]
    more = (*options.for_grad(shard)[1:], "mean", options.wants_more)
    parts = []
    for block in token_blocks(rows, weight):
        logits = linear(rows[block], weight, bias)
        _, part, _ = _ops.cross_entropy_and_grad_(
            logits, target[block], class_weight, denominator, *more
        )
        parts.append(part)
        sums.add(logits, rows, weight, block)
        del logits  # before the next block's
    by_token = torch.cat(parts, 1) if parts else rows.new_empty([4, 0], dtype=torch.float32)
    ctx.save_for_backward(sums.rows, sums.weight, sums.bias)
    ctx.dtype = rows.dtype
    return (by_token[0].sum(dtype=torch.float64) / denominator).float(), by_token


def _without_gradients(
    ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, *given: Any
) -> tuple[Tensor, Tensor]:
    target, class_weight, num_items = given
    options, shard = ctx.options, ctx.shard
    stats = rows.new_empty([len(rows) + 1, 6], dtype=torch.float32)
    # Even without tokens, the stats have the entry that describes the shards.
    for block in token_blocks(rows, weight) or [slice(0, 0)]:
        logits = linear(rows[block], weight, bias)
        part = _ops.softmax_stats(logits, target[block], class_weight, *options.for_stats(shard))
        stats[:-1][block], stats[-1] = part[:-1], part[-1]
    stats, loss, by_token, denominator = loss_of_all_classes(
        stats, target, class_weight, num_items, shard, options
    )
    ctx.save_for_backward(rows, weight, bias, target, class_weight, stats, denominator)
    return loss, by_token


def _differentiate(
    ctx: Any, grad_loss: Tensor, known: list[Any], logits: Tensor, block: slice, shard: VocabShard
) -> None:
    """Overwrites the logits of a block of tokens with their gradient."""
    target, class_weight, stats, denominator = known
    upstream = grad_loss[block] if grad_loss.dim() else grad_loss
    part = torch.cat([stats[:-1][block], stats[-1:]])  # with the entry that describes the shards
    given = (target[block], class_weight, part, denominator, *ctx.options.for_grad(shard))
    _ops.cross_entropy_grad_(upstream, logits, *given)


def _grads_by_token(
    ctx: Any, differentiate: _Differentiate, rows: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor | None, ...]:
    sums = LayerGradients(rows, weight, bias, ctx.needs_input_grad, ctx.sum_dtype)
    for block in token_blocks(rows, weight):
        logits = linear(rows[block], weight, bias)
        differentiate(logits, block, ctx.shard)
        sums.add(logits, rows, weight, block)
        del logits  # before the next block's
    return sums.rows, sums.weight, sums.bias


def _update_by_class(
    ctx: Any, differentiate: _Differentiate, rows: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients of a block of classes at a time; those of the weight's rows go to the update."""
    grad_rows = torch.zeros_like(rows, dtype=torch.float32) if ctx.needs_input_grad[0] else None
    grad_bias = bias.new_empty(len(bias), dtype=torch.float32) if bias is not None else None
    for block in class_blocks(rows, weight):
        part = weight[block]
        logits = linear(rows, part, None if bias is None else bias[block])
        shard = ctx.shard._replace(start=ctx.shard.start + block.start)
        differentiate(logits, slice(0, len(rows)), shard)
        if grad_rows is not None:
            add_product(grad_rows, logits, part)
        if grad_bias is not None:
            grad_bias[block] = logits.sum(0, dtype=torch.float32)
        grad_part = rows.new_zeros([len(part), rows.shape[1]], dtype=torch.float32)
        ctx.fused_update(block, add_product(grad_part, logits.t(), rows))
        del logits
    return grad_rows, None, grad_bias
