"""Tokens to the ranks of their experts and back (Lepikhin et al. 2021, section 3.2).

Splits are uneven: nothing is padded to a capacity, and a row travels only if its expert is on
another rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ringcomm.ops.updates.fused_update import shard_range
from ringcomm.parallel.flat_collectives import shard_sizes

__all__ = [
    "DispatchPlan",
    "combine",
    "dispatch",
    "plan_dispatch",
    "rows_of_tokens",
    "sums_of_rows",
]


class _Exchange(torch.autograd.Function):
    """all_to_all of rows, whose backward pass is one in the other direction.

    Rows are in the order of the ranks that they go to, or come from. `link` is what the exchange
    before this one has returned, or an empty tensor that requires grad if some rank of the group
    needs a gradient: a rank whose own rows need none still answers the others in the backward pass.
    """

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


def rows_of_tokens(tokens: Tensor, slots: Tensor, num_choices: int) -> Tensor:
    """The tokens of some choices, (tokens, width) to (rows, width).

    `slots`, int64, says which choices: token * num_choices + choice, each at most once.
    """
    result: Tensor = _RowsOfTokens.apply(tokens, slots, num_choices)
    return result


def sums_of_rows(rows: Tensor, slots: Tensor, num_tokens: int, num_choices: int) -> Tensor:
    """For every token the sum over its choices' rows, (num_tokens, width); 0 where it has none."""
    spread = rows.new_zeros(num_tokens * num_choices, rows.shape[1]).index_copy_(0, slots, rows)
    return spread.view(num_tokens, num_choices, rows.shape[1]).sum(1)


