"""Models of odd sizes for the tests of ZeRO, their rows, and steps of one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from steps import apply_steps
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from whole_optimizers import Muon64, by_dimensions

import ringcomm
from ringcomm.parallel import offload, zero
from ringcomm.parallel.gradient_placeholder import GradientPlaceholder
from ringcomm.parallel.optimizer_classes import optimizers_of

ROWS = 12
STAGES = [1, 2, 3]
STEPS = 5
# Several buckets, and one weight that is larger than a bucket.
BUCKET_BYTES = 300


class Net(nn.Module):
    """Layers that no number of ranks divides, a tied weight and one smaller than the world.

    With a dtype it takes rows of any.
    """

    def __init__(
        self,
        *,
        width: int = 13,
        is_tied: bool = False,
        is_frozen: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(7, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.last = nn.Linear(width, 3)
        self.scale = nn.Parameter(torch.ones(1))
        if is_tied:
            self.blocks[2].weight = self.blocks[0].weight
        if is_frozen:
            self.blocks[1].requires_grad_(False)
        self._dtype = dtype
        self.to(dtype or torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x.to(self._dtype or x.dtype)))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        out: Tensor = self.last(x) * self.scale
        return out


class Towers(nn.Module):
    """A stem, towers of which each call runs some, and a head; the last tower never runs."""

    def __init__(self, *dims: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(6, 6)
        self.towers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(dims))  # of none, by default

    def forward(self, x: Tensor, used: list[int] | None, reentrant: bool = False) -> Tensor:
        if used is None:  # no weight at all
            return x
        x = torch.tanh(self.stem(x))
        for i in used:
            tower: Any = self.towers[i]
            y = checkpoint(tower, x, use_reentrant=True) if reentrant else tower(x)
            x = x + torch.tanh(y)
        out: Tensor = self.head(x) * self.scale if used else x.square()
        return out


def batch(step: int, rank: int = 0, world_size: int = 1) -> tuple[Tensor, Tensor]:
    """A rank's rows of a step, or all."""
    generator = torch.Generator().manual_seed(100 + step)
    x, y = (torch.randn(ROWS, size, generator=generator) for size in (7, 3))
    return x.chunk(world_size)[rank], y.chunk(world_size)[rank]


def make_optimizer(model: nn.Module, kind: str, **place: Any) -> Any:
    """Two parameter groups of their own, without frozen weights; of offload with a place.

    "muon" is two optimizers.
    """
    params = [param for param in model.parameters() if param.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": params[:3]},
        {"params": params[3:], "lr": 0.02, "weight_decay": 0.1},
    ]
    if kind == "adamw":
        adamw = torch.optim.AdamW(groups, 0.01, fused=not place)
        return offload.Offloaded(adamw, **place) if place else adamw
    if kind == "muon":
        rest = partial(torch.optim.AdamW, lr=0.02, eps=1e-3)
        return by_dimensions([{"params": params}], Muon64, rest)
    options: dict[str, Any] = {"momentum": 0.9, "nesterov": True} if kind == "momentum" else {}
    sgd = torch.optim.SGD(groups, 0.05, weight_decay=0.01, **options)
    return offload.Offloaded(sgd, **place) if place else sgd


def place_of(to: str, folder: Path) -> dict[str, Any]:
    """Where an optimizer of offload has its states."""
    return {"to": to, **({"path": folder / "states"} if to == "nvme" else {})}


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Whole ones. Collective where they are sharded."""
    return {
        name: param.full_tensor() if isinstance(param, DTensor) else param.detach().clone()
        for name, param in model.named_parameters()
    }


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Whether all that is expected is there, to the last bit."""
    return all(torch.equal(found[name], value) for name, value in expected.items())


def assert_alike(found: dict[str, Tensor]) -> None:
    """All ranks have the same, to the last bit. Collective."""
    others: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(others, {name: value.cpu() for name, value in found.items()})
    assert all(same(other, others[0]) for other in others)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 1e-6) -> None:
    wanted = {name: value.cpu() for name, value in expected.items()}
    torch.testing.assert_close(
        {name: found[name].cpu() for name in wanted}, wanted, rtol=0, atol=atol
    )


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = nn.functional.mse_loss(model(x).float(), y)
    return loss


def train_on_halves(model: Net, optimizers: Iterable[Any], num_steps: int) -> None:
    """In one process: averages the gradients of two halves, as two ranks do."""
    for step in range(num_steps):
        halves: list[list[Any]] = []
        for rank in range(2):
            model.zero_grad()
            loss_of(model, *batch(step, rank, 2)).backward()
            halves.append([param.grad for param in model.parameters()])
        for param, first, second in zip(model.parameters(), *halves, strict=True):
            param.grad = (first + second) / 2
        for each in optimizers:
            each.step()


def train_alone(
    kind: str, clip: float | None = None, num_micro_batches: int = 1, **options: Any
) -> dict[str, Tensor]:
    """The same steps in one process, on all rows."""
    model = Net(**options)
    train(model, make_optimizer(model, kind), num_micro_batches=num_micro_batches, clip=clip)
    return weights(model)


def make(
    stage: int,
    kind: str = "momentum",
    model: nn.Module | None = None,
    place: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Any, zero.ZeroOptimizer]:
    model = model or Net()
    options = {"bucket_bytes": BUCKET_BYTES, **options}
    return model, zero.shard(model, make_optimizer(model, kind, **place or {}), stage, **options)


def train(
    model: nn.Module,
    optimizer: Any,
    rank: int = 0,
    world_size: int = 1,
    steps: range = range(STEPS),
    num_micro_batches: int = 1,
    clip: float | None = None,
) -> list[float]:
    """`optimizer` may be several, and `clip` is for those of one process."""
    losses = []
    device = next(model.parameters()).device
    for step in steps:
        for part in range(num_micro_batches):
            rows = batch(num_micro_batches * step + part, rank, world_size)
            loss = loss_of(model, *(x.to(device) for x in rows))
            (optimizer.scale(loss) if hasattr(optimizer, "scale") else loss).backward()
            losses.append(float(loss.detach()))
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        apply_steps(*optimizers_of(optimizer))
    return losses


def sent_bytes() -> Counter[str]:
    """By this rank so far, by the name of the collective or of the message."""
    found: Counter[str] = Counter()
    for (name, _), entry in ringcomm.stats().items():
        found[name] += entry["sent_bytes"]
    return found


def check_traffic(
    model: nn.Module, given: Any, stage: int, rank: int, world_size: int, **options: Any
) -> zero.ZeroOptimizer:
    """A step sends what predict_traffic() says, to the byte."""
    place: Any = {"world_size": world_size, "rank": rank}
    expected = zero.predict_traffic(model, given, stage, **place, **options)
    optimizer = zero.shard(model, given, stage, **options)
    train(model, optimizer, rank, world_size, range(1))
    before = sent_bytes().total()
    train(model, optimizer, rank, world_size, range(1, 2))
    assert sent_bytes().total() - before == expected
    return optimizer


def live_bytes(tensors: Any) -> int:
    found = {}
    for tensor in tensors:
        if isinstance(tensor, GradientPlaceholder):  # of no memory
            continue
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()  # also of a weight whose memory is freed
        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())
