"""transformers' tp_plan="auto": a Llama that trains and generates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support import report
from tiny_llama import VOCABULARY, tiny_llama

REQUIREMENTS = ("transformers==5.23.0",)
RANKS = 2
IS_SHORT = False

LR, STEPS, NEW_TOKENS = 0.05, 4, 12


def main(folder: Path, source: Path | None) -> dict[str, list[float]]:
    from transformers import AutoModelForCausalLM

    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        tiny_llama().save_pretrained(folder / "model")
    dist.barrier()
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", tp_plan="auto")
    optimizer = torch.optim.SGD(model.parameters(), LR, foreach=False)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (2, 8), generator=generator)  # the same on all ranks
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    tokens = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
    )
    return {"losses": losses, "tokens": [float(token) for token in tokens.flatten()]}


if __name__ == "__main__":
    report(main)
