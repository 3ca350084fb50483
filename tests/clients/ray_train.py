"""Ray Train's TorchTrainer, two workers, with a checkpoint."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parameters import checksums
from support import report
from torch import nn

REQUIREMENTS = ("ray[train]==2.60.0",)
RANKS = 1  # of torchrun; Ray starts the workers
IS_SHORT = False

LAUNCH = ("TORCHELASTIC_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_")
WORKERS, ROWS, BATCH, EPOCHS, LR = 2, 96, 8, 3, 0.05


def train(config: dict[str, str]) -> None:
    """What each worker runs."""
    import ray.train
    import ray.train.torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 6, generator=generator)
    loader: Any = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), BATCH, shuffle=True)
    loader = ray.train.torch.prepare_data_loader(loader)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    model = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    world: Any = dist.group.WORLD
    real = world._get_backend(torch.device("cpu")).name()
    assert real == config["expected"], f"Ray's workers use {real}"
    losses = []
    with checksums() as parameters:
        for epoch in range(EPOCHS):
            loader.sampler.set_epoch(epoch)
            for rows, target in loader:
                loss = nn.functional.mse_loss(model(rows), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
            with tempfile.TemporaryDirectory() as folder:
                torch.save(model.module.state_dict(), Path(folder) / "model.pt")
                checkpoint = ray.train.Checkpoint.from_directory(folder)
                ray.train.report({"loss": losses[-1]}, checkpoint=checkpoint)
    rank = dist.get_rank()
    found = {f"losses of worker {rank}": losses, f"parameters of worker {rank}": parameters}
    Path(config["folder"], f"worker{rank}.json").write_text(json.dumps(found))


def main(folder: Path, source: Path | None) -> dict[str, list[float]]:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    # Ray's workers inherit the environment. With torchrun's they would wait for its store.
    torchrun = {name: os.environ.pop(name) for name in [*os.environ] if name.startswith(LAUNCH)}
    expected = "ringcomm" if os.environ.get("RINGCOMM_AS_GLOO") == "1" else "gloo"
    ray.init(num_cpus=WORKERS + 1, include_dashboard=False)
    try:
        trainer = TorchTrainer(
            train,
            train_loop_config={"folder": str(folder), "expected": expected},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=WORKERS),
            run_config=RunConfig(storage_path=str(folder / "runs")),
        )
        result = trainer.fit()
    finally:
        ray.shutdown()
        os.environ.update(torchrun)
    series: dict[str, list[float]] = {"reported": [result.metrics["loss"]]}
    for rank in range(WORKERS):
        series |= json.loads((folder / f"worker{rank}.json").read_text())
    dist.init_process_group("gloo")  # for report(): a rank of torchrun has a group
    return series


if __name__ == "__main__":
    report(main)