class _RowsOfTokens(torch.autograd.Function):
    """Not index_select's own gradient, which adds up in no fixed order on a GPU."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, slots: Tensor, num_choices: int) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.num_tokens, ctx.num_choices = tokens.shape[0], num_choices
        return tokens.index_select(0, slots.div(num_choices, rounding_mode="floor"))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (slots,) = ctx.saved_tensors
        return sums_of_rows(grads[0], slots, ctx.num_tokens, ctx.num_choices), None, None


# What ranks tell each other in front of the counts: see _facts_of().
FACTS = ("the need of gradients", "the width of a token", "the dtype of tokens")
NO_GRAD, NEEDS_NO_GRADIENT, NEEDS_GRADIENT = 0, 1, 2
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class DispatchPlan:
    """How many rows go where, as the ranks of a group have agreed; for one dispatch and combine."""

    group: dist.ProcessGroup
    sent: Sequence[int]  # this rank's rows for each rank
    table: Sequence[Sequence[int]]  # rows from each rank for each expert of this rank
    width: int  # of a row
    dtype: torch.dtype  # of the rows on the wire
    link: Tensor  # see _Exchange

    num_rows = property(lambda self: sum(self.sent))  # of this rank, whether they travel or not
    received = property(lambda self: [sum(of_rank) for of_rank in self.table])  # from each rank


def plan_dispatch(
    rows_per_expert: Tensor,
    like: Tensor,
    group: dist.ProcessGroup,
    *,
    is_grad_needed: bool,
) -> DispatchPlan:
    """Tells the ranks of a group how many rows they will get from each other.

    Args:
        rows_per_expert: shape (experts,), int64. The ranks have contiguous experts, by
            shard_range().
        like: the dtype, width and device of the rows to come.
        group: whose ranks.
        is_grad_needed: whether this rank will call the backward pass for something of its own.

    Raises:
        TypeError: rows have another dtype than float64, float32, float16 or bfloat16.
        ValueError: the ranks' rows differ in width or dtype, or some ranks are in no_grad mode
            while others need gradients. On all ranks.

    Collective: 8 bytes for each expert of another rank, and 24 for each other rank. It waits
    for the device, once.
    """
    if like.dtype not in DTYPES:
        raise TypeError(f"tokens are of {', '.join(map(str, DTYPES))}; got {like.dtype}")
    num_experts, world_size = rows_per_expert.numel(), group.size()
    sizes = shard_sizes(num_experts, world_size)
    facts = rows_per_expert.new_tensor(_facts_of(like, is_grad_needed))
    parts = rows_per_expert.split(sizes)
    message = torch.cat([piece for part in parts for piece in (facts, part)])
    of_rank = len(FACTS) + sizes[group.rank()]
    answer = message.new_empty(world_size * of_rank)
    message_sizes = [len(FACTS) + size for size in sizes]
    dist.all_to_all_single(answer, message, [of_rank] * world_size, message_sizes, group=group)
    numbers = torch.cat([rows_per_expert, answer]).tolist()
    counts, rest = numbers[:num_experts], numbers[num_experts:]
    answers = [rest[i * of_rank : (i + 1) * of_rank] for i in range(world_size)]
    needs_grad = _agree([of_peer[: len(FACTS)] for of_peer in answers])
    ranges = [shard_range(num_experts, world_size, rank) for rank in range(world_size)]
    return DispatchPlan(
        group=group,
        sent=[sum(counts[begin:end]) for begin, end in ranges],
        table=[of_peer[len(FACTS) :] for of_peer in answers],
        width=like.shape[-1],
        dtype=like.dtype,
        link=like.new_empty(0).requires_grad_(needs_grad),
    )


def _facts_of(like: Tensor, is_grad_needed: bool) -> list[int]:
    need = NEEDS_GRADIENT if is_grad_needed else NEEDS_NO_GRADIENT
    if not torch.is_grad_enabled():
        need = NO_GRAD
    return [need, like.shape[-1], DTYPES.index(like.dtype)]


def _agree(facts: Sequence[Sequence[int]]) -> bool:
    """Whether some rank needs a gradient, and so all take part in the backward pass."""
    for idx, name in list(enumerate(FACTS))[1:]:
        values = [of_rank[idx] for of_rank in facts]
        if len(set(values)) > 1:
            words = [str(DTYPES[value]) for value in values] if idx == 2 else values
            raise ValueError(f"ranks disagree on {name}: by rank {words}")
    needs = [of_rank[0] for of_rank in facts]
    if NEEDS_GRADIENT in needs and NO_GRAD in needs:
        raise ValueError(
            f"rank {needs.index(NO_GRAD)} is in no_grad mode, and rank"
            f" {needs.index(NEEDS_GRADIENT)} waits for it in the backward pass: train or evaluate"
            " on all ranks of experts alike"
        )
    return NEEDS_GRADIENT in needs


def dispatch(rows: Tensor, plan: DispatchPlan) -> tuple[list[Tensor], Tensor]:
    """Brings rows, (plan.num_rows, width) by expert, to the ranks of their experts.

    Returns for each of this rank's experts its rows, those of rank 0 first; and the link for
    combine(). Collective, forward and backward: the bytes of the rows whose experts are on other
    ranks, and backward those that have come from there.
    """
    received, link = _Exchange.apply(rows, plan.link, plan.sent, plan.received, plan.group)
    pieces = received.split([num for of_rank in plan.table for num in of_rank])
    num_local = len(plan.table[0])
    return [torch.cat(pieces[local::num_local]) for local in range(num_local)], link


def combine(results: Sequence[Tensor], link: Tensor, plan: DispatchPlan) -> Tensor:
    """Brings the experts' results back in the order of the rows of dispatch(). Collective."""
    by_rank = [
        result.split([of_rank[local] for of_rank in plan.table])
        for local, result in enumerate(results)
    ]
    pieces = [of_expert[rank] for rank in range(plan.group.size()) for of_expert in by_rank]
    empty = link.new_empty(0, plan.width, dtype=plan.dtype)  # of a rank without experts
    joined = torch.cat([empty, *pieces])
    rows: Tensor = _Exchange.apply(joined, link, plan.received, plan.sent, plan.group)[0]
    return rows
