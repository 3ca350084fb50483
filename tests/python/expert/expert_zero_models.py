"""A net with sharded experts for the tests of zero.shard(), its meshes, and steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from whole_optimizers import Muon64, by_dimensions

from ringcomm.nn import MixtureOfExperts
from ringcomm.parallel import offload
from ringcomm.parallel.optimizer_classes import optimizers_of

STEPS, ROWS = 4, 24


class Net(nn.Module):
    """Layers of odd sizes around experts, in a mesh of expert-parallel ranks and replicas."""

    def __init__(self, num_experts: int, *groups: dist.ProcessGroup | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        group, replicas = groups
        self.first = nn.Linear(6, 7)
        self.moe = MixtureOfExperts(
            7, self.make_expert, num_experts, group=group, replica_group=replicas
        )
        self.last = nn.Linear(7, 3)

    @staticmethod
    def make_expert() -> nn.Module:
        return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        out: Tensor = self.last(x + self.moe(x))
        return out


def alone(rank: int) -> dist.ProcessGroup:
    made: Any = dist.new_group([rank], use_local_synchronization=True)
    return made


def mesh(rank: int, world_size: int, num_shards: int) -> tuple[Any, Any]:
    """The ranks that share the experts, and those with the same."""
    rows = [dist.new_group([*range(i, i + num_shards)]) for i in range(0, world_size, num_shards)]
    columns = [dist.new_group([*range(j, world_size, num_shards)]) for j in range(num_shards)]
    has_replicas = num_shards < world_size
    return rows[rank // num_shards], columns[rank % num_shards] if has_replicas else None


def make_optimizer(kind: str, model: nn.Module) -> Any:
    params = [*model.parameters()]
    if kind == "offloaded":
        return offload.AdamW(params, 0.02, eps=1e-3, to="cpu")
    if kind == "adamw":
        return torch.optim.AdamW(params, 0.02, eps=1e-3)
    if kind == "sgd":
        return torch.optim.SGD(params, 0.1, momentum=0.9)
    if kind == "adafactor":
        return torch.optim.Adafactor(params, 0.02, eps=(1e-6, 1e-3))
    both = by_dimensions(
        [{"params": params}], Muon64, lambda own: torch.optim.AdamW(own, 0.02, eps=1e-3)
    )
    return [offload.Offloaded(each) for each in both] if kind == "muon offloaded" else both


def train(
    model: Any, optimizer: Any, steps: range, place: tuple[int, int], clip: float | None = None
) -> None:
    """Two micro-batches a step; `clip` for one process."""
    rank, world_size = place
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x, y = (torch.randn(2, ROWS, size, generator=generator) for size in (6, 3))
        for part, target in zip(x, y, strict=True):
            own, wanted = part.chunk(world_size)[rank], target.chunk(world_size)[rank]
            loss = nn.functional.mse_loss(model(own).float(), wanted)
            (optimizer.scale(loss) if hasattr(optimizer, "scale") else loss).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for each in optimizers_of(optimizer):
            each.step()
            each.zero_grad()
