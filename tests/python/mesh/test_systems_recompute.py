"""Activation checkpointing, full and selective, changes no loss of any data-parallel system."""

from __future__ import annotations

from collections.abc import Callable
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
    def __init__(self, mode: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mode = mode
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Tanh()) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        options: dict[str, Any] = {"use_reentrant": False}
        if self.mode == "selective":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, keep_products)
        for layer in self.layers:
            x = x + (layer(x) if self.mode == "none" else checkpoint(layer, x, **options))
        return x


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), LR, momentum=0.9)


class Ddp:
    def __init__(self, model: Net, folder: Path) -> None:
        self.call: Callable[[Tensor], Tensor] = DistributedDataParallel(model)
        self._optimizer: Any = sgd(model)

    def begin(self) -> None: ...

    def end(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


class Zero(Ddp):
    def __init__(self, stage: int, model: Net, folder: Path) -> None:
        self.call = model
        self._optimizer = zero.shard(model, sgd(model), stage)


class Infinity(Ddp):
    def __init__(self, model: Net, folder: Path) -> None:
        self.call = model
        own = offload.SGD(model.parameters(), LR, 0.9, to="nvme", path=folder)
        self._optimizer = zero.shard(model, own, 3, offload_weights=True)


class Served(Ddp):
    def __init__(self, model: Net, folder: Path) -> None:
        self.call = model
        self._server = ParameterServer(model, lambda p: torch.optim.SGD(p, LR, momentum=0.9))

    def begin(self) -> None:
        self._server.pull()

    def end(self) -> None:
        self._server.push()


class InBackward(Ddp):
    def __init__(self, model: Net, folder: Path) -> None:
        self.call = model
        self._optimizer = Lomo(model, LR, group=torch.distributed.group.WORLD)


SYSTEMS: dict[str, Callable[[Net, Path], Any]] = {
    "ddp": Ddp,
    "zero-1": partial(Zero, 1),
    "zero-2": partial(Zero, 2),
    "zero-3": partial(Zero, 3),
    "infinity": Infinity,
    "parameter server": Served,
    "lomo": InBackward,
}


def train(rank: int, name: str, mode: str, folder: Path) -> list[float]:
    system = SYSTEMS[name](Net(mode), folder)
    torch.manual_seed(rank)  # of dropout
    losses = []
    for step in range(STEPS):
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        system.begin()
        with activations.arena(1 << 20):
            loss = system.call(x).square().mean()
        loss.backward()
        system.end()
        losses.append(float(loss.detach()))
    if isinstance(system, Served):
        system._server.close()
    return losses


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("name", SYSTEMS)
def test_recomputation_changes_no_loss(name: str, mode: str, tmp_path: Path) -> None:
    plain = run_ranks(2, train, name, "none", tmp_path / "plain")
    found = run_ranks(2, train, name, mode, tmp_path / mode)
    assert found == plain
    assert all(losses[-1] < losses[0] for losses in found)
