"""sentence-transformers' Trainer with negatives gathered from all ranks."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from parameters import checksums
from support import report
from tiny_llama import VOCABULARY, text, tokenizer

REQUIREMENTS = ("sentence-transformers==6.2.0", "datasets==5.2.0")
RANKS = 2
IS_SHORT = False

ROWS, STEPS = 48, 6


def main(folder: Path, source: Path | None) -> dict[str, list[float]]:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import MultipleNegativesRankingLoss
    from sentence_transformers.models import Pooling, Transformer
    from transformers import BertConfig, BertModel

    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=4,
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=0.01,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=3,
    )
    saved = folder / "bert"
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    BertModel(config).save_pretrained(saved)  # which only rank 0 does
    if dist.get_rank() == 0:
        tokenizer().save_pretrained(saved)
    dist.barrier()
    words = Transformer(str(saved), max_seq_length=32)
    pooling = Pooling(words.get_word_embedding_dimension())
    model = SentenceTransformer(modules=[words, pooling], device="cpu")
    generator = torch.Generator().manual_seed(1)
    rows = [{"anchor": text(generator, 5), "positive": text(generator, 7)} for _ in range(ROWS)]
    trainer = SentenceTransformerTrainer(
        model,
        arguments,
        train_dataset=Dataset.from_list(rows),
        loss=MultipleNegativesRankingLoss(model, gather_across_devices=True),
    )
    with checksums() as parameters:
        trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": logged if dist.get_rank() == 0 else [], "parameters": parameters}


if __name__ == "__main__":
    report(main)
