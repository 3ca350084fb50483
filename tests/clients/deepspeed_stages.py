"""DeepSpeed's ZeRO at stages 0 to 3, in bfloat16 and with the optimizer offloaded to the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parameters import checksum
from small_model import LR, ROWS, STEPS, batch, mlp
from support import report
from torch import nn

REQUIREMENTS = ("deepspeed==0.19.8",)
RANKS = 2
IS_SHORT = False
LIMIT_S = 600.0  # the first run compiles DeepSpeed's Adam

# The stage, the dtype, and whether the optimizer is offloaded.
KINDS = (
    (0, "float32", False),
    (1, "float32", False),
    (2, "float32", False),
    (3, "float32", False),
    (2, "bfloat16", False),
    (3, "bfloat16", False),
    (1, "float32", True),
    (2, "float32", True),
    (3, "float32", True),
)


def train(stage: int, dtype: str, is_offloaded: bool) -> tuple[list[float], list[float]]:
    """The losses of all ranks, summed, and a checksum of all weights after each step."""
    import deepspeed

    model = mlp()
    optimizer: Any = torch.optim.Adam(model.parameters(), LR)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 100},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": dtype == "bfloat16"},
    }
    if is_offloaded:  # with DeepSpeed's own Adam
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        config["optimizer"] = {"type": "Adam", "params": {"lr": LR}}
        optimizer = None
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    losses, parameters = [], []
    for step in range(2 * STEPS):
        x, y = batch(step)
        loss = nn.functional.mse_loss(engine(x.to(getattr(torch, dtype))).float(), y)
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total))
        weights = [*engine.module.parameters()]
        with deepspeed.zero.GatheredParameters(weights, enabled=stage == 3):
            parameters.append(checksum(weights))
    return losses, parameters


def main(folder: Path, source: Path | None) -> dict[str, list[float]]:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    found: dict[str, list[float]] = {}
    for stage, dtype, is_offloaded in KINDS:
        name = f"stage {stage} {dtype}{' offload' * is_offloaded}"
        found[f"{name} losses"], found[f"{name} parameters"] = train(stage, dtype, is_offloaded)
    return found


if __name__ == "__main__":
    report(main)
