"""Lightning Fabric's ModelParallelStrategy: a model sharded by FSDP2, saved and loaded."""

from __future__ import annotations

from pathlib import Path

import torch
from parameters import checksum
from small_model import LR, STEPS, batch, mlp
from support import report
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

REQUIREMENTS = ("lightning==2.6.6",)
RANKS = 2
IS_SHORT = False


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    assert isinstance(model, nn.Sequential)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["data_parallel"])
    return model


def main(folder: Path, source: Path | None) -> dict[str, list[float]]:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(
        shard, data_parallel_size=RANKS, tensor_parallel_size=1, process_group_backend="gloo"
    )
    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(mlp())
    optimizer = fabric.setup_optimizers(torch.optim.Adam(model.parameters(), LR))
    losses, parameters = [], []

    def train() -> None:
        for step in range(STEPS):
            x, y = batch(step)
            loss = nn.functional.mse_loss(model(x), y)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
            losses.append(float(mean))
            parameters.append(checksum([*model.parameters()]))

    train()
    state = {"model": model, "optimizer": optimizer}
    fabric.save(folder / "checkpoint", state)
    train()
    fabric.load(folder / "checkpoint", state)
    train()  # the same steps again
    assert parameters[STEPS : 2 * STEPS] == parameters[2 * STEPS :]
    return {"losses": losses, "parameters": parameters}


if __name__ == "__main__":
    report(main)
