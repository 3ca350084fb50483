"""A small network in one process and in ranks: the same weights after the same steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from full_states import full_weights
from torch import Tensor, nn
from whole_optimizers import Muon64, by_dimensions

from ringcomm.parallel import zero
from ringcomm.parallel.optimizer_classes import optimizers_of

WIDTH, ROWS = 8, 12


def network() -> Any:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 12), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(12, 3, bias=False))


def rows(step: int, rank: int = 0, world_size: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=generator).chunk(world_size)[rank]


def train(
    model: Any,
    optimizer: Any,
    steps: range,
    rank: int = 0,
    world_size: int = 1,
    between: Callable[[Any], Any] | None = None,
) -> None:
    """`between` gets the model between a backward pass and its step."""
    for step in steps:
        x = rows(step, rank, world_size)
        (model(x).float() - x[:, :3]).square().mean().backward()
        if between is not None:
            between(model)
        for each in optimizers_of(optimizer):
            each.step()
            each.zero_grad()


def same(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 1e-6) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name].float(), value.float(), rtol=0, atol=atol)


def adamw(model: nn.Module, **options: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), 0.02, eps=1e-3, **options)


def muon(model: nn.Module) -> Any:
    """An optimizer of the matrices, and AdamW."""
    rest = partial(torch.optim.AdamW, lr=0.02, eps=1e-3)
    return by_dimensions([{"params": [*model.parameters()]}], Muon64, rest)


class Pair(NamedTuple):
    """A model in one process and the same in ranks, with their optimizers."""

    plain: Any
    given: Any
    model: Any
    optimizer: Any

    def train(self, steps: range, rank: int, world_size: int = 2, **options: Any) -> None:
        """Both, and compares their weights."""
        train(self.plain, self.given, steps, **options)
        train(self.model, self.optimizer, steps, rank, world_size, **options)
        same(full_weights(self.model), full_weights(self.plain), 2e-6)


def pair(
    stage: int,
    make_optimizer: Callable[[Any], Any],
    make: Callable[[], Any] = network,
    *,
    num_steps_before: int = 0,
    **options: Any,
) -> Pair:
    """Makes one; `num_steps_before` zero.shard(), which takes `options`."""
    plain, model = make(), make()
    given, own = make_optimizer(plain), make_optimizer(model)
    for each in ((plain, given), (model, own)):
        train(*each, range(100, 100 + num_steps_before))
    return Pair(plain, given, model, zero.shard(model, own, stage, **options))
