"""A small language model of torch's layers: unsharded, tensor-parallel, and in pipeline stages."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ringcomm.nn import (
    ColumnParallelLinear,
    CrossEntropyLoss,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from ringcomm.parallel import pipeline, tensor

VOCAB_SIZE = 256  # bytes
HEAD_WIDTH = 32
# Bytes per token that the vocabulary-parallel loss sends.
LOSS_BYTES = 24


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
    """Pre-norm layers with a causal mask and no position embedding.

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
        """The modules that compute logits from ids, in call order."""
        layers = {f"layers.{i}": layer for i, layer in enumerate(self.layers)}
        return {"tokens": self.tokens, **layers, "norm": self.norm, "head": self.head}


def split_layers(model: Decoder, group: dist.ProcessGroup, *, shares_tokens: bool) -> None:
    """Applies tensor parallelism, and with `shares_tokens` sequence parallelism."""
    dim = 1 if shares_tokens else None

    def enter(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return tensor.copy_to_tp(output, group, sequence_dim=dim, inplace=True)

    def columns(linear: Any, unit: int = 1) -> ColumnParallelLinear:
        return ColumnParallelLinear.from_linear(
            linear, group=group, shard_multiple=unit, copy_input=False
        )

    def rows(linear: Any, unit: int = 1) -> RowParallelLinear:
        return RowParallelLinear.from_linear(
            linear, group=group, shard_multiple=unit, sequence_dim=dim
        )

    layers: Any = model.layers
    for layer in layers:
        for name in ("q", "k", "v"):
            setattr(layer, name, columns(getattr(layer, name), HEAD_WIDTH))
        layer.o, layer.up, layer.down = (
            rows(layer.o, HEAD_WIDTH),
            columns(layer.up),
            rows(layer.down),
        )
    whole: Any = model.tokens
    model.tokens = VocabParallelEmbedding.from_embedding(whole, group=group, sequence_dim=dim)
    model.head = head = columns(model.head)
    model.loss = CrossEntropyLoss(
        group=group, vocab_start=head.features[0], vocab_size=head.out_features
    )
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.register_forward_hook(enter)
            if shares_tokens:
                tensor.all_reduce_grad_(module.weight, group)


def split_bytes(width: int, num_layers: int, num_tokens: int, *, shares_tokens: bool) -> int:
    """Bytes reduced over the ranks in a step: a rank sends 2(N-1)/N of them."""
    activations = 4 * width * num_tokens * (4 * num_layers + 2)
    norms = 4 * width * (2 * num_layers + 1) if shares_tokens else 0
    return activations + LOSS_BYTES * (num_tokens + 1) + norms


def make_pipeline(
    model: Decoder, group: dist.ProcessGroup, num_microbatches: int
) -> pipeline.Pipeline:
    """A stage for each rank."""
    return pipeline.Pipeline(model.blocks(), model.loss_of, "1f1b", num_microbatches, group=group)


def pipeline_bytes(width: int, num_tokens: int, world_size: int) -> float:
    """Mean bytes that a rank sends in a step: activations, their gradients, the loss, a digest."""
    activations = (2 * 4 * width * num_tokens + 4) * (world_size - 1) / world_size
    return activations + 8 * (world_size - 1)
