"""The programs of test_clients.py: each trains over Gloo with one library."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

LR, STEPS, ROWS = 0.05, 6, 4


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    x = torch.randn(ROWS, 6, generator=generator)
    return x, x.sum(1, keepdim=True)


def accelerate_losses(folder: Path) -> list[float]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)  # names no backend
    model = mlp()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), LR))
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.layers(x), labels)}


def trainer_losses(folder: Path) -> list[float]:
    from transformers import Trainer, TrainingArguments

    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(6, generator=generator) for _ in range(2 * ROWS * STEPS)]
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
    return losses if dist.get_rank() == 0 else []  # only rank 0 logs


def lightning_losses(folder: Path) -> list[float]:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import DDPStrategy

    strategy = DDPStrategy(
        process_group_backend="gloo", cluster_environment=TorchElasticEnvironment()
    )
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = mlp()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), LR))
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        loss = nn.functional.mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean: Any = fabric.all_reduce(loss.detach(), reduce_op="mean")
        losses.append(float(mean))
    return losses


def deepspeed_losses(folder: Path) -> list[float]:
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
    return losses


CLIENTS = {
    "accelerate": accelerate_losses,
    "lightning": lightning_losses,
    "deepspeed": deepspeed_losses,
    "transformers": trainer_losses,
}


def main(client: str, folder: Path) -> None:
    losses = CLIENTS[client](folder)
    group: Any = dist.group.WORLD
    real = group._get_backend(torch.device("cpu")).name()
    report = {"losses": losses, "named": dist.get_backend(), "real": real}
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]))
