"""The communication of tensor parallelism, before and after layers with sharded features.

Megatron-LM's f and g (Shoeybi et al. 2019, section 3), and with sequence parallelism g-bar and its
conjugate (Korthikanti et al. 2022, section 4.2.2), which move the same bytes. These two are the
operators all_gather and reduce_scatter, each the other's gradient.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ringcomm.backend import resolve_group
from ringcomm.ops.collectives import SumOneWay
from ringcomm.parallel.gradient_placeholder import hookable
from ringcomm.torch_names import forget_backward_hooks

_ops: Any = torch.ops.ringcomm
# A fixed overload, because the selection of an overload takes several microseconds per call.
_all_gather, _reduce_scatter = _ops.all_gather.default, _ops.reduce_scatter.default
_SUMMED_OVER = "_ringcomm_summed_over"


def copy_to_tp(
    x: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    mesh: DeviceMesh | None = None,
    sequence_dim: int | None = None,
    inplace: bool = False,
) -> Tensor:
    """Applied before layers that shard their output features.

    Args:
        x: a tensor of any shape, equal on all ranks; with `sequence_dim` this rank's equal part.
        group: None for the default group.
        mesh: a one-dimensional DeviceMesh, instead of a group.
        sequence_dim: the dimension of tokens, which are sharded outside such layers.
        inplace: without sequence_dim, the sum overwrites the gradient. Use it only for results that
            are inputs of linear layers, whose gradient is always a new tensor.

    Returns:
        A copy of `x`, with a gradient summed over the ranks, or `x` itself where it needs no
        gradient; with `sequence_dim` the ranks' parts concatenated, with a gradient that is
        reduce-scattered.

    Collective: the backward pass sends 2(N-1)/N of the full tensor's bytes; with `sequence_dim` the
    backward and the forward pass send half of that each.
    """
    resolved = resolve_group(group, mesh)
    if resolved.size() == 1:
        return x
    name = resolved.group_name
    if sequence_dim is None:
        needs_sum = torch.is_grad_enabled() and x.requires_grad
        return SumOneWay.apply(x, name, False, inplace) if needs_sum else x
    whole: Tensor = _all_gather(x.movedim(sequence_dim, 0).contiguous(), name)
    return whole.movedim(0, sequence_dim).contiguous()


def reduce_from_tp(
    x: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    mesh: DeviceMesh | None = None,
    sequence_dim: int | None = None,
    inplace: bool = False,
) -> Tensor:
    """Applied after layers that shard their input features, whose results are partial sums.

    Args:
        x: this rank's partial sums, of the same shape on all ranks.
        group: None for the default group.
        mesh: a one-dimensional DeviceMesh, instead of a group.
        sequence_dim: each rank gets an equal part of the result along this dimension.
        inplace: without sequence_dim, the sum overwrites `x`, which must be the result of an
            operation that does not need it later, such as a linear layer.

    Returns:
        The sum over the ranks; with `sequence_dim` this rank's part of it.

    Raises ValueError if the ranks do not divide the tokens. Collective; sends what copy_to_tp()
    sends, with forward and backward exchanged.
    """
    resolved = resolve_group(group, mesh)
    if resolved.size() == 1:
        return x
    name = resolved.group_name
    if sequence_dim is None:
        return SumOneWay.apply(x, name, True, inplace)
    if x.shape[sequence_dim] % resolved.size():
        raise ValueError(
            f"{resolved.size()} ranks cannot split {x.shape[sequence_dim]} tokens evenly: pad the"
            " sequences, or leave sequence parallelism out"
        )
    part: Tensor = _reduce_scatter(x.movedim(sequence_dim, 0).contiguous(), "sum", name)
    return part.movedim(0, sequence_dim).contiguous()


def gather_from_tp(
    x: Tensor,
    sizes: Sequence[int],
    group: dist.ProcessGroup | None = None,
    *,
    mesh: DeviceMesh | None = None,
    dim: int = -1,
) -> Tensor:
    """Concatenates the ranks' parts on all ranks, which then compute the same values.

    Args:
        x: this rank's part.
        sizes: the sizes of all parts along `dim`, in rank order.
        group: None for the default group.
        mesh: a one-dimensional DeviceMesh, instead of a group.
        dim: the sharded dimension.

    Returns:
        A new tensor; the gradient of `x` is this rank's part of its gradient.

    Collective: sends (N-1)/N of the full tensor's bytes, with parts padded to the longest; the
    backward pass sends nothing.
    """
    resolved = resolve_group(group, mesh)
    # Moved here: in-place operations refuse a view that a custom function returns.
    moved = x.movedim(dim, 0)
    whole = _GatherFromTp.apply(moved, tuple(sizes), resolved.group_name, resolved.rank())
    return whole.movedim(0, dim)


def all_reduce_grad_(
    param: Tensor, group: dist.ProcessGroup | None = None, *, mesh: DeviceMesh | None = None
) -> None:
    """Sums the gradient of a parameter over a group, or a one-dimensional mesh, when it arrives.

    Use it for replicated parameters that each rank applies to its own tokens, such as norms under
    sequence parallelism, and for replicated heads. A frozen parameter may be unfrozen later.
    Collective in the backward pass, if the parameter has a gradient.
    """
    resolved = resolve_group(group, mesh)
    with hookable(param):
        param.register_hook(lambda grad: reduce_from_tp(grad, resolved))
    setattr(param, _SUMMED_OVER, resolved)


def summed_over(param: Tensor) -> dist.ProcessGroup | None:
    """The group of all_reduce_grad_(), if the parameter was given to it."""
    return getattr(param, _SUMMED_OVER, None)


@torch.no_grad()
def give_memory(param: Tensor, value: Tensor, device: torch.device | str | None = None) -> None:
    """Copies a value into new memory for a parameter or buffer, and keeps all_reduce_grad_()."""
    summed = summed_over(param)
    made = torch.empty_like(param, device=device or value.device).copy_(value)
    is_param = isinstance(param, nn.Parameter)
    torch.utils.swap_tensors(
        param, nn.Parameter(made, requires_grad=param.requires_grad) if is_param else made
    )
    if summed is not None:
        forget_backward_hooks(param)  # of the memory before
        all_reduce_grad_(param, summed)


class _GatherFromTp(torch.autograd.Function):
    """Concatenates along the first dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...], group_name: str, rank: int) -> Tensor:
        ctx.group_name = group_name
        ctx.begin, ctx.num = sum(sizes[:rank]), sizes[rank]
        longest = max(sizes)
        padding = (*[0, 0] * (x.dim() - 1), 0, longest - sizes[rank])
        padded = F.pad(x, padding).contiguous()
        rows = _all_gather(padded, group_name).split(longest)
        return torch.cat([row[:num] for row, num in zip(rows, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = grads[0]
        if torch.is_grad_enabled():  # equal on all ranks: its own gradient is a partial sum
            grad = SumOneWay.apply(grad, ctx.group_name, False, False)
        return grad.narrow(0, ctx.begin, ctx.num), None, None, None
