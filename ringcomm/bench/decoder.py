"""A small language model of torch's own layers, for measuring how it is trained."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB_SIZE = 256  # bytes
HEAD_WIDTH = 32


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)); 12 width^2 weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q: nn.Module = nn.Linear(width, width, bias=False)
        self.k: nn.Module = nn.Linear(width, width, bias=False)
        self.v: nn.Module = nn.Linear(width, width, bias=False)
        self.o: nn.Module = nn.Linear(width, width, bias=False)
        self.up: nn.Module = nn.Linear(width, 4 * width, bias=False)
        self.down: nn.Module = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, tokens, width) to the same shape."""
        y = self.norm1(x)
        q, k, v = (
            w(y).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for w in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.o(y)
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class Decoder(nn.Module):
    """Pre-norm layers with a causal mask, which is all they know of positions.

    Args:
        width: of the model, a multiple of 32.
        num_layers: each 12 width^2 weights.
        seed: of the weights, which are equal wherever it is.
    """

    def __init__(self, width: int, num_layers: int, seed: int = 0) -> None:
        super().__init__()
        self.width, self.num_layers = width, num_layers
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.tokens: nn.Module = nn.Embedding(VOCAB_SIZE, width)
            self.layers = nn.ModuleList(DecoderLayer(width) for _ in range(num_layers))
            self.norm = nn.RMSNorm(width)
            self.head: nn.Module = nn.Linear(width, VOCAB_SIZE, bias=False)
            self.loss: nn.Module = nn.CrossEntropyLoss()

    def forward(self, ids: Tensor) -> Tensor:
        """The mean loss of the next byte; ids: int64 (rows, tokens + 1)."""
        x = self.tokens(ids[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return self.loss_of(self.head(self.norm(x)), ids[:, 1:])

    def loss_of(self, logits: Tensor, wanted: Tensor) -> Tensor:
        """The mean over all tokens."""
        loss: Tensor = self.loss(logits.flatten(0, 1), wanted.flatten())
        return loss

    def blocks(self) -> dict[str, nn.Module]:
        """What makes logits of ids when it is called in turn."""
        layers = {f"layers.{i}": layer for i, layer in enumerate(self.layers)}
        return {"tokens": self.tokens, **layers, "norm": self.norm, "head": self.head}
