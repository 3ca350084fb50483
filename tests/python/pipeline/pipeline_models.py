"""Models for pipelines, and one process that runs their micro-batches one after the other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from curves import Block, make_model
from torch import Tensor, nn

M = 8  # micro-batches
VOCAB, WIDTH, SEQ, ROWS = 11, 8, 3, 16


def make_deep() -> nn.Sequential:
    """Nine blocks."""
    return make_model(8)


def accumulate(
    model: nn.Module,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    scale: float = 1.0,
    autocast: bool = False,
) -> float:
    """Adds a batch's gradients up, and returns its loss."""
    found = []
    for rows, wanted in zip(x.chunk(M), y.chunk(M), strict=True):
        with torch.autocast("cpu", enabled=autocast):
            loss = loss_fn(model(rows), wanted)
        (loss / M * scale).backward()
        found.append(loss.detach())
    return float(torch.stack(found).sum() / M)


class Tied(nn.Module):
    """A language model whose head has the embedding's weight; blocks have dots in their names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(6))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def blocks(self) -> dict[str, nn.Module]:
        layers = {f"layers.{i}": layer for i, layer in enumerate(self.layers)}
        return {"embed": self.embed, **layers, "norm": self.norm, "head": self.head}

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens
        for block in self.blocks().values():
            x = block(x)
        return x


def make_tied() -> Tied:
    torch.manual_seed(2)
    return Tied()


def token_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (ROWS, SEQ + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def tokens_loss(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
