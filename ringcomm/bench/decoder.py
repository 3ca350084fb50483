"""A small language model of torch's own layers, for measuring how it is trained."""

from __future__ import annotations

import torch
from torch import Tensor, nn

VOCAB_SIZE = 256  # bytes
HEAD_WIDTH = 32


class Decoder(nn.Module):
    """Pre-norm transformer layers with a causal mask; returns the mean loss of the next byte.

    Args:
        width: of the model, a multiple of 32.
        num_layers: each 12 width^2 weights.
        context: tokens of a row at most.
        seed: of the weights, which are equal wherever it is.
    """

    def __init__(self, width: int, num_layers: int, context: int, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.tokens = nn.Embedding(VOCAB_SIZE, width)
            self.positions = nn.Embedding(context, width)
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(
                    width,
                    width // HEAD_WIDTH,
                    4 * width,
                    dropout=0.0,
                    activation="gelu",
                    batch_first=True,
                    norm_first=True,
                )
                for _ in range(num_layers)
            )
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, VOCAB_SIZE, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: int64 (rows, tokens + 1)."""
        given, wanted = ids[:, :-1], ids[:, 1:]
        num_tokens = given.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(num_tokens, device=ids.device)
        x = self.tokens(given) + self.positions.weight[:num_tokens]
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
