"""torch's ZeroRedundancyOptimizer over Adam, beside DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from small_model import STEPS, batch, mlp, sums_of_weights
from support import report
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

REQUIREMENTS = ()
RANKS = 2
IS_SHORT = False
ALSO_ON = (4, 1e-5)


def main(folder: Path, source: Path | None) -> dict[str, list[float]]:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(mlp())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-2
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
