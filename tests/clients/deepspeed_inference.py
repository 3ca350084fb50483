"""DeepSpeed's init_inference: a Llama that DeepSpeed splits by itself generates on two ranks."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from support import report
from tiny_llama import VOCABULARY, tiny_llama

REQUIREMENTS = ("deepspeed==0.19.8", "transformers==5.23.0")
RANKS = 2
IS_SHORT = False
LIMIT_S = 600.0  # over Gloo the first run compiles DeepSpeed's shared-memory operator

NEW_TOKENS = 12
DTYPES = ("float32", "bfloat16")


def main(folder: Path, source: Path | None) -> dict[str, list[float]]:
    import deepspeed

    if os.environ.get("RINGCOMM_AS_GLOO"):
        page = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "serve.md"
        section = page.read_text(encoding="utf-8").partition("## DeepSpeed\n")[2]
        recipe: dict[str, Any] = {}
        exec(re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0], recipe)
        recipe["register"]()
    deepspeed.init_distributed(dist_backend="gloo")
    ids = torch.randint(3, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(1))
    found: dict[str, list[float]] = {}
    for name in DTYPES:
        engine = deepspeed.init_inference(
            tiny_llama().eval(), tensor_parallel={"tp_size": RANKS}, dtype=getattr(torch, name)
        )
        with torch.no_grad():
            logits = engine(ids).logits
            tokens = engine.module.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
            )
        num_weights = sum(weight.numel() for weight in engine.module.parameters())
        found[f"{name} logits"] = logits.flatten().tolist()
        found[f"{name} tokens"] = [float(token) for token in tokens.flatten()]
        found[f"{name} weights of a rank"] = [float(num_weights)]
    return found


if __name__ == "__main__":
    report(main)
