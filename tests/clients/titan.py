"""torchtitan's Llama debug model on CPUs: what titan_*.py share, and what is replaced for a CPU.

torchtitan is for GPUs. The device's functions, FlexAttention (torch has no backward of it for CPUs)
and, before torch 2.14, dist.set_timeout are replaced, for both backends alike. The text is made up,
because the one of torchtitan's repository is not in its wheel.
"""

from __future__ import annotations

import json
import os
import random
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

# torchtitan asks these while it is imported.
for _name, _answer in {
    "current_device": 0,
    "get_device_name": "cpu",
    "get_device_properties": SimpleNamespace(total_memory=1 << 34),
    "reset_peak_memory_stats": None,
    "empty_cache": None,
    "memory_stats": {},
}.items():
    setattr(torch.cpu, _name, lambda *_, answer=_answer: answer)
torch._utils._get_available_device_type = lambda: "cpu"

from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from torchtitan.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

STEPS = 6
NUM_WORDS = 400


def attend(q: Any, k: Any, v: Any, **options: Any) -> tuple[torch.Tensor, None]:
    """flex_attention of torchtitan, with a causal mask instead of that of documents."""
    grouped = options["enable_gqa"]
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped), None


def set_timeout(timeout: timedelta, group: Any = None) -> None:
    """torch.distributed.set_timeout of torch 2.14."""
    group = group or dist.group.WORLD
    group.set_timeout(timeout)


FlexAttention._compiled_flex_attn = attend
if not hasattr(dist, "set_timeout"):
    vars(dist)["set_timeout"] = set_timeout


def write_assets(folder: Path) -> None:
    """A tokenizer of whole words, and a text of sentences with few successors of each word."""
    draw = random.Random(0)
    words = [f"w{number}" for number in range(NUM_WORDS)]
    follow = {word: draw.choices(words, k=4) for word in words}
    vocabulary = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (folder / "text").mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    with (folder / "text" / "data.json").open("w") as file:
        for _ in range(200):
            text = [draw.choice(words)]
            while len(text) < 200:
                text.append(draw.choice(follow[text[-1]]))
            file.write(json.dumps({"text": " ".join(text)}) + "\n")


def train(folder: Path, plain_sum: bool = True, **parallelism: int) -> dict[str, list[float]]:
    """Losses and norms of gradients of STEPS steps; makes and destroys the default group."""
    os.environ["HF_DATASETS_CACHE"] = os.environ["HF_HOME"] = str(folder)
    assets = folder / f"assets{os.environ['RANK']}"
    if not assets.exists():
        write_assets(assets)
    config = llama3_debugmodel()
    config.hf_assets_path = str(assets)
    config.dataloader.dataset_path = str(assets / "text")
    config.dump_folder = str(folder)
    config.training.local_batch_size = 2
    config.training.seq_len = 128
    config.training.steps = STEPS
    config.training.disable_cuda_graphs = True
    config.validator.enable = False
    config.comm.trace_buf_size = 0
    config.comm.init_timeout_seconds = config.comm.train_timeout_seconds = 60
    config.debug.seed = 7
    config.parallelism.spmd_backend = "partial_dtensor"  # the default needs a later torch than 2.13
    for name, degree in parallelism.items():
        setattr(config.parallelism, name, degree)
    trainer = config.build()
    if plain_sum:
        for model in trainer.model_parts:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)
    losses, norms = [], []

    def log(step: int, mean: float, largest: float, norm: float, **_: Any) -> None:
        losses.append(mean)
        norms.append(norm)

    trainer.metrics_processor.log = log
    trainer.train()
    trainer.close()
    dist.destroy_process_group()
    return {"losses": losses, "norms": norms}
