"""Ranks that start from different weights, and weights that share memory or that nobody uses."""

from __future__ import annotations

from typing import Any

import odd_models
import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks
from rows import ZERO, Row, Training
from steps import train_step
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from ringcomm.parallel import ParameterServer, get_state_dict
from ringcomm.parallel.pipeline import Pipeline

LR = 0.1


class OnFeatures(nn.Module):
    """A trained part on frozen random features, with buffers that are drawn or not saved."""

    angles: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(6, 7).requires_grad_(False)
        self.norm = nn.BatchNorm1d(7)
        self.layers = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])
        self.head = nn.Linear(7, 3)
        drawn = torch.randn(4, 4, device="cpu"), torch.randint(1000, (), device="cpu")
        self.register_buffer("angles", drawn[0])
        self.register_buffer("number", drawn[1], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.features(x))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        out: Tensor = self.head(x)
        return out


def on_shards(_: Training) -> nn.Module:
    model = OnFeatures()
    fully_shard(model)
    return model


BF16 = {"param_dtype": torch.bfloat16}


@pytest.mark.parametrize("kind", ["cpu", "meta"])
@in_ranks(2)
def test_weights_and_buffers_are_those_of_rank_0(rank: int, kind: str) -> None:
    """Each process draws its own values: https://github.com/Lightning-AI/litgpt/pull/269."""
    more: Any = (("zero 2", BF16), ("Lomo", {}), ("Lomo", {"group": None}))
    more += (("parallelize", {}), ("parallelize, zero 2", {}))
    cases = [*((system, {}) for system in ZERO), *(more if kind == "cpu" else ())]
    for system, options in cases:
        # Lomo without a group is that of shards, which are each rank's own.
        torch.manual_seed(rank)
        with torch.device(kind):
            on_ranks = on_shards if "group" in options else None
            row = Row(model=OnFeatures, on_ranks=on_ranks, options=options)
            made = Training(row, system, rank).begin()
        whole, _ = get_state_dict(made.model, full=True)
        own = {} if system == "infinity" else made.model.state_dict()
        values = {key: value for key, value in own.items() if type(value) is Tensor} | whole
        assert values.keys() == whole.keys()
        values |= dict(made.model.named_buffers())
        for key, value in values.items():
            first = value.clone()
            dist.broadcast(first, 0)
            assert torch.equal(value, first), f"{system}: {key}"
        assert torch.equal(made.model.norm.running_var, torch.ones(7))


@pytest.mark.parametrize("is_part", [False, True])
@in_ranks(2)
def test_two_parameters_in_one_memory(rank: int, is_part: bool) -> None:
    """They would become two weights: https://github.com/huggingface/accelerate/pull/3154.

    zero.shard(): test_odd_models.py.
    """
    model = odd_models.Copied(is_part)
    words = r"encoder\.weight and decoder\.weight|0\.weight and"
    with pytest.raises(ValueError, match=words):
        ParameterServer(model, torch.optim.SGD)
    with pytest.raises(ValueError, match=words):
        Pipeline([*model.children()], nn.functional.mse_loss)


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
