"""Selective recomputation, with an arena, changes no loss of any data-parallel system."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ringcomm.optim import Lomo
from ringcomm.parallel import ParameterServer, activations, offload, zero

WIDTH, STEPS, LR = 131, 4, 0.05


def keep_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


class Net(nn.Module):
    def __init__(self, is_recomputed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_recomputed = is_recomputed
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Tanh()) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        policy = partial(create_selective_checkpoint_contexts, keep_products)
        for layer in self.layers:
            if self.is_recomputed:
                x = x + checkpoint(layer, x, use_reentrant=False, context_fn=policy)
            else:
                x = x + layer(x)
        return x


def optimizer_of(name: str, model: nn.Module, folder: Path) -> Any:
    if name == "lomo":
        return Lomo(model, LR, group=torch.distributed.group.WORLD)
    if name == "infinity":
        own = offload.SGD(model.parameters(), LR, 0.9, to="nvme", path=folder)
        return zero.shard(model, own, 3, offload_weights=True)
    sgd = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    return sgd if name == "ddp" else zero.shard(model, sgd, int(name[-1]))


def train(rank: int, name: str, is_recomputed: bool, folder: Path) -> list[float]:
    model = Net(is_recomputed)
    server: Any = None
    optimizer: Any = None
    if name == "parameter server":
        server = ParameterServer(model, lambda p: torch.optim.SGD(p, LR, momentum=0.9))
    else:
        optimizer = optimizer_of(name, model, folder)
    call = DistributedDataParallel(model) if name == "ddp" else model
    torch.manual_seed(rank)  # of dropout
    losses = []
    for step in range(STEPS):
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        if server is not None:
            server.pull()
        with activations.arena(1 << 20):
            loss = call(x).square().mean()
        loss.backward()
        if server is not None:
            server.push()
        else:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if server is not None:
        server.close()
    return losses


SYSTEMS = ["ddp", "zero-1", "zero-2", "zero-3", "infinity", "parameter server", "lomo"]


@pytest.mark.parametrize("name", SYSTEMS)
def test_selective_recomputation_changes_no_loss(name: str, tmp_path: Path) -> None:
    plain = run_ranks(2, train, name, False, tmp_path / "plain")
    assert run_ranks(2, train, name, True, tmp_path / "again") == plain
    assert all(losses[-1] < losses[0] for losses in plain)
