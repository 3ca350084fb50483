"""Where tensor parallelism communicates: around layers whose features are split over ranks.

Megatron-LM's f and g (Shoeybi et al. 2019, section 3), and with sequence parallelism g-bar and its
conjugate (Korthikanti et al. 2022, section 4.2.2), which move the same bytes.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm.backend import resolve_group

__all__ = ["enter", "leave", "refuse_copy", "sum_gradients"]

_ops: Any = torch.ops.ringcomm


def enter(
    x: Tensor, group: dist.ProcessGroup | None = None, *, sequence_dim: int | None = None
) -> Tensor:
    """In front of layers that split their output features.

    Args:
        x: what all ranks have alike, any shape; with `sequence_dim` this rank's equal part of it.
        group: None for the default group.
        sequence_dim: the dimension that ranks share the tokens of, outside of such layers.

    Returns:
        `x`, whose gradient is the sum of the ranks'; with `sequence_dim` the ranks' parts joined,
        whose gradient is summed and scattered.

    Collective: 2(N-1)/N of the whole's bytes are sent backward; with `sequence_dim` half of that,
    and the other half forward.
    """
    result: Tensor = _Enter.apply(x, resolve_group(group).group_name, sequence_dim)
    return result


def leave(
    x: Tensor, group: dist.ProcessGroup | None = None, *, sequence_dim: int | None = None
) -> Tensor:
    """Behind layers that split their input features, and so have a part of every sum.

    Args:
        x: this rank's part of the sums, of the same shape on all ranks.
        group: None for the default group.
        sequence_dim: of the result each rank takes an equal part along it.

    Returns:
        The sum over the ranks; with `sequence_dim` this rank's part of it.

    Raises:
        ValueError: the ranks do not divide the tokens.

    Collective, as enter() in the other direction.
    """
    resolved = resolve_group(group)
    if sequence_dim is not None and x.shape[sequence_dim] % resolved.size():
        raise ValueError(
            f"{resolved.size()} ranks cannot share {x.shape[sequence_dim]} tokens evenly: pad the"
            " sequences, or leave sequence parallelism out"
        )
    result: Tensor = _Leave.apply(x, resolved.group_name, sequence_dim)
    return result


def sum_gradients(param: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Has the gradient of a parameter that all ranks have summed over them, as it comes.

    For what each rank uses on its own tokens, such as norms under sequence parallelism, and for
    copies of one head. Collective in the backward pass.
    """
    name = resolve_group(group).group_name
    param.register_hook(lambda grad: _ops.all_reduce(grad, "sum", name))


def refuse_copy(*_: Any) -> NoReturn:
    """Instead of copying layers that are split: hooks of gradients would not be copied.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError("layers that are split over ranks have no copy: copy the whole ones before")


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str, sequence_dim: int | None) -> Tensor:
        ctx.group_name, ctx.sequence_dim = group_name, sequence_dim
        return x.view_as(x) if sequence_dim is None else _gather(x, group_name, sequence_dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.sequence_dim is None:
            return _ops.all_reduce(grads[0], "sum", ctx.group_name), None, None
        return _scatter(grads[0], ctx.group_name, ctx.sequence_dim), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str, sequence_dim: int | None) -> Tensor:
        ctx.group_name, ctx.sequence_dim = group_name, sequence_dim
        if sequence_dim is None:
            summed: Tensor = _ops.all_reduce(x, "sum", group_name)
            return summed
        return _scatter(x, group_name, sequence_dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.sequence_dim is None:
            return grads[0], None, None
        return _gather(grads[0], ctx.group_name, ctx.sequence_dim), None, None


def _gather(x: Tensor, group_name: str, dim: int) -> Tensor:
    whole: Tensor = _ops.all_gather(x.movedim(dim, 0).contiguous(), group_name)
    return whole.movedim(0, dim).contiguous()


def _scatter(x: Tensor, group_name: str, dim: int) -> Tensor:
    part: Tensor = _ops.reduce_scatter(x.movedim(dim, 0).contiguous(), "sum", group_name)
    return part.movedim(0, dim).contiguous()
