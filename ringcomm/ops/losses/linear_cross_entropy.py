"""Cross-entropy of a linear layer's outputs, which never all exist at once."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Unpack

from ringcomm.backend import resolve_group
from ringcomm.ops.losses.linear_blocks import FusedUpdate, LinearCrossEntropy, without_autocast
from ringcomm.ops.losses.options import (
    LOGIT_DTYPES,
    LossArguments,
    check_class_weight,
    check_targets,
    checked_num_items,
    checked_options,
    find_shard,
    with_outputs,
)

_ops: Any = torch.ops.ringcomm


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
    **options: Unpack[LossArguments],
) -> Any:
    """cross_entropy(hidden @ weight.T + bias, target), without the logits in memory.

    Gradients of hidden, weight and bias are summed in fp32 and rounded to their dtype once; those
    of hidden again where the loss's own gradient is not 1, and where ranks add their parts.
    Under torch.autocast hidden, weight and bias may be of any of the dtypes and are cast first, as
    for a linear layer. There is no second derivative.

    Args:
        hidden: shape (..., H), float32, float16 or bfloat16; with a group the same on all ranks,
            unless sequence_parallel, and requiring grad on all of them or on none.
        weight: shape (V, H), of hidden's dtype: the rows of this rank's V classes.
        target: shape (...), int64 or int32: classes of the whole vocabulary, of all tokens.
        bias: shape (V,), of hidden's dtype; None for none.
        group: whose ranks share the vocabulary; None where this rank has all of it.
        mesh: a one-dimensional DeviceMesh of them, in place of a group.
        vocab_start: this rank's first class, as in cross_entropy.
        vocab_size: the number of classes without padding, as in cross_entropy.
        class_weight: shape (vocab_size,), float32: cross_entropy's `weight`.
        num_items: as in cross_entropy.
        sequence_parallel: `hidden` is this rank's equal share of the first dimension, which is
            gathered; its gradient is reduce-scattered instead of all-reduced.
        fused_update: called in the backward pass with a slice of the weight's rows and their
            gradient, fp32, once for each row, instead of keeping a gradient of the weight: it
            updates those rows in place. The weight's own gradient then stays None, and whether it
            requires one makes no difference.
        options: ignore_index, label_smoothing, z_loss, softcap, logit_scale, reduction and outputs,
            as in cross_entropy.

    Returns:
        As cross_entropy.

    Raises:
        ValueError, TypeError, IndexError, RingcommError: as cross_entropy.

    Collective where there is a group, in the forward pass and, for hidden's gradient, in the
    backward pass; blocks until the result is there.
    """
    checked = checked_options(**options)
    divisor = checked_num_items(num_items, checked.reduction)
    check_class_weight(class_weight, hidden.device)
    hidden, weight, bias = _autocast(hidden, weight, bias)
    _check_layer(hidden, weight, bias)
    if mesh is not None:
        group = resolve_group(group, mesh)
    if sequence_parallel and (group is None or hidden.dim() == 1):
        raise ValueError("sequence_parallel is for tokens that a group of ranks shares")
    tokens = hidden.shape[:-1]
    if sequence_parallel:
        tokens = torch.Size([tokens[0] * resolve_group(group).size(), *tokens[1:]])
    check_targets(target, tokens, hidden.device)
    shard = find_shard(weight.shape[0], group, vocab_start, vocab_size, class_weight)
    if shard.group_name is not None:
        enter = _GatherTokens if sequence_parallel else _SumGradients
        hidden = enter.apply(hidden, shard.group_name)
    rows = hidden.reshape(target.numel(), hidden.shape[-1])
    with without_autocast(hidden.device):
        loss, by_token = LinearCrossEntropy.apply(
            rows,
            weight,
            bias,
            target.reshape(-1).long(),
            class_weight,
            divisor,
            shard,
            checked,
            fused_update,
            torch.is_grad_enabled(),
        )
    return with_outputs(loss, by_token, target, checked)


def _autocast(hidden: Tensor, *layer: Tensor | None) -> tuple[Any, ...]:
    """What torch.autocast makes of a linear layer's operands."""
    device = hidden.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return hidden, *layer
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        tensor.to(dtype) if tensor is not None and tensor.dtype in LOGIT_DTYPES else tensor
        for tensor in (hidden, *layer)
    )


def _check_layer(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if hidden.dtype not in LOGIT_DTYPES:
        raise TypeError(f"hidden is float32, float16 or bfloat16, got {hidden.dtype}")
    if hidden.dim() == 0 or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"hidden of shape (..., H) wants a weight of shape (V, H), got {tuple(hidden.shape)}"
            f" and {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"the bias has shape {tuple(weight.shape[:1])}, got {tuple(bias.shape)}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != hidden.dtype:
            raise TypeError(f"hidden is {hidden.dtype}, and the {name} {tensor.dtype}")
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(f"hidden is on {hidden.device}, and the {name} on {tensor.device}")


# ---- hidden states into a group


class _SumGradients(torch.autograd.Function):
    """Each rank's classes give a part of hidden's gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group_name: str) -> Tensor:
        ctx.group_name = group_name
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _ops.all_reduce(grad, "sum", ctx.group_name), None


class _GatherTokens(torch.autograd.Function):
    """The same where each rank has a share of the tokens."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group_name: str) -> Tensor:
        ctx.group_name = group_name
        gathered: Tensor = _ops.all_gather(hidden, group_name)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _ops.reduce_scatter(grad, "sum", ctx.group_name), None
