"""A loop of Accelerate with clipping."""

from __future__ import annotations

from pathlib import Path

import torch
from small_model import LR, STEPS, batch, mlp
from support import report
from torch import nn

REQUIREMENTS = ("accelerate==1.15.0",)
RANKS = 2
IS_SHORT = True
ALSO_ON = (4, 1e-5)


def main(folder: Path, source: Path | None) -> dict[str, list[float]]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)  # names no backend
    model = mlp()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), LR))
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return {"losses": losses}


if __name__ == "__main__":
    report(main)
