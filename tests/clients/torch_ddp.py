"""torch's DistributedDataParallel with AdamW, accumulation in no_sync, and clipping."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from small_model import STEPS, batch, mlp, sums_of_weights
from support import report
from torch import nn
from torch.nn.parallel import DistributedDataParallel

REQUIREMENTS = ()
RANKS = 2
IS_SHORT = True
ALSO_ON = (4, 1e-5)


def main(folder: Path, source: Path | None) -> dict[str, list[float]]:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for step in range(2 * STEPS):
        x, y = batch(step)
        with nullcontext() if step % 2 else model.no_sync():
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
        losses.append(float(loss.detach()))
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, "sums of weights": sums_of_weights(model)}


if __name__ == "__main__":
    report(main)
