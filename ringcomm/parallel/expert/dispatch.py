"""Sends tokens to the ranks of their experts and back (Lepikhin et al. 2021, section 3.2).

Splits are uneven: nothing is padded to a capacity, and a row travels only if its expert is on
another rank.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm.parallel.flat_collectives import shard_sizes


class _Exchange(torch.autograd.Function):
    """all_to_all of rows, ordered by destination rank; the backward pass reverses it."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        output = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _exchange(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    if group.size() == 1:
        return rows
    return _Exchange.apply(rows, sent, received, group)


def rows_of_tokens(tokens: Tensor, slots: Tensor, num_choices: int) -> Tensor:
    """Gathers the tokens of the given choices, (tokens, width) to (rows, width).

    `slots`, int64, has the choices: token * num_choices + choice, each at most once.
    """
    # The gradient of an index_select of `tokens`, whose rows repeat, is not deterministic on a GPU.
    repeated = tokens[:, None].expand(-1, num_choices, -1).flatten(0, 1)
    return repeated.index_select(0, slots)


def sums_of_rows(rows: Tensor, slots: Tensor, num_tokens: int, num_choices: int) -> Tensor:
    """For every token the sum over its choices' rows, (num_tokens, width); 0 without rows."""
    spread = rows.new_zeros(num_tokens * num_choices, rows.shape[1]).index_copy_(0, slots, rows)
    return spread.view(num_tokens, num_choices, rows.shape[1]).sum(1)


def counts_of(numbers: Tensor, num_kinds: int) -> Tensor:
    """Counts each number below num_kinds; unlike bincount(), without waiting for the device."""
    flat = numbers.reshape(-1)
    return flat.new_zeros(num_kinds).scatter_add_(0, flat, torch.ones_like(flat))


# The header before a rank's counts: whether it needs gradients, and its index in DTYPES.
NO_GRAD, NEEDS_NO_GRADIENT, NEEDS_GRADIENT = 0, 1, 2
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
NUM_FACTS = 2


class DispatchPlan(NamedTuple):
    """The number of rows between all ranks of a group, for one dispatch and combine."""

    group: dist.ProcessGroup
    sent: list[int]  # this rank's rows for each rank
    received: list[int]  # rows from each rank
    table: list[list[int]]  # of them, for each expert of this rank
    needs_grad: bool  # whether any rank, and therefore all ranks, run the backward pass


def plan_dispatch(
    rows_per_expert: Tensor, dtype: torch.dtype, group: dist.ProcessGroup, *, is_grad_needed: bool
) -> DispatchPlan:
    """Exchanges how many rows of a dtype the ranks of a group will get from each other.

    `is_grad_needed`: whether this rank itself will call the backward pass. Raises TypeError for
    rows not in DTYPES; ValueError on all ranks if dtypes differ, or if some ranks are in no_grad
    mode while others need gradients.

    Collective: 8 bytes for each expert of another rank, and 16 for each other rank. It waits
    for the device, once.
    """
    if dtype not in DTYPES:
        raise TypeError(f"tokens must be one of {', '.join(map(str, DTYPES))}; got {dtype}")
    world_size = group.size()
    sizes = shard_sizes(rows_per_expert.numel(), world_size)
    parts = rows_per_expert.split(sizes)
    need = NEEDS_GRADIENT if is_grad_needed else NEEDS_NO_GRADIENT
    need = need if torch.is_grad_enabled() else NO_GRAD
    facts = torch.tensor([need, DTYPES.index(dtype)], dtype=rows_per_expert.dtype, device="cpu")
    facts = facts.to(rows_per_expert.device, non_blocking=True)
    message = torch.cat([piece for part in parts for piece in (facts, part)])
    of_rank = NUM_FACTS + sizes[group.rank()]
    answer = message.new_empty(world_size * of_rank)
    message_sizes = [NUM_FACTS + size for size in sizes]
    dist.all_to_all_single(answer, message, [of_rank] * world_size, message_sizes, group=group)
    num_sent = torch.stack([part.sum() for part in parts])
    rows = torch.cat([num_sent[:, None], answer.view(world_size, of_rank)], dim=1).tolist()
    sent, needs, dtypes, *_ = zip(*rows, strict=True)
    table = [row[1 + NUM_FACTS :] for row in rows]
    return DispatchPlan(group, [*sent], [*map(sum, table)], table, _agree(needs, dtypes))


def _agree(needs: Sequence[int], dtypes: Sequence[int]) -> bool:
    """Whether some rank needs a gradient, so that all ranks take part in the backward pass."""
    if len(set(dtypes)) > 1:
        words = [str(DTYPES[dtype]) for dtype in dtypes]
        raise ValueError(f"all ranks must have tokens of one dtype, got by rank {words}")
    if NEEDS_GRADIENT in needs and NO_GRAD in needs:
        raise ValueError(
            f"rank {needs.index(NO_GRAD)} is in no_grad mode, but rank"
            f" {needs.index(NEEDS_GRADIENT)} needs it in the backward pass: train on all ranks of"
            " the experts, or evaluate on all"
        )
    return NEEDS_GRADIENT in needs


def dispatch(rows: Tensor, plan: DispatchPlan) -> tuple[Tensor, list[Tensor]]:
    """Sends this rank's rows, (rows, width) ordered by expert, to the ranks of their experts.

    Returns all rows for this rank's experts, those of rank 0 first, and those of each. Collective,
    forward and backward. The forward pass sends the rows whose experts are on other ranks, the
    backward pass those received from other ranks. A rank whose own rows need no gradient takes part
    in the others' backward pass.
    """
    if plan.needs_grad and not rows.requires_grad:
        rows = rows.detach().requires_grad_()
    received = _exchange(rows, plan.sent, plan.received, plan.group)
    pieces = received.split([num for of_rank in plan.table for num in of_rank])
    num_local = len(plan.table[0])
    return received, [torch.cat(pieces[local::num_local]) for local in range(num_local)]


def combine(results: Sequence[Tensor], received: Tensor, plan: DispatchPlan) -> Tensor:
    """Sends the results of experts back, in the order of the rows of dispatch(). Collective."""
    sizes = zip(*plan.table, strict=True)
    split = [result.split(of_ranks) for result, of_ranks in zip(results, sizes, strict=True)]
    pieces = [piece for of_rank in zip(*split, strict=True) for piece in of_rank]
    # Zero rows of the received tensor, so that a rank without experts takes part in backward.
    joined = torch.cat([received[:0], *pieces])
    return _exchange(joined, plan.received, plan.sent, plan.group)
