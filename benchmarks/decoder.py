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


class Splitter:
    """Makes the modules of a model tensor-parallel, and sequence-parallel with `shares_tokens`.

    Norms, which the layers in parts follow, enter the region where ranks compute different things.
    """

    def __init__(self, group: dist.ProcessGroup, *, shares_tokens: bool) -> None:
        self._group = group
        self._dim = 1 if shares_tokens else None

    def columns(self, linear: Any, unit: int = 1, num_copies: int = 1) -> ColumnParallelLinear:
        """A linear layer whose outputs are split, by `unit` of them at least."""
        return ColumnParallelLinear.from_linear(
            linear,
            group=self._group,
            shard_multiple=unit,
            num_replicas=num_copies,
            copy_input=False,
        )

    def rows(self, linear: Any, unit: int = 1) -> RowParallelLinear:
        """A linear layer whose inputs are split."""
        return RowParallelLinear.from_linear(
            linear, group=self._group, shard_multiple=unit, sequence_dim=self._dim
        )

    def embedding(self, whole: Any) -> VocabParallelEmbedding:
        """An embedding whose vocabulary is split."""
        return VocabParallelEmbedding.from_embedding(
            whole, group=self._group, sequence_dim=self._dim
        )

    def loss(self, head: ColumnParallelLinear) -> CrossEntropyLoss:
        """Cross-entropy over the classes of such a head."""
        return CrossEntropyLoss(
            group=self._group, vocab_start=head.features[0], vocab_size=head.out_features
        )

    def norms(self, model: nn.Module) -> None:
        """All RMSNorms."""
        for module in model.modules():
            if isinstance(module, nn.RMSNorm):
                module.register_forward_hook(self._enter)
                if self._dim is not None:
                    tensor.all_reduce_grad_(module.weight, self._group)

    def _enter(self, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        return tensor.copy_to_tp(output, self._group, sequence_dim=self._dim, inplace=True)


def split_layers(model: Decoder, group: dist.ProcessGroup, *, shares_tokens: bool) -> None:
    """Applies tensor parallelism, and with `shares_tokens` sequence parallelism."""
    split = Splitter(group, shares_tokens=shares_tokens)
    layers: Any = model.layers
    for layer in layers:
        for name in ("q", "k", "v"):
            setattr(layer, name, split.columns(getattr(layer, name), HEAD_WIDTH))
        layer.o, layer.up, layer.down = (
            split.rows(layer.o, HEAD_WIDTH),
            split.columns(layer.up),
            split.rows(layer.down),
        )
    model.tokens = split.embedding(model.tokens)
    model.head = head = split.columns(model.head)
    model.loss = split.loss(head)
    split.norms(model)


def split_bytes(width: int, num_layers: int, num_tokens: int, *, shares_tokens: bool) -> int:
    """Bytes reduced over the ranks in a step: a rank sends 2(N-1)/N of them."""
    activations = 4 * width * num_tokens * (4 * num_layers + 2)
    norms = 4 * width * (2 * num_layers + 1) if shares_tokens else 0
    return activations + LOSS_BYTES * (num_tokens + 1) + norms


def make_pipeline(
    model: Decoder, group: dist.ProcessGroup, num_microbatches: int
) -> pipeline.Pipeline:
    """A stage for each rank."""
    options: Any = {"group": group, "count_items": Tensor.numel}
    return pipeline.Pipeline(model.blocks(), model.loss_of, "1f1b", num_microbatches, **options)


def pipeline_bytes(width: int, num_tokens: int, world_size: int) -> float:
    """Mean bytes that a rank sends in a step: activations, their gradients, the loss, a digest."""
    activations = (2 * 4 * width * num_tokens + 4) * (world_size - 1) / world_size
    return activations + 8 * (world_size - 1)
