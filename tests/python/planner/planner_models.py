"""A decoder of the planner's form, whole and in parts, and what its training keeps alive."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ringcomm
from ringcomm.nn import (
    ColumnParallelLinear,
    CrossEntropyLoss,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from ringcomm.parallel import tensor
from ringcomm.planner.models import ModelShape

SHAPE = ModelShape(
    "small", layers=3, hidden=64, heads=8, kv_heads=4, ffn=150, vocab=131, context=32
)
BATCH = 2


class Layer(nn.Module):
    """Grouped queries and a gated feed-forward layer; parameters in the order of Llama."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        h, kv = shape.hidden, shape.kv_width

        def linear(inputs: int, outputs: int) -> Any:
            return nn.Linear(inputs, outputs, bias=False)

        self.q, self.k, self.v = linear(h, shape.query_width), linear(h, kv), linear(h, kv)
        self.o = linear(shape.query_width, h)
        self.gate, self.up = linear(h, shape.ffn), linear(h, shape.ffn)
        self.down = linear(shape.ffn, h)
        self.norm1, self.norm2 = nn.RMSNorm(h), nn.RMSNorm(h)

    def enter(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(self.norm1(x))
        q, k, v = (
            w(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for w in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.enter(self.norm2(x))
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class Decoder(nn.Module):
    def __init__(self, shape: ModelShape = SHAPE, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok: Any = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head: Any = nn.Linear(shape.hidden, shape.vocab, bias=False)
        self.loss: Any = CrossEntropyLoss()
        self.is_checkpointed = is_checkpointed

    def forward(self, ids: Tensor) -> Tensor:
        given, wanted = ids[:, :-1], ids[:, 1:]
        x = self.tok(given)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
        loss: Tensor = self.loss(self.head(self.norm(x)).flatten(0, 1), wanted.flatten())
        return loss


class SplitLayer(Layer):
    sequence_dim: int | None = None

    def enter(self, x: Tensor) -> Tensor:
        return tensor.copy_to_tp(x, sequence_dim=self.sequence_dim)


def split(model: Decoder, *, is_sequence_split: bool) -> Decoder:
    """This rank's part among all ranks."""
    dim = 1 if is_sequence_split else None
    model.tok = VocabParallelEmbedding.from_embedding(model.tok, sequence_dim=dim)
    layers: Any = model.layers
    for layer in layers:
        layer.__class__ = SplitLayer
        layer.sequence_dim = dim
        for name in ("q", "k", "v", "gate", "up"):
            unit = layer.head_dim if name in "qkv" else 1
            whole = getattr(layer, name)
            part = ColumnParallelLinear.from_linear(whole, copy_input=False, shard_multiple=unit)
            setattr(layer, name, part)
        layer.o = RowParallelLinear.from_linear(
            layer.o, shard_multiple=layer.head_dim, sequence_dim=dim
        )
        layer.down = RowParallelLinear.from_linear(layer.down, sequence_dim=dim)
    if is_sequence_split:
        for module in model.modules():
            if isinstance(module, nn.RMSNorm):
                tensor.all_reduce_grad_(module.weight)
    model.head = ColumnParallelLinear.from_linear(model.head, sequence_dim=dim)
    model.loss = CrossEntropyLoss(
        group=torch.distributed.group.WORLD, num_columns=model.head.weight.shape[0]
    )
    return model


def rows(seed: int = 0, shape: ModelShape = SHAPE) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(shape.vocab, (BATCH, shape.context + 1), generator=generator)


def sent_bytes() -> int:
    return sum(entry["sent_bytes"] for entry in ringcomm.stats().values())


def saved_bytes(model: nn.Module, ids: Tensor) -> int:
    """What a forward pass keeps for the backward pass: live storages, each once, no weights."""
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}
    kept: dict[int, tuple[int, Tensor]] = {}

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes(), saved
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        model(ids)
    return sum(num_bytes for num_bytes, _ in kept.values())
