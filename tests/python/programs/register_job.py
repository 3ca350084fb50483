"""Accelerate or Trainer over two ranks, after register(): backend by name, and each optimizer.

All train the same rows with accumulation and clipping, and differ in what reduces the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from program_job import LR, arguments
from torch import nn
from transformers import Trainer, TrainingArguments

STEPS, PARTS, CLIP = 4, 2, 0.5
SYSTEMS = ("DDP", "Lomo", "zero 2")
Report = dict[str, Any]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.layers(x), labels)}


def rows(num: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(num, 6, generator=generator)
    return [{"x": row, "labels": row.sum().view(1)} for row in drawn]


def lomo_options() -> dict[str, Any]:
    return {"group": dist.group.WORLD, "clip_grad_norm": CLIP, "accumulation_steps": PARTS}


def optimizer_of(system: str, model: nn.Module) -> Any:
    from ringcomm.optim import Lomo
    from ringcomm.parallel import zero

    if system == "Lomo":
        return Lomo(model, LR, **lomo_options())
    sgd = torch.optim.SGD(model.parameters(), LR)
    return sgd if system == "DDP" else zero.shard(model, sgd, 2)


def result(wrapped: Any, model: nn.Module, losses: list[float]) -> Report:
    weights = torch.cat([param.detach().flatten() for param in model.parameters()]).tolist()
    is_wrapped = isinstance(wrapped, nn.parallel.DistributedDataParallel)
    return {"is wrapped": is_wrapped, "weights": weights, "losses": losses}


def by_accelerate(folder: Path) -> Iterator[tuple[str, Report]]:
    from ringcomm.integrations.accelerate import register

    register()
    register()  # once is enough
    for system in SYSTEMS:
        named = InitProcessGroupKwargs(backend="ringcomm")
        options: dict[str, Any] = {"gradient_accumulation_steps": PARTS}
        accelerator = Accelerator(cpu=True, kwargs_handlers=[named], **options)
        assert accelerator.state.backend == "ringcomm"
        loader: Any = torch.utils.data.DataLoader(rows(STEPS * PARTS * 2 * 2), batch_size=2)
        model = Model()
        wrapped, optimizer, loader = accelerator.prepare(model, optimizer_of(system, model), loader)
        losses = []
        for batch in loader:
            with accelerator.accumulate(wrapped):
                loss = wrapped(**batch)["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        yield system, result(wrapped, model, losses)


def by_trainer(folder: Path) -> Iterator[tuple[str, Report]]:
    from ringcomm.integrations.transformers import register
    from ringcomm.optim import Lomo

    register()
    for system in (*SYSTEMS, "Lomo by class"):
        options: dict[str, Any] = {"gradient_accumulation_steps": PARTS, "max_grad_norm": CLIP}
        options |= {"max_steps": STEPS, "lr_scheduler_type": "constant"}
        args = arguments(TrainingArguments, folder, ddp_backend="ringcomm", **options)
        model = Model()
        data = rows(STEPS * PARTS * 2 * 2)
        if system == "Lomo by class":
            of_class = {"model": model, "lr": LR, **lomo_options()}
            how: dict[str, Any] = {"optimizer_cls_and_kwargs": (Lomo, of_class)}
        elif system == "Lomo":
            how = {"optimizers": (optimizer_of(system, model), None)}
        else:
            how = {}
        trainer = Trainer(model, args, train_dataset=data, **how)
        if not how:  # zero.shard() after Trainer has moved the model
            trainer.optimizer = optimizer_of(system, model)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        yield system, result(trainer.model_wrapped, model, losses)


def run(rank: int, library: str, folder: Path) -> Report:
    """In a process without a group, which the library makes; torchrun would give it a port."""
    place: dict[str, Any] = {"init_method": f"file://{folder}/store", "rank": rank}
    dist.init_process_group = partial(dist.init_process_group, world_size=2, **place)
    report: Report = dict({"accelerate": by_accelerate, "trainer": by_trainer}[library](folder))
    report["backend"] = dist.get_backend()
    return report
