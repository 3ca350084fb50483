"""Blocks in checkpoints, for tests of what is saved for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ringcomm.parallel.tensor import copy_to_tp, reduce_from_tp

ROWS, TOKENS, WIDTH, NUM_BLOCKS = 2, 7, 24, 4
SAVED_BYTES = 4 * ROWS * TOKENS * WIDTH
PLAN = NUM_BLOCKS * SAVED_BYTES


class Half(nn.Module):
    """A column-parallel layer and a row-parallel one, of which a rank has weights of its own."""

    def __init__(self, rank: int | None, seed: int, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(1000 * seed + (rank or 0))
        self.is_parallel = rank is not None
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        given = copy_to_tp(self.norm(x)) if self.is_parallel else self.norm(x)
        partial = self.down(torch.tanh(self.up(given)))
        out: Tensor = self.dropout(x + (reduce_from_tp(partial) if self.is_parallel else partial))
        return out


def make(rank: int | None = None, dropout: float = 0.0) -> nn.ModuleList:
    """Blocks of two halves, as attention and MLP are: six all_reduces in a step."""
    return nn.ModuleList(
        nn.Sequential(Half(rank, 2 * number, dropout), Half(rank, 2 * number + 1, dropout))
        for number in range(NUM_BLOCKS)
    )


def run(blocks: nn.ModuleList | nn.Sequential, reentrant: bool = False, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    param = next(blocks.parameters())
    x = torch.randn(ROWS, TOKENS, WIDTH).to(param.device, param.dtype).requires_grad_().mul(1)
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=reentrant)
    return x


def gradients(blocks: nn.Module) -> list[Tensor]:
    found = [param.grad.clone() for param in blocks.parameters() if param.grad is not None]
    blocks.zero_grad()
    return found


def backward(out: Tensor, blocks: nn.Module) -> list[Tensor]:
    out.float().square().sum().backward()
    return gradients(blocks)


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    """To the last bit."""
    assert len(found) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
