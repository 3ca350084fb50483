"""Cross-entropy with probabilities as targets, in blocks of rows; and of float64 logits."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ringcomm.ops.losses.options import Given, LossOptions, first_order_only
from ringcomm.options import checks_targets
from ringcomm.torch_names import FakeTensor

# Bytes of the copies of the rows in fp32 (fp64 for fp64) that are processed at a time.
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
    if logits.dim() > 2 and _has_classes_second(target):
        raise ValueError(
            "probabilities sum to one over dimension 1, but classes must be the last dimension: use"
            " logits.movedim(1, -1) and target.movedim(1, -1)"
        )
    if options.ignore_index >= 0 or vocab_size not in (None, num_classes):
        raise ValueError(
            "probabilities as targets do not support padding or an ignored class: for"
            f" {num_classes} classes got vocab_size={vocab_size} and"
            f" ignore_index={options.ignore_index}"
        )
    rows = logits.reshape(math.prod(logits.shape[:-1]), num_classes)
    losses = _SoftCrossEntropy.apply(rows, target.reshape(rows.shape), weight, options)
    if options.reduction == "none":
        return losses.view(logits.shape[:-1])
    if options.reduction == "sum":
        return losses.sum()
    mean: Tensor = losses.sum() / (len(rows) if num_items is None else num_items)
    return mean.to(losses.dtype)  # a num_items of one number is float64


def _has_classes_second(target: Tensor) -> bool:
    """Whether probabilities sum to one over dimension 1, as torch has them, and not over the last.

    Positions may be masked by zeros. On a GPU the values are read only with RINGCOMM_CHECK_TARGETS.
    """
    if not _has_values(target) or torch.compiler.is_compiling():
        return False
    if target.device.type != "cpu" and not checks_targets():
        return False
    sums = [target.sum(dim, dtype=torch.float32) for dim in (1, -1)]
    ones = [bool(((x - 1).abs() < 1e-2).all()) for x in sums]
    masked = [bool((((x - 1).abs() < 1e-2) | (x == 0)).all()) for x in sums]
    return (ones[0] and not ones[1]) or (masked[0] and not masked[1])


def _has_values(tensor: Tensor) -> bool:
    """Whether a tensor is neither on the meta device nor of a FakeTensorMode."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def float64_cross_entropy(rows: Tensor, *given: Unpack[Given]) -> tuple[Tensor, Tensor]:
    """The loss of rows of float64 logits for class indices, and the outputs by token."""
    target, weight, num_items, shard, options = given
    rows = rows[:, : shard.size]
    check_classes(target, shard.size, options.ignore_index)
    is_kept = target != options.ignore_index
    classes = torch.where(is_kept, target, 0)
    wanted = torch.zeros_like(rows).scatter_(1, classes[:, None], 1.0)
    loss = torch.where(is_kept, _SoftCrossEntropy.apply(rows, wanted, weight, options), 0.0)
    by_token = loss.new_zeros([0])
    if options.outputs:
        z = _scaled(rows.detach(), options)
        log_p = torch.log_softmax(z, -1)
        entropy = -torch.where(log_p == -math.inf, 0.0, log_p.exp() * log_p).sum(-1)
        found = (loss.detach(), torch.logsumexp(z, -1), entropy, z.argmax(-1) == target)
        by_token = torch.where(is_kept, torch.stack([x.double() for x in found]), 0.0)
    if options.reduction != "none":
        loss = loss.sum()
    if options.reduction == "mean":
        weights = is_kept if weight is None else torch.where(is_kept, weight[classes], 0.0)
        loss = loss / (weights.sum() if num_items is None else num_items)
    return loss, by_token


def check_classes(target: Tensor, vocab_size: int, ignore_index: int) -> None:
    """Raises IndexError for the first target that is not a class. Waits for the device."""
    if not _has_values(target):
        return
    is_wrong = (target != ignore_index) & ((target < 0) | (target >= vocab_size))
    wrong = is_wrong.nonzero()
    if len(wrong):
        first = int(wrong[0])
        raise IndexError(
            f"ringcomm: target[{first}] = {int(target[first])} is out of range 0 to"
            f" {vocab_size - 1} (ignore_index is {ignore_index})"
        )


def _scaled(rows: Tensor, options: LossOptions) -> Tensor:
    z = rows.to(torch.promote_types(rows.dtype, torch.float32)) * options.logit_scale
    return torch.tanh(z / options.softcap) * options.softcap if options.softcap else z


def _blocks(
    rows: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Blocks of rows, their z and the target of each class, in fp32 (fp64 for fp64 rows)."""
    step = max(1, BLOCK_BYTES // (max(1, rows.shape[1]) * max(4, rows.element_size())))
    smooth = options.label_smoothing
    for begin in range(0, len(rows), step):
        block = slice(begin, begin + step)
        z = _scaled(rows[block], options)
        wanted = target[block].to(z.dtype) * (1 - smooth) + smooth / target.shape[1]
        yield block, z, wanted if weight is None else wanted * weight


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions
    ) -> Tensor:
        losses = rows.new_empty(len(rows), dtype=torch.promote_types(rows.dtype, torch.float32))
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
                capped = rows[block].to(z.dtype) * (options.logit_scale / options.softcap)
                power = torch.exp(-2 * capped.abs())
                slope *= 4 * power / (1 + power) ** 2
            grad[block] = slope * (grad_losses[block, None] * options.logit_scale)
        return grad, None, None, None
