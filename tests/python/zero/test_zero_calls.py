"""zero.shard(): what it refuses, odd models and optimizers, and what loops do around it."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from curves import Run, assert_same_run, make_model, single_process, weights_of
from curves import train as train_shares
from full_states import full_state, full_weights, load_full_state
from oracle import all_equal
from ranks import in_ranks, run_ranks
from steps import apply_steps
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from zero_models import (
    BUCKET_BYTES,
    STEPS,
    Net,
    Towers,
    assert_close,
    batch,
    loss_of,
    make,
    make_optimizer,
    same,
    train,
    train_alone,
    weights,
)

from ringcomm.nn import ColumnParallelLinear
from ringcomm.parallel import offload, zero


@in_ranks(2)
def test_errors(rank: int) -> None:
    model = Net()
    sgd = make_optimizer(model, "sgd")
    lbfgs = torch.optim.LBFGS(model.parameters())
    half, scalar = nn.Linear(3, 3).to(torch.bfloat16), Towers()
    narrow = ColumnParallelLinear(3, 1)  # rank 1 has nothing of it
    empty = nn.ParameterList([torch.ones(3), torch.ones(0, 3)])  # as MobileBERT's
    cases: list[tuple[Any, Any, dict[str, Any], type[Exception], str]] = [
        (model, lbfgs, {"stage": 1}, TypeError, "LBFGS updates several weights together"),
        (model, model, {"stage": 1}, TypeError, "expected an optimizer, or a list"),
        (model, sgd, {"stage": 4}, ValueError, "stage must be 1, 2 or 3, got 4"),
        (sgd, model, {"stage": 1}, TypeError, "expected a model as the first"),
        (DistributedDataParallel(Net()), sgd, {"stage": 1}, ValueError, "pass its `module`"),
        (Net(), sgd, {"stage": 1}, ValueError, "is not in the model"),
        (model, torch.optim.SGD([model.scale]), {"stage": 1}, ValueError, "in no parameter group"),
        (model, sgd, {"stage": 1, "bucket_bytes": 0}, ValueError, "bucket_bytes must be positive"),
        (model, sgd, {"stage": 1, "param_dtype": torch.int8}, ValueError, "param_dtype must be"),
        (model, sgd, {"stage": 1, "reduce_dtype": torch.bfloat16}, ValueError, "reduce_dtype must"),
        (model, sgd, {"stage": 1, "loss_scale": -1.0}, ValueError, "loss_scale must be None"),
        (model, sgd, {"stage": 3, "loss_scale": "auto"}, ValueError, "loss_scale must be None"),
        (model, sgd, {"stage": 1, "clip_grad_norm": 0}, ValueError, "clip_grad_norm must be"),
        (model, sgd, {"stage": 2, "units": []}, ValueError, "for stage 3 only"),
        (half, torch.optim.SGD(half.parameters()), {"stage": 3}, ValueError, "must be float32"),
        (scalar, torch.optim.SGD(scalar.parameters()), {"stage": 3}, ValueError, "is a scalar"),
        (empty, torch.optim.SGD(empty.parameters()), {"stage": 3}, ValueError, "1 is a scalar, or"),
        (narrow, torch.optim.SGD(narrow.parameters()), {"stage": 3}, ValueError, "empty on some"),
        (half, torch.optim.SGD(half.parameters()), {"stage": 1, "param_dtype": torch.bfloat16},
         ValueError, "is torch.bfloat16"),
    ]  # fmt: skip
    for of_model, optimizer, options, kind, text in cases:
        with pytest.raises(kind, match=text):
            zero.shard(of_model, optimizer, **options)
    before = weights(model)
    assert same(weights(Net()), before)
    with pytest.raises(ValueError, match="ranks disagree on the stage: rank 0 has 1, rank 1 has 2"):
        zero.shard(model, sgd, 1 + rank)
    sharded = zero.shard(model, sgd, 1)
    with pytest.raises(ValueError, match="already has an optimizer that takes its"):
        zero.shard(model, sgd, 1)
    with pytest.raises(TypeError, match="neither offloaded nor sharded, got FlatZero"):
        offload.Offloaded(sharded)
    with pytest.raises(ValueError, match="parameter groups of"):
        sharded.load_state_dict(torch.optim.SGD(Net().parameters()).state_dict())
    with pytest.raises(ValueError, match=r"before zero.shard\(\)"):
        sharded.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    state = sharded.state_dict()
    of_others = {"rank 7 of 9": (7, 9), "rank 1 of 2": (1 - rank, 2), "rank 0 of 1": (rank, 1)}
    for text, (number, size) in of_others.items():  # the text is rank 0's
        with pytest.raises(ValueError, match=f"rank 0: the state is from {text}"):
            sharded.load_state_dict({**state, "rank": number, "world_size": size})
    sharded.step()  # without gradients: nothing
    assert same(weights(model), before)
    loss_of(model, *batch(0)).backward()
    model.added = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"added.weight was added or replaced"):
        sharded.step()
    del model.added
    with pytest.raises(RuntimeError, match=r"cast or moved after zero.shard\(\): do it before"):
        model.to(torch.float64)
    sharded.zero_grad()
    model.to(torch.float64)
    with pytest.raises(ValueError, match="was cast or moved after"):
        sharded.step()


@pytest.mark.parametrize(("stage", "how"), [(1, "other"), (2, "zero"), (2, "DDP")])
@in_ranks(2)
def test_what_would_go_by_one_rank_raises(rank: int, stage: int, how: str) -> None:
    model = Net()
    other = make_optimizer(model, "momentum")
    sharded = zero.shard(model, make_optimizer(model, "momentum"), stage)
    before = weights(model)
    if how == "DDP":  # around a part, whose forward the model's own hook does not see
        replica = DistributedDataParallel(model.last)
        call: Any = replica(torch.randn(2, 13)).sum().backward
    else:
        loss_of(model, *batch(0)).backward()
        call = {"other": other.step, "zero": partial(model.zero_grad, set_to_none=False)}[how]
    with pytest.raises(RuntimeError, match=r"param\.grad of a weight that zero"):
        call()
    assert same(weights(model), before)
    del sharded


# ---- odd ones, and what comes later


@in_ranks(3)
def test_odd_groups(rank: int) -> None:
    """An empty parameter group, weights without elements, schedulers and closures."""
    model: Any = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    model.nothing = nn.Parameter(torch.empty(0, 4))
    groups = [{"params": []}, {"params": list(model.parameters())}]
    sharded = zero.shard(model, torch.optim.SGD(groups, 0.1), 2)
    schedule = torch.optim.lr_scheduler.StepLR(sharded, 1, 0.5)
    before = weights(model)

    def closure() -> Tensor:
        sharded.zero_grad()
        loss: Tensor = model(torch.ones(2, 4)).sum()
        loss.backward()
        return loss

    loss = sharded.step(closure)
    assert isinstance(loss, Tensor)
    schedule.step()
    assert sharded.param_groups[1]["lr"] == 0.05
    first = before["0.weight"] - weights(model)["0.weight"]
    sharded.step(closure)
    assert first.abs().max() > 0


class Sharing(nn.Module):
    """The first two layers share a module; generate() calls a layer, and uses a weight of no layer.

    As generate() of transformers calls the encoder of an encoder-decoder model.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        norm = nn.LayerNorm(8)
        layers = [nn.Sequential(nn.Linear(8, 8), norm), nn.Sequential(nn.Linear(8, 8), norm)]
        self.layers = nn.ModuleList([*layers, nn.Linear(8, 8)])
        self.embed = nn.Embedding(6, 8)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.embed(ids)
        for layer in self.layers:
            out = out + layer(out)
        return out @ self.embed.weight.T

    @torch.no_grad()
    def generate(self, ids: Tensor, *, number: int) -> Tensor:
        start = self.layers[2](self.embed(ids)) @ self.embed.weight.T
        ids = torch.cat([ids, start[:, -1:].argmax(-1)], 1)
        for _ in range(number):
            ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], 1)
        return ids


