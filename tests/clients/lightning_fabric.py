"""Lightning Fabric, with DDPStrategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from small_model import LR, STEPS, batch, mlp
from support import report
from torch import nn

REQUIREMENTS = ("lightning==2.6.6",)
RANKS = 2
IS_SHORT = True


def main(folder: Path, source: Path | None) -> dict[str, list[float]]:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import DDPStrategy

    strategy = DDPStrategy(
        process_group_backend="gloo", cluster_environment=TorchElasticEnvironment()
    )
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = mlp()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), LR))
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        loss = nn.functional.mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean: Any = fabric.all_reduce(loss.detach(), reduce_op="mean")
        losses.append(float(mean))
    return {"losses": losses}


if __name__ == "__main__":
    report(main)
