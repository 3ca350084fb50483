"""The model of the measurements in parts: layers over ranks, and stages."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.bench.decoder import HEAD_WIDTH, Decoder
from ringcomm.nn import (
    ColumnParallelLinear,
    CrossEntropyLoss,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from ringcomm.parallel import pipeline, tensor

# What the loss over classes in parts sends of each token.
LOSS_BYTES = 24


def split_layers(model: Decoder, group: dist.ProcessGroup, *, shares_tokens: bool) -> None:
    """Tensor parallelism; with `shares_tokens` sequence parallelism, too."""
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
    """What is reduced over the ranks in a step: a rank sends 2(N-1)/N of it."""
    activations = 4 * width * num_tokens * (4 * num_layers + 2)
    norms = 4 * width * (2 * num_layers + 1) if shares_tokens else 0
    return activations + LOSS_BYTES * (num_tokens + 1) + norms


def make_pipeline(
    model: Decoder, group: dist.ProcessGroup, num_microbatches: int
) -> pipeline.Pipeline:
    """A stage for each rank."""
    return pipeline.Pipeline(model.blocks(), model.loss_of, "1f1b", num_microbatches, group=group)


def pipeline_bytes(width: int, num_tokens: int, world_size: int) -> float:
    """What a rank sends in a step, as a mean: activations, their gradients, the loss, a digest."""
    activations = (2 * 4 * width * num_tokens + 4) * (world_size - 1) / world_size
    return activations + 8 * (world_size - 1)
