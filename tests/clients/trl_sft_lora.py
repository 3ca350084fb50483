"""TRL's SFTTrainer on PEFT's LoRA of a Llama, with clipping and accumulation."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from parameters import checksums
from support import report
from tiny_llama import text, tiny_llama, tokenizer

REQUIREMENTS = ("trl==1.16.0", "peft==0.21.2")
RANKS = 2
IS_SHORT = False

ROWS, STEPS = 32, 6


def main(folder: Path, source: Path | None) -> dict[str, list[float]]:
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    generator = torch.Generator().manual_seed(1)
    rows = [{"text": text(generator, 6 + idx % 5)} for idx in range(ROWS)]
    arguments = SFTConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=0.01,
        max_length=32,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=3,
    )
    trainer = SFTTrainer(
        tiny_llama(),
        arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1),
    )
    with checksums() as parameters:
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    is_first = dist.get_rank() == 0  # only rank 0 logs
    return {
        "losses": [entry["loss"] for entry in logged] if is_first else [],
        "gradient norms": [entry["grad_norm"] for entry in logged] if is_first else [],
        "parameters": parameters,
    }


if __name__ == "__main__":
    report(main)
