"""A model that clients split by FSDP2 and tensor parallelism of torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

WIDTH, ROWS = 16, 8


class Block(nn.Module):
    """A norm, and two linear layers around a nonlinearity."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.tanh(self.wide(self.norm(x))))


def make(mesh: DeviceMesh, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model sharded over "data" of a mesh, and split over "tensor" if the mesh has that."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(WIDTH, 1))
    names = mesh.mesh_dim_names or ()
    for block in list(model)[:3]:
        if "tensor" in names:
            plan = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
            parallelize_module(block, mesh["tensor"], plan)
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


def whole(tensor: Any) -> torch.Tensor:
    """All of a DTensor."""
    return tensor.full_tensor()


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, number: int
) -> list[float]:
    """Makes a step on this rank's rows; the mean loss, and the norm of the gradient."""
    data = mesh["data"]
    draw = torch.Generator().manual_seed(number)
    rows = torch.randn(ROWS, WIDTH, generator=draw).chunk(data.size())[data.get_local_rank()]
    loss = (model(rows) - rows.sum(1, keepdim=True)).square().mean()
    loss.backward()
    grads = [whole(param.grad) for param in model.parameters()]  # of two meshes
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / data.size()
    dist.all_reduce(mean, group=data.get_group())
    return [float(mean), float(nn.utils.get_total_norm(grads))]
