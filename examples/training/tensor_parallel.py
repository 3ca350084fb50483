"""Tensor parallelism (Shoeybi et al. 2019): the model's layers in parts, by ``ringcomm.nn``.

An ``enter`` behind each norm and a ``leave`` in the layers that join, one pair around attention and
one around the feed-forward part, make 4 all-reduces per layer and step. The embedding and the
output layer are split along the vocabulary, and one collective merges the loss.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.nn import (
    ColumnParallelLinear,
    CrossEntropyLoss,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from ringcomm.parallel import tensor
from training.model import Llama, ModelConfig
from training.wire import all_reduce_bytes

# What the loss's collective carries of each token.
LOSS_BYTES = 24


def split(model: Llama, group: dist.ProcessGroup, *, shares_tokens: bool = False) -> None:
    """Puts this rank's parts in place of a whole model's layers.

    Args:
        model: the same on all ranks.
        group: whose ranks all see the same rows.
        shares_tokens: have the ranks share the tokens between layers (sequence parallelism).

    Raises:
        ValueError: the ranks cannot share the heads.
    """
    config, dim = model.config, 1 if shares_tokens else None
    heads = tensor.share_heads(config.num_heads, config.num_kv_heads, group.size())
    unit, width = heads.num_together * config.head_dim, config.head_dim

    def columns(linear: Any, unit: int = 1, num_copies: int = 1) -> ColumnParallelLinear:
        return ColumnParallelLinear.from_linear(
            linear, group=group, unit=unit, num_copies=num_copies, enters=False
        )

    def rows(linear: Any, unit: int = 1) -> RowParallelLinear:
        return RowParallelLinear.from_linear(linear, group=group, unit=unit, sequence_dim=dim)

    def enter(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return tensor.enter(output, group, sequence_dim=dim)

    layers: Any = model.layers
    for layer in layers:
        layer.wq = columns(layer.wq, unit)
        layer.wk = columns(layer.wk, width, heads.num_copies)
        layer.wv = columns(layer.wv, width, heads.num_copies)
        layer.wo = rows(layer.wo, unit)
        layer.w1, layer.w3, layer.w2 = columns(layer.w1), columns(layer.w3), rows(layer.w2)
    whole: Any = model.tok
    model.tok = VocabParallelEmbedding.from_embedding(whole, group=group, sequence_dim=dim)
    model.head = columns(model.head)
    model.loss = CrossEntropyLoss(
        group=group, vocab_start=model.head.features[0], vocab_size=config.vocab_size
    )
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.register_forward_hook(enter)
            if shares_tokens:
                tensor.sum_gradients(module.weight, group)


def step_bytes(
    config: ModelConfig,
    num_tokens: int,
    group: dist.ProcessGroup,
    *,
    shares_tokens: bool = False,
    recomputes: bool = False,
) -> float:
    """What a rank sends in a step, as the ring's formulas have it.

    A layer that is computed again stops in front of its last all_reduce.
    """
    world_size = group.size()
    heads = tensor.share_heads(config.num_heads, config.num_kv_heads, world_size)
    per_layer = 5 if recomputes else 4
    activations = 4 * num_tokens * config.dim * (per_layer * config.num_layers + 2)
    loss = LOSS_BYTES * (num_tokens + 1)  # one more that compares the ranks' calls
    norms = 4 * config.dim * (2 * config.num_layers + 1) if shares_tokens else 0
    kv_elems = 2 * config.dim * config.num_kv_heads * config.head_dim // world_size
    copies = all_reduce_bytes(4 * kv_elems * heads.num_copies, heads.num_copies)
    return all_reduce_bytes(activations + loss + norms, world_size) + copies * config.num_layers
