"""Ranks that start from different weights, weights in one memory, and weights that nobody uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks
from steps import train_step
from torch import Tensor, nn
from torch.testing import assert_close

from ringcomm.optim import Lomo
from ringcomm.parallel import (
    ParallelDims,
    ParameterServer,
    get_state_dict,
    offload,
    parallelize,
    zero,
)
from ringcomm.parallel.pipeline import Pipeline

LR = 0.1


class OnFeatures(nn.Module):
    """A trained part on frozen random features, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(6, 7).requires_grad_(False)
        self.norm = nn.BatchNorm1d(7)
        self.layers = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.features(x))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        out: Tensor = self.head(x)
        return out


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(trained(model), LR)


def infinity(model: nn.Module) -> Any:
    offloaded = offload.Offloaded(torch.optim.SGD(trained(model), LR), to="cpu")
    return zero.shard(model, offloaded, 3, offload_weights=True)


def on_mesh(model: nn.Module, **options: Any) -> Any:
    dims = ParallelDims(dp=dist.get_world_size())
    return parallelize(model, dims, lambda _: sgd(model), loss_fn=nn.functional.mse_loss, **options)


SYSTEMS: dict[str, Callable[[nn.Module], Any]] = {
    "zero 1": lambda model: zero.shard(model, sgd(model), 1),
    "zero 2": lambda model: zero.shard(model, sgd(model), 2),
    "zero 2, bfloat16": lambda model: zero.shard(model, sgd(model), 2, param_dtype=torch.bfloat16),
    "zero 3": lambda model: zero.shard(model, sgd(model), 3),
    "infinity": infinity,
    "Lomo": lambda model: Lomo(model, LR, group=dist.group.WORLD),
    "parallelize": on_mesh,
    "parallelize, zero 2": lambda model: on_mesh(model, zero_stage=2),
}
FROM_META = ("zero 1", "zero 2", "zero 3", "infinity")


@pytest.mark.parametrize("kind", ["cpu", "meta"])
@in_ranks(2)
def test_frozen_weights_are_those_of_rank_0(rank: int, kind: str) -> None:
    """Each process draws its own values: https://github.com/Lightning-AI/litgpt/pull/269."""
    for name in SYSTEMS if kind == "cpu" else FROM_META:
        torch.manual_seed(rank)
        with torch.device(kind):
            model = OnFeatures()
        kept = SYSTEMS[name](model)
        whole, _ = get_state_dict(model, full=True)
        own = {} if name == "infinity" else model.state_dict()
        values = {key: value for key, value in own.items() if type(value) is Tensor} | whole
        assert values.keys() == whole.keys()
        for key, value in values.items():
            first = value.clone()
            dist.broadcast(first, 0)
            assert torch.equal(value, first), f"{name}: {key}"
        del kept


class Copied(nn.Module):
    """A decoder whose weight is an encoder's by memory alone, or a part of it."""

    def __init__(self, is_part: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(4, 4, bias=False)
        self.decoder = nn.Linear(4, 2 if is_part else 4, bias=False)
        own = self.encoder.weight.data
        self.decoder.weight.data = own[1:3] if is_part else own

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.decoder(self.encoder(x))
        return out


REFUSE = (*FROM_META, "ParameterServer", "Pipeline")


@pytest.mark.parametrize("is_part", [False, True])
@in_ranks(2)
def test_two_parameters_in_one_memory(rank: int, is_part: bool) -> None:
    """They would become two weights: https://github.com/huggingface/accelerate/pull/3154."""
    more: dict[str, Callable[[nn.Module], Any]] = {
        "ParameterServer": lambda model: ParameterServer(model, torch.optim.SGD),
        "Pipeline": lambda model: Pipeline([*model.children()], nn.functional.mse_loss),
    }
    for name in REFUSE:
        with pytest.raises(ValueError, match=r"encoder\.weight and decoder\.weight|0\.weight and"):
            (SYSTEMS | more)[name](Copied(is_part))


@in_ranks(2)
def test_parts_of_one_memory_that_do_not_overlap(rank: int) -> None:
    """Weights that a user keeps in one flat tensor are ordinary weights."""
    for name in FROM_META:
        flat = torch.arange(12.0)
        model: Any = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False))
        first, second = flat[:6].view(3, 2), flat[6:].view(2, 3)
        model[0].weight.data, model[1].weight.data = first, second
        expected = [first - LR * second.sum(0)[:, None], second - LR * first.sum(1)]
        optimizer = SYSTEMS[name](model)
        train_step(model(torch.ones(1, 2)).sum(), optimizer)
        assert_close([*get_state_dict(model, full=True)[0].values()], expected)


class Late(nn.Module):
    """A layer that is never used, and one that is used from the third step on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.late, self.never = (nn.Linear(4, 4) for _ in range(3))
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        out: Tensor = self.late(x) if self.step >= 2 else x
        return out


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@in_ranks(2)
def test_a_parameter_server_leaves_unused_weights(rank: int, kind: str) -> None:
    """Decay moved them: https://github.com/pytorch/pytorch/issues/111958."""
    more = {"momentum": 0.9} if kind == "SGD" else {}
    make = getattr(torch.optim, kind)
    rows = torch.randn(5, 4, 4, generator=torch.Generator().manual_seed(1))
    alone, together = Late(), Late()
    optimizer = make(alone.parameters(), LR, weight_decay=0.5, **more)
    for step, x in enumerate(rows):
        alone.step = step
        train_step(alone(x).square().mean(), optimizer)
    with ParameterServer(
        together, lambda params: make(params, LR, weight_decay=0.5, **more)
    ) as server:
        for step, x in enumerate(rows):
            together.step = step
            server.pull()
            together(x.chunk(2)[rank]).square().mean().backward()
            server.push()
        server.pull()
    for (name, wanted), found in zip(alone.named_parameters(), together.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6, msg=name)
    assert torch.equal(together.never.weight, Late().never.weight)


@pytest.mark.parametrize("is_persistent", [False, True])
@in_ranks(2)
def test_a_buffer_in_the_memory_of_a_weight(rank: int, is_persistent: bool) -> None:
    """https://github.com/huggingface/accelerate/pull/3154: it would stay as the weight was."""
    alone: Any = None
    for name in ("Lomo", "parallelize", *FROM_META):
        torch.manual_seed(0)
        model: Any = nn.Linear(4, 3)
        model.register_buffer("shown", model.weight.detach()[:1], persistent=is_persistent)
        model.register_buffer("also", model.shown, persistent=is_persistent)
        if name not in ("Lomo", "parallelize"):
            with pytest.raises(
                ValueError, match=r"buffer shown is in the memory of weight|buffer also is in"
            ):
                SYSTEMS[name](model)
            continue
        optimizer = SYSTEMS[name](model)
        if name == "parallelize":
            optimizer.step(torch.ones(2, 4), torch.zeros(2, 3))
            optimizer = optimizer.optimizer
        else:
            nn.functional.mse_loss(model(torch.ones(2, 4)), torch.zeros(2, 3)).backward()
        optimizer.step()
        alone = model.weight.detach().clone() if alone is None else alone
        torch.testing.assert_close(model.shown, alone[:1])
