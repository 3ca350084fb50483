"""Cross-entropy with probabilities as targets, in blocks of rows."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ringcomm.ops.losses.options import LossOptions, first_order_only

# Bytes of the fp32 copies of the rows that are processed at a time.
BLOCK_BYTES = 16 << 20


def soft_cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    num_items: Tensor | None,
    options: LossOptions,
    vocab_size: int | None,
) -> Tensor:
    """cross_entropy with targets of the logits' shape; "mean" divides by the number of rows."""
    num_classes = logits.shape[-1]
    if target.shape != logits.shape:
        raise ValueError(
            f"probabilities must have the logits' shape {tuple(logits.shape)}, got"
            f" {tuple(target.shape)}"
        )
    if target.device != logits.device:
        raise ValueError(f"targets must be on {logits.device}, got {target.device}")
    if target.requires_grad:
        raise ValueError("probabilities as targets get no gradient and must not require grad")
    sizes = {vocab_size or num_classes, num_classes if weight is None else weight.numel()}
    if options.ignore_index >= 0 or sizes != {num_classes}:
        raise ValueError(
            "probabilities as targets do not support padding or an ignored class: for"
            f" {num_classes} classes got vocab_size={vocab_size}, class weights of shape"
            f" {None if weight is None else tuple(weight.shape)} and"
            f" ignore_index={options.ignore_index}"
        )
    rows = logits.reshape(math.prod(logits.shape[:-1]), num_classes)
    losses = _SoftCrossEntropy.apply(rows, target.reshape(rows.shape), weight, options)
    if options.reduction == "none":
        return losses.view(logits.shape[:-1])
    if options.reduction == "sum":
        return losses.sum()
    mean: Tensor = losses.sum() / (len(rows) if num_items is None else num_items)
    return mean.float()  # a num_items of one number is float64


def _blocks(
    rows: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Blocks of rows, their z and the target of each class, in fp32."""
    step = max(1, BLOCK_BYTES // (max(1, rows.shape[1]) * 4))
    smooth = options.label_smoothing
    for begin in range(0, len(rows), step):
        block = slice(begin, begin + step)
        z = rows[block].float() * options.logit_scale
        if options.softcap:
            z = torch.tanh(z / options.softcap) * options.softcap
        wanted = target[block].float() * (1 - smooth) + smooth / target.shape[1]
        yield block, z, wanted if weight is None else wanted * weight


class _SoftCrossEntropy(torch.autograd.Function):
    """The loss of each row."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions
    ) -> Tensor:
        losses = rows.new_empty(len(rows), dtype=torch.float32)
        for block, z, wanted in _blocks(rows, target, weight, options):
            # A class with probability 0 contributes 0, even if its z is -infinity.
            costs = torch.where(wanted == 0, 0.0, wanted * torch.log_softmax(z, -1))
            losses[block] = options.z_loss * torch.logsumexp(z, -1) ** 2 - costs.sum(-1)
        ctx.save_for_backward(rows, target, weight)
        ctx.options = options
        return losses

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Any, ...]:
        (rows, target, weight), options = ctx.saved_tensors, ctx.options
        grad = torch.empty_like(rows)
        for block, z, wanted in _blocks(rows, target, weight, options):
            total = wanted.sum(-1) + 2 * options.z_loss * torch.logsumexp(z, -1)
            # Not exp(z - lse): logits of 1e4 leave an lse that is 5e-4 off.
            slope = torch.softmax(z, -1) * total[:, None] - wanted
            if options.softcap:
                # sech^2. 1 - tanh^2 would cancel where logits are large.
                capped = rows[block].float() * (options.logit_scale / options.softcap)
                power = torch.exp(-2 * capped.abs())
                slope *= 4 * power / (1 + power) ** 2
            grad[block] = slope * (grad_losses[block, None] * options.logit_scale)
        return grad, None, None, None
