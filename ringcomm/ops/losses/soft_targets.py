"""Cross-entropy with probabilities as targets, in blocks of rows."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Rows whose fp32 copies take about this much are worked on at a time.
BLOCK_BYTES = 16 << 20


def soft_cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    num_items: Tensor | None,
    options: Any,
    vocab_size: int | None,
) -> Tensor:
    """As cross_entropy with targets of the logits' shape; "mean" divides by the number of rows.

    Raises:
        ValueError: the target requires grad, a shape or a device is wrong, or there is padding or
            an ignore_index.
    """
    if target.shape != logits.shape:
        raise ValueError(
            f"probabilities have the logits' shape {tuple(logits.shape)}, got {tuple(target.shape)}"
        )
    if target.device != logits.device:
        raise ValueError(f"targets are wanted on {logits.device}, and are on {target.device}")
    if options.ignore_index >= 0:
        raise ValueError(
            f"probabilities know no ignored class, got ignore_index={options.ignore_index}"
        )
    if weight is not None and weight.shape != logits.shape[-1:]:
        raise ValueError(
            f"one weight for each of the {logits.shape[-1]} classes, got shape"
            f" {tuple(weight.shape)}"
        )
    if target.requires_grad:
        raise ValueError("probabilities as targets get no gradient, and these require grad")
    if vocab_size not in (None, logits.shape[-1]):
        raise ValueError("probabilities as targets know no padding")
    rows = logits.reshape(math.prod(logits.shape[:-1]), logits.shape[-1])
    losses = _SoftCrossEntropy.apply(rows, target.reshape(rows.shape), weight, options)
    if options.reduction == "none":
        return losses.view(logits.shape[:-1])
    if options.reduction == "sum":
        return losses.sum()
    mean: Tensor = losses.sum() / (len(rows) if num_items is None else num_items)
    return mean.float()  # a num_items of one number is float64


def _blocks(rows: Tensor) -> range:
    row_bytes = max(1, rows.shape[1]) * 4
    return range(0, len(rows), max(1, BLOCK_BYTES // row_bytes))


def _capped(logits: Tensor, options: Any) -> Tensor:
    z = logits.float() * options.logit_scale
    return torch.tanh(z / options.softcap) * options.softcap if options.softcap else z


def _probabilities(target: Tensor, weight: Tensor | None, options: Any) -> Tensor:
    smooth = options.label_smoothing
    wanted = target.float() * (1 - smooth) + smooth / target.shape[1]
    return wanted if weight is None else wanted * weight


class _SoftCrossEntropy(torch.autograd.Function):
    """The loss of each row."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, target: Tensor, weight: Tensor | None, options: Any
    ) -> Tensor:
        losses = rows.new_empty(len(rows), dtype=torch.float32)
        blocks = _blocks(rows)
        for begin in blocks:
            part = slice(begin, begin + blocks.step)
            z = _capped(rows[part], options)
            log_probs = torch.log_softmax(z, -1)
            lse = torch.logsumexp(z, -1)
            wanted = _probabilities(target[part], weight, options)
            # A class that nobody wants costs nothing, however unlikely.
            costs = torch.where(wanted == 0, 0.0, wanted * log_probs)
            losses[part] = options.z_loss * lse**2 - costs.sum(-1)
        ctx.save_for_backward(rows, target, weight)
        ctx.options = options
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Any, ...]:
        rows, target, weight = ctx.saved_tensors
        options = ctx.options
        grad = torch.empty_like(rows)
        blocks = _blocks(rows)
        for begin in blocks:
            part = slice(begin, begin + blocks.step)
            z = _capped(rows[part], options)
            wanted = _probabilities(target[part], weight, options)
            total = wanted.sum(-1) + 2 * options.z_loss * torch.logsumexp(z, -1)
            # Not exp(z - lse): logits of 1e4 leave an lse that is 5e-4 off.
            slope = torch.softmax(z, -1) * total[:, None] - wanted
            if options.softcap:
                # sech^2. 1 - tanh^2 would cancel where logits are large.
                capped = rows[part].float() * (options.logit_scale / options.softcap)
                power = torch.exp(-2 * capped.abs())
                slope *= 4 * power / (1 + power) ** 2
            grad[part] = slope * (grad_losses[part, None] * options.logit_scale)
        return grad, None, None, None
