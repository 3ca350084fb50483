"""Trainer of transformers with ringcomm's Lomo, and clipping by norm."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from parameters import checksum
from support import report
from tiny_llama import VOCABULARY, tiny_llama

REQUIREMENTS = ("transformers==5.23.0",)
RANKS = 2
IS_SHORT = False

ROWS, STEPS, LR = 32, 6, 0.05


def main(folder: Path, source: Path | None) -> dict[str, list[float]]:
    from transformers import Trainer, TrainingArguments

    from ringcomm.integrations.transformers import register
    from ringcomm.optim import Lomo

    register()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (ROWS, 12), generator=generator)
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=2,
        max_grad_norm=0.5,
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=LR,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    model = tiny_llama()
    optimizer = Lomo(model, LR, group=dist.group.WORLD, clip_grad_norm=0.5)
    data = [{"input_ids": row, "labels": row} for row in ids]
    trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": losses if dist.get_rank() == 0 else [],  # only rank 0 logs
        "parameters": [checksum(list(model.parameters()))],
    }


if __name__ == "__main__":
    report(main)