def train_sharing(model: Any, optimizer: Any, rank: int, world_size: int) -> list[Tensor]:
    """Generated tokens before each step."""
    found = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(6, (4, 5), generator=generator)
        found.append(model.generate(ids, number=3))
        mine = ids.chunk(world_size)[rank]
        nn.functional.cross_entropy(model(mine).flatten(0, 1), mine.flatten()).backward()
        apply_steps(optimizer)
    return found


@in_ranks(2)
def test_a_module_of_two_units_and_generate(rank: int) -> None:
    """Stage 3: units that share a module are the root's, and generate() gathers the root."""
    alone, model = Sharing(), Sharing()
    expected = train_sharing(alone, torch.optim.SGD(alone.parameters(), 0.1), 0, 1)
    sharded = zero.shard(model, torch.optim.SGD(model.parameters(), 0.1), 3)
    units = [name for name, part in model.named_modules() if isinstance(part, FSDPModule)]
    assert units == ["", "layers.2"]
    found = train_sharing(model, sharded, rank, 2)
    assert all_equal(found, expected)
    assert_close(weights(model), weights(alone))


class ByName(nn.Module):
    """Calls its layers' forward, as SqueezeBERT; models have the activation in common."""

    activation = nn.Tanh()

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.common = ByName.activation

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.common(layer.forward(x))
        return x


