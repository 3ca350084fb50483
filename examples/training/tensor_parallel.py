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
from training.model import Layer, Llama, SwiGLU
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
            linear, group=group, shard_multiple=unit, num_replicas=num_copies, copy_input=False
        )

    def rows(linear: Any, unit: int = 1) -> RowParallelLinear:
        return RowParallelLinear.from_linear(
            linear, group=group, shard_multiple=unit, sequence_dim=dim
        )

    def enter(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return tensor.copy_to_tp(output, group, sequence_dim=dim, inplace=True)

    layers: Any = model.layers
    for layer in layers:
        layer.wq = columns(layer.wq, unit)
        layer.wk = columns(layer.wk, width, heads.num_replicas)
        layer.wv = columns(layer.wv, width, heads.num_replicas)
        layer.wo = rows(layer.wo, unit)
        ffn = layer.ffn
        if isinstance(ffn, SwiGLU):
            ffn.w1, ffn.w3, ffn.w2 = columns(ffn.w1), columns(ffn.w3), rows(ffn.w2)
    whole: Any = model.tok
    model.tok = VocabParallelEmbedding.from_embedding(whole, group=group, sequence_dim=dim)
    model.head = columns(model.head)
    model.loss = CrossEntropyLoss(
        group=group, vocab_start=model.head.features[0], vocab_size=config.vocab_size
    )
    model.norm.register_forward_hook(enter)
    for layer in layers:
        layer.attn_norm.register_forward_hook(enter)
        if isinstance(layer.ffn, SwiGLU):  # experts are whole, on all ranks
            layer.ffn_norm.register_forward_hook(enter)
    if shares_tokens:
        for module in model.modules():
            if not isinstance(module, tensor.SplitModule):
                for param in module.parameters(recurse=False):
                    tensor.all_reduce_grad_(param, group)


def step_bytes(
    model: Llama,
    part: nn.Module,
    num_tokens: int,
    group: dist.ProcessGroup,
    *,
    num_microbatches: int = 1,
    recomputes: bool = False,
) -> float:
    """What a rank sends in a step for its part of a model, as the ring's formulas have it.

    Args:
        model: as split() left it.
        part: the same, or what this rank has of it.
        num_tokens: of all micro-batches.
        group: as split() had it.
        num_microbatches: so often gradients are summed, and the loss is computed.
        recomputes: whether layers are computed again, which stops in front of their last leave.
    """
    modules = set(part.modules())
    num_calls = (model.tok in modules) + (model.norm in modules)
    for layer in modules:
        if isinstance(layer, Layer):
            num_calls += (4 if isinstance(layer.ffn, SwiGLU) else 2) + recomputes
    total = all_reduce_bytes(4 * num_tokens * model.config.dim * num_calls, group.size())
    if model.head in modules:  # one more than tokens compares the ranks' calls
        total += all_reduce_bytes(LOSS_BYTES * (num_tokens + num_microbatches), group.size())
    for param in part.parameters():
        over = tensor.summed_over(param)
        if over is not None:
            total += num_microbatches * all_reduce_bytes(param.nbytes, over.size())
    return total
