"""The examples' Llama split over several ranks, by ringcomm's layers or torch's."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
from model import ModelConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from ringcomm.nn import (
    ColumnParallelLinear,
    CrossEntropyLoss,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from ringcomm.parallel import tensor
from ringcomm.parallel.tensor.splits import SplitModule

HEAD_WIDTH = 32


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


def send_nothing(model: Any) -> int:
    """The layers of `split_layers` without their messages; the number of this rank's classes."""
    whole = dist.group.WORLD
    assert whole is not None
    split_layers(model, whole)
    alone, _ = dist.new_subgroups(1)
    for module in model.modules():
        if isinstance(module, SplitModule):
            module.group = alone
        elif isinstance(module, nn.RMSNorm):
            module._forward_hooks.clear()  # which enter
    model.loss = CrossEntropyLoss()
    begin, end = model.head.features
    return int(end - begin)


def by_dtensor(model: Any, group: dist.ProcessGroup, *, joins_inputs: bool = False) -> None:
    """As torch's tutorial has it: five backward all_reduces a layer; two with inputs joined."""
    mesh = DeviceMesh.from_group(group, "cpu")
    columns, rows = ("wq", "wk", "wv", "ffn.w1", "ffn.w3"), ("wo", "ffn.w2")
    plan: Any = {name: ColwiseParallel() for name in columns}
    plan.update({name: RowwiseParallel() for name in rows})
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
        norms = (layer.attn_norm, layer.ffn_norm) if joins_inputs else ()
        for norm in norms:  # what PrepareModuleInput does where a module is around such layers
            norm.register_forward_hook(partial(_as_dtensor, mesh))
    ends = {
        "tok": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)


def _as_dtensor(mesh: DeviceMesh, _: nn.Module, __: Any, output: Tensor) -> DTensor:
    return DTensor.from_local(output, mesh, [Replicate()], run_check=False)
