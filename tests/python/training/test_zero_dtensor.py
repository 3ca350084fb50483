"""zero.shard(stage=3) over torch's tensor parallelism: weights that are DTensors already."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from ranks import in_ranks
from rows import Row, Training, check, squared
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ringcomm.parallel import offload, zero


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


@cache
def mesh_of(device: str, shape: tuple[int, ...]) -> Any:
    return init_device_mesh(device, shape, mesh_dim_names=("dp", "fsdp", "tp")[-len(shape) :])


def split(mesh: Any, device: Any = "cpu") -> Net:
    model = Net().to(device)
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    return model


def inputs(step: int, rank: int, _: int) -> tuple[Tensor, Tensor]:
    """Of two data ranks, each of two tensor-parallel ones."""
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step)).chunk(2)[rank // 2]
    return x, x


def resumed(made: Training) -> None:
    made.train(range(2))
    made.reload(in_parts=True, options=made.row.options)
    made.train(range(2, 4))


@pytest.mark.parametrize("loss_scale", [None, 1024.0])
@pytest.mark.parametrize("shape", [(2, 2), (2, 1, 2)])
@in_ranks(4, fresh=True)  # torch's caches have the groups of an earlier, equal mesh
def test_as_one_process(
    rank: int, shape: tuple[int, ...], loss_scale: float | None, device: str
) -> None:
    """FSDP, and HSDP, times tensor parallelism: steps, norms and checkpoints."""

    def options(made: Training) -> dict[str, Any]:
        found: dict[str, Any] = {"clip_grad_norm": 0.5, "loss_scale": loss_scale}
        if not made.is_alone:
            mesh = mesh_of(device, shape)
            found["mesh"] = mesh["dp", "fsdp"] if len(shape) == 3 else mesh["fsdp"]
        return found

    row = Row(
        resumed,
        Net,
        optimizer_of,
        on_ranks=lambda made: split(mesh_of(device, shape), made.device),
        loss=squared,
        batch=inputs,
        options=options,
        num_ranks=4,
        atol=2e-5,
    )
    check(rank, row, "zero 3", device)


@in_ranks(2)
def test_what_is_refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("fsdp", "tp"))
    model = split(mesh)
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
    squared(model, *inputs(0, 0, 1)).backward()
    adamw = optimizer_of(model)
    adamw.step()
    with pytest.raises(ValueError, match="a new optimizer"):
        zero.shard(model, adamw, 3, mesh=mesh["fsdp"])
