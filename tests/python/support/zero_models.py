"""Models of odd sizes for the tests of ZeRO, their rows, and steps of one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import ringcomm
from ringcomm.parallel import zero
from ringcomm.parallel.gradient_placeholder import GradientPlaceholder

ROWS = 12
STAGES = [1, 2, 3]
STEPS = 5
# Several buckets, and one weight that is larger than a bucket.
BUCKET_BYTES = 300


class Net(nn.Module):
    """Layers that no number of ranks divides, a tied weight and one smaller than the world."""

    def __init__(self, *, is_tied: bool = False, is_frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(7, 13)
        self.blocks = nn.ModuleList(nn.Linear(13, 13) for _ in range(3))
        self.last = nn.Linear(13, 3)
        self.scale = nn.Parameter(torch.ones(1))
        if is_tied:
            self.blocks[2].weight = self.blocks[0].weight
        if is_frozen:
            self.blocks[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        out: Tensor = self.last(x) * self.scale
        return out


def batch(step: int, rank: int = 0, world_size: int = 1) -> tuple[Tensor, Tensor]:
    """A rank's rows of a step, or all."""
    generator = torch.Generator().manual_seed(100 + step)
    x, y = (torch.randn(ROWS, size, generator=generator) for size in (7, 3))
    return x.chunk(world_size)[rank], y.chunk(world_size)[rank]


def make_optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    """Two parameter groups of their own; frozen weights are left out."""
    params = [param for param in model.parameters() if param.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": params[:3]},
        {"params": params[3:], "lr": 0.02, "weight_decay": 0.1},
    ]
    if kind == "adamw":
        return torch.optim.AdamW(groups, 0.01, fused=True)
    if kind == "sgd":
        return torch.optim.SGD(groups, 0.05, weight_decay=0.01)
    return torch.optim.SGD(groups, 0.05, weight_decay=0.01, momentum=0.9, nesterov=True)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Whole ones. Collective where they are sharded."""
    return {
        name: param.full_tensor() if isinstance(param, DTensor) else param.detach().clone()
        for name, param in model.named_parameters()
    }


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = nn.functional.mse_loss(model(x).float(), y)
    return loss


def train_alone(
    kind: str, clip: float | None = None, num_micro_batches: int = 1, **options: Any
) -> dict[str, Tensor]:
    """The same steps in one process, on all rows."""
    model = Net(**options)
    optimizer = make_optimizer(model, kind)
    for step in range(STEPS):
        for part in range(num_micro_batches):
            loss_of(model, *batch(num_micro_batches * step + part)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def make(
    stage: int, kind: str = "momentum", model: nn.Module | None = None, **options: Any
) -> tuple[nn.Module, zero.ZeroOptimizer]:
    model = model or Net()
    options = {"bucket_bytes": BUCKET_BYTES, **options}
    return model, zero.shard(model, make_optimizer(model, kind), stage, **options)


def train(
    model: nn.Module, optimizer: Any, rank: int, world_size: int, steps: range = range(STEPS)
) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, *batch(step, rank, world_size))
        optimizer.scale(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def sent_bytes() -> dict[str, int]:
    found: dict[str, int] = {}
    for (name, _), entry in ringcomm.stats().items():
        found[name] = found.get(name, 0) + entry["sent_bytes"]
    return found


def local_of(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def live_bytes(tensors: Any) -> int:
    found = {}
    for tensor in tensors:
        if isinstance(tensor, GradientPlaceholder):  # of no memory
            continue
        storage = local_of(tensor).untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())