@in_ranks(2)
def test_layers_that_are_called_by_name(rank: int) -> None:
    model, alone = ByName(), ByName()
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), 0.1), 3)
    other = torch.optim.SGD(alone.float().parameters(), 0.1)  # also with a part of `model`
    for step in range(2):
        x = torch.arange(8.0).view(2, 4) + step
        model.forward(x[rank]).sum().backward()
        alone(x).sum().div(2).backward()
        optimizer.step()
        apply_steps(other)
    assert_close(full_weights(model), dict(alone.named_parameters()))


@in_ranks(2)
def test_a_model_can_be_sharded_again(rank: int) -> None:
    """What has lost its optimizer can have another; hooks of the first are mute."""
    model, first = make(2)
    train(model, first, rank, 2, range(1))
    state = full_state(first)
    del first
    gc.collect()
    optimizer = make_optimizer(model, "momentum")
    second = zero.shard(model, optimizer, 1, bucket_bytes=BUCKET_BYTES)
    load_full_state(second, state)
    train(model, second, rank, 2, range(1, STEPS))
    assert_close(weights(model), train_alone("momentum"))


@pytest.mark.parametrize("stage", [1, 2])
@in_ranks(2)
def test_weights_that_are_loaded_later_count(rank: int, stage: int) -> None:
    """A state_dict of the model that is loaded after zero.shard() counts, for the masters too."""
    model, optimizer = make(stage, "sgd", param_dtype=torch.bfloat16)
    train(model, optimizer, rank, 2, range(2))
    loaded = {name: torch.full_like(value, 0.5) for name, value in weights(model).items()}
    model.load_state_dict(loaded)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, rank, 2, range(1))
    assert same(weights(model), loaded)
    masters = [state["master"] for state in full_state(optimizer)["state"].values()]
    assert masters
    assert all(bool((master == 0.5).all()) for master in masters)


def make_redundant() -> tuple[Any, Any]:
    """Several buckets."""
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.001)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1, momentum=0.9
    )
    return model, optimizer


def train_redundant(rank: int) -> tuple[Run, int]:
    """Half-way the states are gathered on one rank, and given to a new optimizer on all."""
    model, optimizer = make_redundant()
    losses = train_shares(model, rank, 2, optimizer, steps=range(3))
    optimizer.consolidate_state_dict(to=1)
    states: list[Any] = [optimizer.state_dict() if rank == 1 else None]
    dist.broadcast_object_list(states, 1)
    resumed, other = make_redundant()
    resumed.load_state_dict(model.state_dict())
    other.load_state_dict(states[0])
    losses += train_shares(resumed, rank, 2, other, steps=range(3, 5))
    num_momenta = sum("momentum_buffer" in state for state in other.optim.state.values())
    return Run(losses, weights_of(resumed)), num_momenta


def test_zero_redundancy_optimizer() -> None:
    """torch's, over ringcomm: the losses of one process, states in shards."""
    results = run_ranks(2, train_redundant)
    assert_same_run([run for run, _ in results], single_process())
    assert sum(count for _, count in results) == len(list(make_model().parameters()))
