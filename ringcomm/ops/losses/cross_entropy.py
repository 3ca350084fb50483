"""Cross-entropy over plain or vocab-parallel logits: wrapper, autograd and fakes.

The steps are the operators of kernels/losses/torch_cross_entropy.cc; docs/design/cross_entropy.md
has the formulas.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Unpack

from ringcomm.backend import resolve_group
from ringcomm.ops.losses import cross_entropy_cuda
from ringcomm.ops.losses.options import (
    OUTPUTS,
    Given,
    InPlace,
    LossArguments,
    check_inplace,
    check_targets,
    checked_num_items,
    checked_options,
    checked_weight,
    find_vocab_shard,
    first_order_only,
    has_rows,
    shard_of_dtensor,
    with_outputs,
)
from ringcomm.ops.losses.soft_targets import float64_cross_entropy, soft_cross_entropy
from ringcomm.torch_names import base_of, checks_saved_tensors, operators_are_seen

_ops: Any = torch.ops.ringcomm


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    weight: Tensor | None = None,
    num_items: float | Tensor | None = None,
    inplace: InPlace = False,
    **options: Unpack[LossArguments],
) -> Any:
    """Computes the cross-entropy of logits and targets; classes are the last dimension.

    The options are those of torch.nn.functional.cross_entropy and more. torch has classes in the
    second dimension: move it, logits.movedim(1, -1), for logits of shape (N, C, ...).

    With z = softcap * tanh(logit_scale * x / softcap) of the logits x, a token's loss is
    sum over classes c of q[c] * (lse - z[c]) + z_loss * lse ** 2, where lse = log(sum(exp(z))) and
    q[c] = weight[c] * ((1 - label_smoothing) * [c == target] + label_smoothing / vocab_size).

    With a `group` each rank has the logits of some classes, and all ranks compute the same loss.
    The forward pass has one all_reduce of 24 bytes per token, the backward pass no collective. On
    GPUs, and with a backend other than ringcomm, it is an all_gather.

    Args:
        logits: shape (..., V), V this rank's classes; float32, float16 or bfloat16. A DTensor
            sharded in its last dimension determines group and vocab_start. Without a group also
            float64, for which torch's operators compute the loss, with copies of the logits.
        target: shape (...), of any dtype of integers: classes of the whole vocabulary, the same on
            all ranks. Or, without a group, probabilities of shape (..., V); they get no gradient.
        group: the ranks that shard the vocabulary; None (the default) if this rank has all of it.
        mesh: a one-dimensional DeviceMesh of them, instead of a group.
        vocab_start: the first class of this rank's logits; shards may have any order, differ in
            size and be empty. None, on all ranks or on none, means rank order, which needs an
            exchange of the sizes first.
        vocab_size: the number of classes on all ranks together. Columns after it are padding, with
            probability 0 and gradient 0. None means the number of columns.
        weight: shape (vocab_size,): the weights of all classes, on every rank; float64 for float64
            logits, otherwise any floating-point dtype. With vocab_start and without vocab_size, the
            ranks exchange the sizes of their shards first.
        num_items: the divisor of "mean", instead of the sum of weights: a number, or a tensor with
            one element.
        inplace: True: the backward pass overwrites the logits with their gradient, which needs no
            memory of its own. Logits can be read until then. Operations that have saved them must
            run their backward pass earlier; others raise autograd's RuntimeError. So does a second
            backward pass.
            "forward": the forward pass overwrites the logits, which nothing may read afterwards,
            and the backward pass multiplies their gradient by that of the loss, in float32. It is
            rounded twice then. This saves one pass over the logits, and supports "mean" and "sum".
            With a group, and for float16, it is the same as True.
            The logits stay as they are in float64, without gradients, in compiled functions, and
            where saved tensors have hooks, as within torch.utils.checkpoint.
        options: these, with their defaults:
            ignore_index (-100): targets without loss and gradient; may be a class.
            label_smoothing (0.0): in [0, 1].
            z_loss (0.0): the factor of lse ** 2 (Chowdhery et al. 2022, section 5).
            softcap (None): positive; None for none.
            logit_scale (1.0): a factor of the logits, before the softcap.
            reduction ("mean"): "mean" over the weights of targets not ignored, "sum" or "none".
            outputs (()): per-token results to return as well, any of "loss", "lse", "entropy" (of
            the softmax, in nats) and "accuracy" (1 if the target is the first of the largest
            logits).

    Returns:
        The loss, float32 (float64 for float64 logits): a scalar, or of target's shape for "none".
        With `outputs`, a pair of the loss and a dict of tensors of its dtype and of target's shape,
        without gradients and 0 for ignored tokens. If there are no tokens, or all are ignored, the
        loss is NaN for "mean" and 0 for "sum", and gradients are 0.

    Raises:
        ValueError: a shape, a device, an option or a combination of them is wrong; or, on all
            ranks, the ranks' shards do not make up a vocabulary.
        TypeError: a dtype is not supported.
        IndexError: a target is neither a class nor ignore_index.
        RingcommError: a rank failed or called something else.
        RuntimeError: the backward pass runs under create_graph=True, or in a transform of
            torch.func.

    On a GPU the call does not wait for the device. A target that is not a class, or shards that do
    not make up a vocabulary, give NaN losses and gradients. The environment variable
    RINGCOMM_CHECK_TARGETS=1 raises the errors above instead.

    Collective if there is a group; blocks until the result is available.
    """
    checked = checked_options(**options)
    check_inplace(inplace, checked.reduction)
    if not (torch.is_grad_enabled() and logits.requires_grad):
        inplace = False
    if inplace:
        _check_inplace(logits)
    if mesh is not None:
        group = resolve_group(group, mesh)
    if type(logits) is not Tensor:  # a DTensor perhaps
        logits, target, group, vocab_start = shard_of_dtensor(logits, target, group, vocab_start)
    divisor = checked_num_items(num_items, checked.reduction)
    weight = checked_weight(logits, weight, group)
    if logits.dim() == 0:
        raise ValueError("logits must have a dimension of classes, got a scalar")
    if target.is_floating_point():
        if group is not None or inplace or checked.outputs:
            raise ValueError("probabilities as targets do not support group, inplace or outputs")
        find_vocab_shard(logits.shape[-1], None, vocab_start, vocab_size, weight)
        return soft_cross_entropy(logits, target, weight, divisor, checked, vocab_size)

    if logits.dim() > 2 and logits.shape[:-1] != target.shape == logits.movedim(1, -1).shape[:-1]:
        raise ValueError("classes must be the last dimension of logits: use logits.movedim(1, -1)")
    check_targets(target, logits.shape[:-1], logits.device)
    shard = find_vocab_shard(logits.shape[-1], group, vocab_start, vocab_size, weight)
    if logits.dtype == torch.float64:
        inplace = False
    given = (target.reshape(-1).long(), weight, divisor, shard, checked)
    rows = _rows_of(logits, bool(inplace))
    overwrites = bool(inplace) and checks_saved_tensors()
    if logits.dtype == torch.float64:
        loss, by_token = float64_cross_entropy(rows, *given)
    # With a group a gradient needs all ranks' stats. One of float16 over the number of tokens
    # underflows before it is multiplied by that of the loss.
    elif inplace == "forward" and overwrites and group is None and rows.dtype != torch.float16:
        loss, by_token = _WrittenInForward.apply(rows, *given)
    else:
        loss, by_token = _CrossEntropy.apply(rows, overwrites, *given)
    return with_outputs(loss, by_token, target, checked)


# ---- arguments


def _rows_of(logits: Tensor, inplace: bool) -> Tensor:
    """The logits as a matrix with contiguous rows; for `inplace` in the same memory."""
    is_matrix = logits.dim() == 2  # which autograd need not know as a view of itself
    shape = math.prod(logits.shape[:-1]), logits.shape[-1]
    if not inplace:
        rows = logits if is_matrix else logits.reshape(shape)
        # clone(), because contiguous() keeps the strides of an empty tensor.
        return rows if rows.stride(1) == 1 else rows.clone(memory_format=torch.contiguous_format)
    if logits.stride(-1) == 1:
        try:
            rows = logits if is_matrix else logits.view(shape)
        except RuntimeError:
            pass
        else:
            if has_rows(rows):  # else rows overlap
                return rows
    raise ValueError(
        f"inplace needs contiguous rows of logits, got strides {tuple(logits.stride())}"
    )


def _check_inplace(logits: Tensor) -> None:
    # In a compiled function, inputs do not count as views.
    base = None if torch.compiler.is_compiling() else base_of(logits)
    if any(x is not None and x.is_leaf and x.requires_grad for x in (logits, base)):
        raise ValueError(
            "inplace overwrites the logits, which must not be a leaf that requires grad or a"
            " view of one"
        )


# ---- autograd


def _steps_for(rows: Tensor) -> Any:
    """The operators; on a GPU their functions, where no one looks at a call of an operator."""
    is_plain = rows.is_cuda and type(rows) is Tensor and not operators_are_seen()
    return cross_entropy_cuda if is_plain else _ops


def loss_of_all_classes(
    stats: Tensor, *given: Unpack[Given]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Merges the ranks' stats and computes their cross_entropy_loss. Collective."""
    *tokens, shard, options = given
    steps = _steps_for(stats)
    if shard.group_name is not None:
        stats = steps.merge_softmax_stats(stats, shard.group_name)
    terms = options.for_loss(shard)
    return stats, *steps.cross_entropy_loss(stats, *tokens, *terms)


