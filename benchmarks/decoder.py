"""The examples' Llama on several ranks: tensor-parallel, or in pipeline stages; bytes of a step."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from model import Llama, ModelConfig
from torch import Tensor, nn

from ringcomm import ops
from ringcomm.nn import (
    ColumnParallelLinear,
    CrossEntropyLoss,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from ringcomm.parallel import pipeline, tensor

HEAD_WIDTH = 32
# Bytes per token that the vocabulary-parallel loss sends.
LOSS_BYTES = 24


def config_of(width: int, num_layers: int) -> ModelConfig:
    """Feed-forward networks as wide as in the examples, and heads of their own for keys."""
    num_heads = width // HEAD_WIDTH
    return ModelConfig(width, num_layers, num_heads, num_heads, 11 * width // 4)


def split_layers(model: Any, group: dist.ProcessGroup, *, shares_tokens: bool = False) -> None:
    """Applies tensor parallelism, and with `shares_tokens` sequence parallelism.

    Two all_reduces a layer each way, or as many halves of them twice. Norms, which the layers in
    parts follow, enter the region where ranks compute different things.
    """
    config, dim = model.config, 1 if shares_tokens else None
    head_dim = config.dim // config.num_heads
    heads = tensor.share_heads(config.num_heads, config.num_kv_heads, group.size())
    unit = heads.num_together * head_dim

    def columns(linear: Any, unit: int = 1, num_copies: int = 1) -> ColumnParallelLinear:
        how: Any = {"shard_multiple": unit, "num_replicas": num_copies, "copy_input": False}
        return ColumnParallelLinear.from_linear(linear, group=group, **how)

    def rows(linear: Any, unit: int = 1) -> RowParallelLinear:
        how: Any = {"shard_multiple": unit, "sequence_dim": dim}
        return RowParallelLinear.from_linear(linear, group=group, **how)

    def enter(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return tensor.copy_to_tp(output, group, sequence_dim=dim, inplace=True)

    for layer in model.layers:
        layer.wq = columns(layer.wq, unit)
        layer.wk = columns(layer.wk, head_dim, heads.num_replicas)
        layer.wv = columns(layer.wv, head_dim, heads.num_replicas)
        layer.wo = rows(layer.wo, unit)
        ffn = layer.ffn
        ffn.w1, ffn.w3, ffn.w2 = columns(ffn.w1), columns(ffn.w3), rows(ffn.w2)
    model.tok = VocabParallelEmbedding.from_embedding(model.tok, group=group, sequence_dim=dim)
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


def make_pipeline(model: Llama, group: dist.ProcessGroup, num: int) -> pipeline.Pipeline:
    """A stage for each rank, and so many micro-batches."""
    return pipeline.Pipeline(model.blocks(), ops.cross_entropy, "1f1b", num, group=group)


def pipeline_bytes(width: int, num_tokens: int, world_size: int) -> float:
    """Mean bytes that a rank sends in a step: activations, their gradients, the loss, a digest."""
    activations = (2 * 4 * width * num_tokens + 4) * (world_size - 1) / world_size
    return activations + 8 * (world_size - 1)
