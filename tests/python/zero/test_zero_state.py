"""zero.shard(): runs go on from what was saved, with other ranks and stages too."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from full_states import full_state, load_full_state
from ranks import run_ranks
from torch import Tensor
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
from torch.distributed.tensor import DTensor
from zero_models import (
    BUCKET_BYTES,
    STAGES,
    STEPS,
    Net,
    batch,
    local_of,
    loss_of,
    make,
    make_optimizer,
    train,
    train_alone,
    weights,
)

from ringcomm.parallel import zero

# ---- state dicts


def save_and_resume(rank: int, stage: int, kind: str, options: dict[str, Any]) -> None:
    model, optimizer = make(stage, kind, **options)
    train(model, optimizer, rank, 2, range(2))
    with torch.no_grad():
        kept = {
            n: p.to_local().clone() if isinstance(p, DTensor) else p.clone()
            for n, p in model.named_parameters()
        }
    state = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, rank, 2, range(2, 4))
    expected = weights(model)
    again, resumed = make(stage, kind, **options)
    with torch.no_grad():
        for name, param in again.named_parameters():
            local_of(param).copy_(kept[name])
    resumed.load_state_dict(state)
    train(again, resumed, rank, 2, range(2, 4))
    assert all(torch.equal(value, expected[name]) for name, value in weights(again).items())
    assert resumed.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


@pytest.mark.parametrize("options", [{}, {"loss_scale": "dynamic"}], ids=str)
@pytest.mark.parametrize("kind", ["momentum", "adamw"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_has_the_same_bits(stage: int, kind: str, options: dict[str, Any]) -> None:
    run_ranks(2, save_and_resume, stage, kind, options)


def save_full(rank: int, world_size: int, stage: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    model, optimizer = make(stage)
    train(model, optimizer, rank, world_size, range(2))
    return weights(model), full_state(optimizer)


def load_full(
    rank: int, world_size: int, stage: int, values: dict[str, Tensor], state: dict[str, Any]
) -> dict[str, Tensor]:
    model = Net()
    model.load_state_dict(values)
    _, optimizer = make(stage, model=model)
    load_full_state(optimizer, state)
    train(model, optimizer, rank, world_size, range(2, STEPS))
    return weights(model)


@pytest.mark.parametrize("stages", [(1, 2), (2, 3), (3, 1)], ids=str)
def test_runs_go_on_with_other_ranks_and_stages(stages: tuple[int, int]) -> None:
    (values, state), other = run_ranks(2, save_full, 2, stages[0])
    assert str(state) == str(other[1])
    expected = train_alone("momentum")
    for world_size in (3, 1):
        for found in run_ranks(world_size, load_full, world_size, stages[1], values, state):
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
    # Into torch's own optimizer, and from it.
    model = Net()
    model.load_state_dict(values)
    optimizer = make_optimizer(model, "momentum")
    set_optimizer_state_dict(model, optimizer, state)
    for step in range(2, 3):
        loss_of(model, *batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    results = run_ranks(2, go_on_from_torch, stages[1], weights(model), optimizer.state_dict())
    for name, value in expected.items():
        torch.testing.assert_close(results[0][name], value, rtol=0, atol=1e-6)


def go_on_from_torch(
    rank: int, stage: int, values: dict[str, Tensor], state: dict[str, Any]
) -> dict[str, Tensor]:
    """An optimizer that has state already."""
    model = Net()
    model.load_state_dict(values)
    optimizer = make_optimizer(model, "momentum")
    optimizer.load_state_dict(state)
    sharded = zero.shard(model, optimizer, stage, bucket_bytes=BUCKET_BYTES)
    train(model, sharded, rank, 2, range(3, STEPS))
    return weights(model)


def load_weights(rank: int, stage: int) -> None:
    """A state_dict of the model that is loaded after zero.shard() counts, for the masters too."""
    model, optimizer = make(stage, "sgd", param_dtype=torch.bfloat16)
    train(model, optimizer, rank, 2, range(2))
    loaded = {name: torch.full_like(value, 0.5) for name, value in weights(model).items()}
    model.load_state_dict(loaded)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, rank, 2, range(1))
    assert all(torch.equal(value, loaded[name]) for name, value in weights(model).items())
    masters = [state["master"] for state in full_state(optimizer)["state"].values()]
    assert masters
    assert all(bool((master == 0.5).all()) for master in masters)


@pytest.mark.parametrize("stage", [1, 2])
def test_weights_that_are_loaded_later_count(stage: int) -> None:
    run_ranks(2, load_weights, stage)