class _CrossEntropy(torch.autograd.Function):
    """The backward pass computes the gradient; with `is_inplace` it overwrites the logits."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, is_inplace: bool, *given: Unpack[Given]
    ) -> tuple[Tensor, Tensor]:
        target, weight, _, shard, options = given
        stats = _steps_for(rows).softmax_stats(rows, target, weight, *options.for_stats(shard))
        stats, loss, by_token, denominator = loss_of_all_classes(stats, *given)
        ctx.save_for_backward(rows, target, weight, stats, denominator)
        ctx.grad_options = options.for_grad(shard)
        ctx.is_inplace = is_inplace
        ctx.mark_non_differentiable(by_token)
        return loss, by_token

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Any, ...]:
        rows, *known = ctx.saved_tensors
        steps = _steps_for(rows)
        given = (grad_loss, rows.detach(), *known, *ctx.grad_options)
        if ctx.is_inplace:
            steps.cross_entropy_grad_(*given)
        grad = given[1] if ctx.is_inplace else steps.cross_entropy_grad(*given)
        return grad, *[None] * 6


class _WrittenInForward(torch.autograd.Function):
    """The forward pass leaves the gradient in the logits; the backward pass scales it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *given: Unpack[Given]) -> tuple[Tensor, Tensor]:
        *tokens, shard, options = given
        more = (*options.for_grad(shard)[1:], options.reduction, options.wants_more)
        loss, by_token, _ = _steps_for(rows).cross_entropy_and_grad_(rows, *tokens, *more)
        ctx.save_for_backward(rows.detach())
        ctx.mark_non_differentiable(by_token)
        return loss, by_token

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Any, ...]:
        (grad,) = ctx.saved_tensors
        _steps_for(grad).scale_(grad, grad_loss)
        return grad, None, None, None, None, None


# ---- fakes


def _fake_losses(
    reduction_at: int, _: Tensor, target: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    tokens = target.numel()
    return (
        target.new_empty([tokens] if options[reduction_at] == "none" else [], dtype=torch.float32),
        target.new_empty([len(OUTPUTS), tokens], dtype=torch.float32),
        target.new_empty([], dtype=torch.float64),
    )


_FAKES: dict[str, Any] = {
    "softmax_stats": lambda x, *_: x.new_empty([x.size(0) + 1, 6], dtype=torch.float32),
    "merge_softmax_stats": lambda stats, _: torch.empty_like(stats),
    "cross_entropy_loss": partial(_fake_losses, -1),
    "cross_entropy_grad": lambda _, x, *__: x.new_empty(x.shape),
    "cross_entropy_grad_": lambda *_: None,
    "cross_entropy_and_grad_": partial(_fake_losses, -2),
    "scale_": lambda *_: None,
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"ringcomm::{_name}", _fake)
