"""DeepSpeed's ZeRO stage 2 with clipping."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from small_model import LR, ROWS, STEPS, batch, mlp
from support import report
from torch import nn

REQUIREMENTS = ("deepspeed==0.19.8",)
RANKS = 2
IS_SHORT = True


def main(folder: Path, source: Path | None) -> dict[str, list[float]]:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 1.0,
    }
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total))
    return {"losses": losses}


if __name__ == "__main__":
    report(main)
