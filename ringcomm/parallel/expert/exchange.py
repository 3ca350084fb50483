"""Rows of tokens to other ranks, as many as each pair has, and their gradients back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["exchange_rows"]


def exchange_rows(
    rows: Tensor,
    link: Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """all_to_all of rows, whose backward pass is one in the other direction.

    Args:
        rows: shape (sum(sent), ...), in the order of the ranks that they go to.
        link: what the exchange before this one has returned, or an empty tensor that requires grad
            where some rank of the group needs a gradient: a rank whose own rows need none then
            still answers the others in the backward pass.
        sent: the number of rows for each rank.
        received: the number of rows from each rank.
        group: whose ranks.

    Returns:
        The rows received, shape (sum(received), ...), in the order of the ranks that they come
        from, and the link for the next exchange.

    Collective, and so is its backward pass. A rank sends its rows for others, to the byte, and
    backward the gradients of what it has received.
    """
    result: tuple[Tensor, Tensor] = _Exchange.apply(rows, link, sent, received, group)
    return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        link: Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group), link.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = _all_to_all(grads[0], ctx.received, ctx.sent, ctx.group)
        return grad, grads[1], None, None, None


def _all_to_all(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    if group.size() == 1:
        return rows.view_as(rows)
    output = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(output, rows.contiguous(), list(received), list(sent), group=group)
    return output
