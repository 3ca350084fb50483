"""Trainer of transformers, with DistributedDataParallel."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_model import LR, ROWS, STEPS, mlp
from support import report
from torch import Tensor, nn

REQUIREMENTS = ("transformers==5.23.0", "accelerate==1.15.0")
RANKS = 2
IS_SHORT = True
ALSO_ON = (4, 1e-5)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.layers(x), labels)}


def main(folder: Path, source: Path | None) -> dict[str, list[float]]:
    from transformers import Trainer, TrainingArguments

    generator = torch.Generator().manual_seed(1)
    num_rows = int(os.environ["WORLD_SIZE"]) * ROWS * STEPS
    rows = [torch.randn(6, generator=generator) for _ in range(num_rows)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=ROWS,
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=LR,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    dataset: Any = [{"x": row, "labels": row.sum().view(1)} for row in rows]
    trainer = Trainer(Model(), arguments, train_dataset=dataset)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses if dist.get_rank() == 0 else []}  # only rank 0 logs


if __name__ == "__main__":
    report(main)
