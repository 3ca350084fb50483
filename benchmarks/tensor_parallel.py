#!/usr/bin/env python3
"""Measures forward and backward of a tensor-parallel model against DTensor.

    python benchmarks/tensor_parallel.py

The examples' model, the same on both ranks: by the layers of ringcomm.nn, with and without
sequence parallelism; by torch's parallelize_module over the same backend, plain, and with the
backward all_reduces of layers that share an input joined to one; and by ringcomm's layers that send
nothing. Losses must agree.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import harness  # before torch: it sets the number of threads
import torch
import torch.distributed as dist
from decoder import split_layers
from harness import Bench, Options, flag
from model import PRESETS, Llama
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from ringcomm.measure.ranks import Team
from ringcomm.measure.timing import open_default_group
from ringcomm.nn import CrossEntropyLoss
from ringcomm.parallel.tensor.splits import SplitModule

# Rows and tokens of the batch that both ranks see.
BATCHES = ((1, 64), (4, 128))
TOLERANCE = 1e-4
WORLD_SIZE = 2


def by_ringcomm_alone(model: Llama, group: dist.ProcessGroup) -> None:
    """The same layers, which send nothing; of the classes this rank's alone."""
    split_layers(model, group)
    alone, _ = dist.new_subgroups(1)
    for module in model.modules():
        if isinstance(module, SplitModule):
            module.group = alone
        elif isinstance(module, nn.RMSNorm):
            module._forward_hooks.clear()  # which enter
    model.loss = CrossEntropyLoss()


def by_dtensor(model: Llama, group: dist.ProcessGroup, *, joins_inputs: bool = False) -> None:
    """As torch's tutorial has it: five backward all_reduces a layer; two with inputs joined."""
    mesh = DeviceMesh.from_group(group, "cpu")
    columns, rows = ("wq", "wk", "wv", "ffn.w1", "ffn.w3"), ("wo", "ffn.w2")
    plan: Any = {name: ColwiseParallel() for name in columns}
    plan.update({name: RowwiseParallel() for name in rows})
    layers: Any = model.layers
    for layer in layers:
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


@dataclass(frozen=True)
class Way:
    """How the model is split.

    Attributes:
        split: in place.
        around: the context that torch needs for forward and backward.
        is_whole: whether the loss is over all classes.
    """

    split: Callable[[Llama, dist.ProcessGroup], None]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    is_whole: bool = True


WAYS = {
    "ringcomm": Way(split_layers),
    "ringcomm, tokens shared": Way(partial(split_layers, shares_tokens=True)),
    "ringcomm, nothing sent": Way(by_ringcomm_alone, is_whole=False),
    "DTensor": Way(by_dtensor, loss_parallel),
    "DTensor, inputs joined": Way(partial(by_dtensor, joins_inputs=True), loss_parallel),
}


def make_pass(way: Way, size: str, rows: int, tokens: int) -> Callable[[], float]:
    """A call that makes forward and backward passes of the same rows, and returns the loss."""
    group = dist.group.WORLD
    assert group is not None
    model = Llama(PRESETS[size])
    way.split(model, group)
    ids = torch.randint(256, (rows, tokens + 1), generator=torch.Generator().manual_seed(1))
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    if not way.is_whole:
        targets %= next(model.head.parameters()).shape[0]

    def call() -> float:
        with way.around():
            loss = model(inputs, targets)
            loss.backward()
        model.zero_grad()
        found = loss.full_tensor() if isinstance(loss, DTensor) else loss
        return float(found.detach())

    return call


def differing(team: Team, passes: dict[str, Callable[[], float]]) -> dict[str, int]:
    """On how many ranks the losses differ from the first way's. Collective."""
    losses = {name: call() for name, call in passes.items()}
    expected = losses[next(iter(losses))]
    return {
        name: sum(team.share(WAYS[name].is_whole and not abs(loss - expected) <= TOLERANCE))
        for name, loss in losses.items()
    }


def run_rank(bench: Bench, options: Options) -> None:
    """All ways in turn, for each batch; rank 0 reports."""
    open_default_group(bench.team, "ringcomm")
    for rows, tokens in BATCHES:
        passes = {name: make_pass(way, options.size, rows, tokens) for name, way in WAYS.items()}
        wrong = differing(bench.team, passes)
        bench.report(bench.race(passes, "ringcomm", wrong, rows=rows, tokens=tokens))


PROGRAM = harness.Program(
    doc=__doc__,
    kind="tensor_parallel",
    rank=run_rank,
    world=WORLD_SIZE,
    seconds=40.0,
    per="batch",
    flags=[flag("--size", str, "4.6M", "of the model", choices=list(PRESETS))],
    named=("size",),
)

if __name__ == "__main__":
    PROGRAM.run_script()
