"""A model as a row of named blocks, and the modules that a rank makes of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = [
    "Blocks",
    "StageModule",
    "add_blocks",
    "cut",
    "default_costs",
    "named_blocks",
    "stages_of_rank",
]

Blocks = Mapping[str, nn.Module] | Sequence[nn.Module] | nn.Sequential | nn.ModuleList


def named_blocks(blocks: Blocks) -> dict[str, nn.Module]:
    """The blocks by the names that they have in state dicts.

    Raises:
        TypeError: this is no row of modules.
        ValueError: it is empty, or a name stands within another one.
    """
    if isinstance(blocks, nn.Sequential | nn.ModuleList):
        found: dict[str, Any] = dict(blocks._modules)
    elif isinstance(blocks, Mapping):
        found = dict(blocks)
    elif isinstance(blocks, Sequence):
        found = {str(idx): block for idx, block in enumerate(blocks)}
    else:
        raise TypeError(
            "blocks are an nn.Sequential, a list of modules, or a dict of them by name; got"
            f" {type(blocks).__name__}"
        )
    if not found:
        raise ValueError("there are no blocks")
    for name, block in found.items():
        if not isinstance(block, nn.Module):
            raise TypeError(f"block {name} is a {type(block).__name__}, no nn.Module")
        for other in found:
            if other.startswith(f"{name}."):
                raise ValueError(
                    f"block {other} would be a part of block {name}: name it otherwise"
                )
    return found


def add_blocks(root: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    """Adds blocks to a module under their names, dots and all."""
    for name, block in blocks.items():
        parent = root
        *parts, last = name.split(".")
        for part in parts:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(last, block)


class StageModule(nn.Module):
    """Blocks in turn; a tuple that one returns is the arguments of the next.

    What it returns becomes a message.
    """

    def __init__(self, blocks: Sequence[nn.Module], recompute: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self._recompute = recompute

    def forward(self, *inputs: Any) -> Any:
        """The last block's result; with `recompute` only the blocks' inputs are kept."""
        value: Any = inputs
        for block in self.blocks:
            args = value if isinstance(value, tuple) else (value,)
            if self._recompute and torch.is_grad_enabled():
                value = checkpoint(block, *args, use_reentrant=False)
            else:
                value = block(*args)
        return tuple(map(_as_message, value)) if isinstance(value, tuple) else _as_message(value)


def _as_message(value: Any) -> Any:
    """The same memory where that is contiguous, and not a view: torch detaches it in place."""
    if not isinstance(value, Tensor):
        return value
    value = value.contiguous()
    return torch.ops.aten._unsafe_view(value, value.shape) if value._is_view() else value


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
