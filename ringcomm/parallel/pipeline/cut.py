"""Where a model is cut into stages, and which rank has which stage."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

__all__ = ["cut", "default_costs", "stages_of_rank"]


def cut(costs: Sequence[float], num_stages: int) -> list[range]:
    """Cuts a row of blocks into stages so that the largest stage is as small as it can be.

    Exact, by dynamic programming; of the cuts that have the same largest stage it takes one with
    the smallest sum of squares, so that the others are alike as well.

    Args:
        costs: of each block, in any unit, not negative; times are best.
        num_stages: each gets one block at least.

    Returns:
        The blocks of each stage: one range after the other.

    Raises:
        ValueError: there are fewer blocks than stages, or a cost is negative or not finite.
    """
    if num_stages < 1:
        raise ValueError(f"num_stages is 1 or more, got {num_stages}")
    if len(costs) < num_stages:
        raise ValueError(
            f"{len(costs)} blocks are too few for {num_stages} stages of one block at least: cut"
            " the model into more blocks, or take fewer ranks or stages per rank"
        )
    for block_idx, cost in enumerate(costs):
        if not 0 <= cost < math.inf:
            raise ValueError(f"the cost of block {block_idx} is {cost}: costs are not negative")
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    largest = _best(sums, num_stages, math.inf, is_squared=False)[0]
    return _best(sums, num_stages, largest, is_squared=True)[1]


def _best(
    sums: Sequence[float], num_stages: int, limit: float, is_squared: bool
) -> tuple[float, list[range]]:
    """The least largest stage, or the least sum of squares of stages up to a limit; and its cut."""
    num_blocks = len(sums) - 1
    # Of the first `end` blocks in as many stages as there have been rounds.
    values = [0.0] + [math.inf] * num_blocks
    choices: list[list[int]] = []
    for _ in range(num_stages):
        before, values = values, [math.inf] * (num_blocks + 1)
        choices.append([0] * (num_blocks + 1))
        for end in range(1, num_blocks + 1):
            for begin in range(end):
                size = sums[end] - sums[begin]
                if size > limit:
                    continue
                value = before[begin] + size**2 if is_squared else max(before[begin], size)
                if value < values[end]:
                    values[end], choices[-1][end] = value, begin
    stages = []
    end = num_blocks
    for choice in reversed(choices):
        stages.append(range(choice[end], end))
        end = choice[end]
    return values[num_blocks], stages[::-1]


def default_costs(blocks: Sequence[nn.Module]) -> list[float]:
    """A guess: the elements of a block's parameters, and 1.

    A weight costs two operations a token in the forward, and four in the backward; the table of an
    nn.Embedding costs none, and so counts nothing. A head that shares it does count.
    """
    costs = []
    for block in blocks:
        tables = {
            module.weight
            for module in block.modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        }
        costs.append(1.0 + sum(p.numel() for p in block.parameters() if p not in tables))
    return costs


def stages_of_rank(rank: int, num_ranks: int, num_stages: int, is_v: bool) -> list[int]:
    """In turn (0, p, 2p, ... on rank 0), or in a V: down the ranks, and up again."""
    rows = range(num_stages // num_ranks)
    return [row * num_ranks + (num_ranks - 1 - rank if is_v and row % 2 else rank) for row in rows]
