"""torch's local SGD: DDP's hook, and weights that are averaged every two steps."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from small_model import LR, STEPS, batch, mlp, sums_of_weights
from support import report
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

REQUIREMENTS = ()
RANKS = 2
IS_SHORT = False
ALSO_ON = (4, 1e-5)


def main(folder: Path, source: Path | None) -> dict[str, list[float]]:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(mlp())
    alone = dist.new_subgroups(1)[0]
    state = PostLocalSGDState(dist.group.WORLD, subgroup=alone, start_localSGD_iter=2)
    model.register_comm_hook(state, post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), LR), PeriodicModelAverager(period=2, warmup_steps=2)
    )
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, "sums of weights": sums_of_weights(model)}


if __name__ == "__main__":
    report(main)
