"""A row for every choice of a token, and the sum over a token's choices: each other's gradient.

Both touch a place once, so that the results do not depend on the order of threads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["rows_of_tokens", "sums_of_rows"]


def rows_of_tokens(tokens: Tensor, slots: Tensor, num_choices: int) -> Tensor:
    """The tokens of some choices.

    Args:
        tokens: shape (tokens, width).
        slots: shape (rows,), int64: which choices, token * num_choices + choice, each at most once.
        num_choices: of a token.

    Returns:
        Shape (rows, width).
    """
    result: Tensor = _RowsOfTokens.apply(tokens, slots, num_choices)
    return result


def sums_of_rows(rows: Tensor, slots: Tensor, num_tokens: int, num_choices: int) -> Tensor:
    """For every token the sum over its choices' rows, 0 where it has none.

    Args:
        rows: shape (rows, width).
        slots: the choice of each row, as rows_of_tokens() has it.
        num_tokens: of the result.
        num_choices: of a token.

    Returns:
        Shape (num_tokens, width).
    """
    result: Tensor = _SumsOfRows.apply(rows, slots, num_tokens, num_choices)
    return result


def _take(tokens: Tensor, slots: Tensor, num_choices: int) -> Tensor:
    return tokens.index_select(0, slots.div(num_choices, rounding_mode="floor"))


def _sum(rows: Tensor, slots: Tensor, num_tokens: int, num_choices: int) -> Tensor:
    spread = rows.new_zeros(num_tokens * num_choices, rows.shape[1])
    spread.index_copy_(0, slots, rows)
    return spread.view(num_tokens, num_choices, rows.shape[1]).sum(1)


class _RowsOfTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, slots: Tensor, num_choices: int) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.num_tokens, ctx.num_choices = tokens.shape[0], num_choices
        return _take(tokens, slots, num_choices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (slots,) = ctx.saved_tensors
        return sums_of_rows(grads[0], slots, ctx.num_tokens, ctx.num_choices), None, None


class _SumsOfRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, slots: Tensor, num_tokens: int, num_choices: int) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.num_choices = num_choices
        return _sum(rows, slots, num_tokens, num_choices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (slots,) = ctx.saved_tensors
        return rows_of_tokens(grads[0], slots, ctx.num_choices), None, None, None
