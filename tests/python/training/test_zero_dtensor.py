"""zero.shard(stage=3) over torch's tensor parallelism: weights that are DTensors already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from full_states import full_weights, load_parts, save_parts
from ranks import in_ranks, place
from steps import train_step
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from zero_models import assert_close, same

from ringcomm.parallel import offload, zero

STEPS, CLIP = 4, 0.5


class Net(nn.Module):
    """Two split layers in each block, and a norm that is not split."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {"norm": nn.LayerNorm(8), "up": nn.Linear(8, 12), "down": nn.Linear(12, 8)}
            )
            for _ in range(2)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            layers: Any = block
            x = x + layers["down"](torch.tanh(layers["up"](layers["norm"](x))))
        out: Tensor = self.head(x)
        return out


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.01, eps=1e-4)


def step(model: nn.Module, at: int, rank: int = 0, num_ranks: int = 1) -> Tensor:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(at))
    device = next(model.parameters()).device
    return model(x.chunk(num_ranks)[rank].to(device)).square().mean()


def alone() -> tuple[dict[str, Tensor], list[float]]:
    model, norms = Net(), []
    optimizer = optimizer_of(model)
    for at in range(STEPS):
        optimizer.zero_grad()
        step(model, at).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    return model.state_dict(), norms


def split(device: Any, mesh: Any) -> Net:
    model = Net().to(device)
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    return model


@pytest.mark.parametrize("loss_scale", [None, 1024.0])
@pytest.mark.parametrize("shape", [(2, 2), (2, 1, 2)])
@in_ranks(4, fresh=True)  # torch's caches have the groups of an earlier, equal mesh
def test_as_one_process(
    rank: int, shape: tuple[int, ...], loss_scale: float | None, device: str, tmp_path: Path
) -> None:
    """FSDP, and HSDP, times tensor parallelism: steps, norms and checkpoints."""
    options: dict[str, Any] = {"clip_grad_norm": CLIP, "loss_scale": loss_scale}
    mesh = init_device_mesh(device, shape, mesh_dim_names=("dp", "fsdp", "tp")[-len(shape) :])
    data = mesh["dp", "fsdp"] if len(shape) == 3 else mesh["fsdp"]
    at = rank // shape[-1], mesh.size() // shape[-1]
    where = place(device, rank)
    model = split(where, mesh)
    sharded = zero.shard(model, optimizer_of(model), 3, mesh=data, **options)
    norms = []
    for i in range(STEPS):
        if i == 2:
            save_parts(model, sharded, tmp_path)
        train_step(sharded.scale(step(model, i, *at)), sharded)
        norms.append(sharded.grad_norm)
    found = full_weights(model)
    again = split(where, mesh)
    resumed = zero.shard(again, optimizer_of(again), 3, mesh=data, **options)
    load_parts(again, resumed, tmp_path)
    for i in range(2, STEPS):
        train_step(resumed.scale(step(again, i, *at)), resumed)
    assert same(full_weights(again), found)
    expected, own_norms = alone()
    assert norms == pytest.approx(own_norms, rel=1e-5)
    assert_close(found, expected, 2e-5)


@in_ranks(2)
def test_what_is_refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("fsdp", "tp"))
    model = split("cpu", mesh)
    sgd: Any = torch.optim.SGD(model.parameters(), 0.1)
    host = offload.Offloaded(torch.optim.SGD(model.parameters(), 0.1))
    cases: list[tuple[Any, int, dict[str, Any], str]] = [
        (sgd, 1, {"mesh": mesh["fsdp"]}, "only stage 3 without offload_weights"),
        (sgd, 2, {}, "only stage 3 without offload_weights"),
        (host, 3, {"mesh": mesh["fsdp"], "offload_weights": True}, "only stage 3 without"),
        (sgd, 3, {}, "with mesh="),
        (sgd, 3, {"mesh": mesh["tp"]}, "other dimensions of the same DeviceMesh"),
        (sgd, 3, {"mesh": init_device_mesh("cpu", (2,))}, "other dimensions of the same"),
    ]
    for optimizer, stage, options, text in cases:
        with pytest.raises(ValueError, match=text):
            zero.shard(model, optimizer, stage, **options)
    step(model, 0).backward()
    adamw = optimizer_of(model)
    adamw.step()
    with pytest.raises(ValueError, match="a new optimizer"):
        zero.shard(model, adamw, 3, mesh=mesh["fsdp"])
