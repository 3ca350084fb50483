"""zero.shard(): bits, overflow, statistics, 16 bits, and what is refused."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_states import full_state, load_full_state
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from zero_models import (
    BUCKET_BYTES,
    STAGES,
    STEPS,
    Net,
    batch,
    loss_of,
    make,
    make_optimizer,
    sent_bytes,
    train,
    train_alone,
    weights,
)

import ringcomm
from ringcomm.parallel import zero

# ---- bits


def train_halves() -> dict[str, Tensor]:
    """One process that averages the gradients of two halves, as two ranks do."""
    model = Net()
    optimizer = make_optimizer(model, "momentum")
    for step in range(STEPS):
        halves = []
        for rank in range(2):
            optimizer.zero_grad()
            loss_of(model, *batch(step, rank, 2)).backward()
            halves.append([param.grad for param in model.parameters()])
        for param, first, second in zip(model.parameters(), *halves, strict=True):
            param.grad = (first + second) / 2
        optimizer.step()
    return weights(model)


def train_bits(rank: int, stage: int) -> dict[str, Tensor]:
    model, optimizer = make(stage)
    train(model, optimizer, rank, 2)
    return weights(model)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("backend", ["ringcomm", "gloo"])
def test_two_ranks_have_the_bits_of_one(stage: int, backend: str) -> None:
    expected = train_halves()
    for found in run_ranks(2, train_bits, stage, backend=backend):
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_missing_mean_would_be_seen() -> None:
    """The control: SGD by the sum is another run."""
    model = Net()
    optimizer = make_optimizer(model, "momentum")
    for step in range(STEPS):
        (2 * loss_of(model, *batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = train_alone("momentum")
    assert not torch.allclose(weights(model)["last.weight"], expected["last.weight"], atol=1e-3)


# ---- overflow, clipping, statistics


def check_overflow(rank: int, stage: int, where: str) -> None:
    model, optimizer = make(stage, "adamw", loss_scale="dynamic")
    train(model, optimizer, rank, 2, range(2))
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())
    scale = optimizer.loss_scale
    loss = loss_of(model, *batch(2, rank, 2))
    if rank == 1:
        param = dict(model.named_parameters())[where]
        handle = param.register_hook(lambda grad: grad * float("inf"))
    optimizer.scale(loss).backward()
    if rank == 1:
        handle.remove()
    optimizer.step()
    optimizer.zero_grad()
    found = optimizer.last_statistics
    assert found is not None
    assert found.num_not_finite > 0
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    after = optimizer.state_dict()
    assert optimizer.loss_scale == scale / 2
    assert str(after["state"]) == str(state["state"])
    train(model, optimizer, rank, 2, range(3, 4))
    assert not torch.equal(weights(model)[where], before[where])


def check_overflow_of_a_loss(rank: int) -> None:
    model, optimizer = make(3, "adamw", loss_scale="dynamic")
    train(model, optimizer, rank, 2, range(2))
    before, state = weights(model), copy.deepcopy(optimizer.state_dict()["state"])
    scale = optimizer.loss_scale
    x, y = batch(2, rank, 2)
    optimizer.scale(loss_of(model, x, y * (float("inf") if rank == 1 else 1))).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.loss_scale == scale / 2
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    assert str(optimizer.state_dict()["state"]) == str(state)
    train(model, optimizer, rank, 2, range(3, 4))
    assert not torch.equal(weights(model)["first.weight"], before["first.weight"])


def test_an_overflow_at_stage_3_changes_nothing() -> None:
    run_ranks(2, check_overflow_of_a_loss)


def check_nan_without_scale(rank: int, stage: int) -> None:
    model, optimizer = make(stage, clip_grad_norm=1.0)
    before = weights(model)
    x, y = batch(0, rank, 2)
    loss_of(model, x, y * (float("nan") if rank == 1 else 1)).backward()
    with pytest.raises(RuntimeError, match="not finite; no weight has been written"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    train(model, optimizer, rank, 2)
    expected = train_alone("momentum", clip=1.0)
    for name, value in weights(model).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_nan_is_an_error_on_all_ranks(stage: int) -> None:
    run_ranks(2, check_nan_without_scale, stage)


@pytest.mark.parametrize("where", ["first.weight", "last.bias"])
@pytest.mark.parametrize("stage", [1, 2])
def test_an_overflow_on_one_rank_changes_nothing_on_any(stage: int, where: str) -> None:
    run_ranks(2, check_overflow, stage, where)


def check_statistics(rank: int, world_size: int, stage: int) -> None:
    model, optimizer = make(stage)
    alone = Net()
    loss_of(alone, *batch(0)).backward()
    grads = torch.cat([param.grad.flatten() for param in alone.parameters()])  # type: ignore[union-attr]
    loss_of(model, *batch(0, rank, world_size)).backward()
    before = sent_bytes().get("all_reduce", 0), len(grads)
    calls = {key: entry["num_calls"] for key, entry in ringcomm.stats().items()}
    found = optimizer.statistics()
    num_calls = {
        name: sum(
            entry["num_calls"] - calls.get(key, 0)
            for key, entry in ringcomm.stats().items()
            if key[0] == name
        )
        for name in ("all_reduce", "all_gather")
    }
    assert num_calls == {"all_reduce": 1, "all_gather": 1}  # which gradients there are; their facts
    assert before[1] == len(grads)
    assert found.grad_norm == pytest.approx(float(grads.double().norm()), rel=1e-5)
    assert found.grad_max == pytest.approx(float(grads.abs().max()), rel=1e-5)
    assert found.num_not_finite == 0
    assert optimizer.statistics() == found  # looked at again, nothing is reduced twice
    optimizer.step()
    make_optimizer(alone, "momentum").step()
    for name, value in weights(model).items():
        torch.testing.assert_close(
            value, dict(alone.named_parameters())[name].detach(), rtol=0, atol=1e-6
        )


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_statistics(world_size: int, stage: int) -> None:
    run_ranks(world_size, check_statistics, world_size, stage)


# ---- 16 bits


def train_16_bits(rank: int, stage: int, dtype: torch.dtype) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 5))
    scale = 1024.0 if dtype == torch.float16 else None
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, fused=True)
    sharded = zero.shard(model, optimizer, stage, param_dtype=dtype, loss_scale=scale)
    losses = []
    for step in range(30):
        generator = torch.Generator().manual_seed(step % 5)
        x = torch.randn(8, 16, generator=generator).chunk(2)[rank]
        y = x[:, :5].sin()
        loss = (model(x).float() - y).square().mean()
        sharded.scale(loss).backward()
        sharded.step()
        sharded.zero_grad()
        losses.append(float(loss.detach()))
    state = full_state(sharded)["state"]
    if stage < 3:
        for name, param in model.named_parameters():
            assert param.dtype == dtype
            assert torch.equal(state[name]["master"].to(dtype), param.detach())
    return losses, {name: value.dtype for name, value in weights(model).items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stage", STAGES)
def test_16_bit_weights_with_masters_learn(stage: int, dtype: torch.dtype) -> None:
    for losses, _ in run_ranks(2, train_16_bits, stage, dtype):
        assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


# ---- what is refused


def check_errors(rank: int) -> None:
    model = Net()
    sgd = make_optimizer(model, "sgd")
    adam = torch.optim.Adam(model.parameters())
    frozen = Net()
    half = nn.Linear(3, 3).to(torch.bfloat16)
    cases: list[tuple[Any, Any, dict[str, Any], type[Exception], str]] = [
        (model, adam, {"stage": 1}, TypeError, " to shard, got Adam"),
        (model, sgd, {"stage": 4}, ValueError, "stage is 1, 2 or 3, got 4"),
        (sgd, model, {"stage": 1}, TypeError, "wants a model and its optimizer"),
        (DistributedDataParallel(Net()), sgd, {"stage": 1}, ValueError, "give model.module"),
        (Net(), sgd, {"stage": 1}, ValueError, "is not the model's"),
        (model, torch.optim.SGD([model.scale]), {"stage": 1}, ValueError, "in no group"),
        (model, sgd, {"stage": 1, "bucket_bytes": 0}, ValueError, "bucket_bytes is positive"),
        (model, sgd, {"stage": 1, "param_dtype": torch.int8}, ValueError, "param_dtype is None"),
        (model, sgd, {"stage": 1, "reduce_dtype": torch.bfloat16}, ValueError, "reduce_dtype is"),
        (model, sgd, {"stage": 1, "loss_scale": -1.0}, ValueError, "loss_scale is None"),
        (model, sgd, {"stage": 1, "clip_grad_norm": 0}, ValueError, "clip_grad_norm is a positive"),
        (model, sgd, {"stage": 2, "units": []}, ValueError, "at stage 3 alone"),
        (half, torch.optim.SGD(half.parameters()), {"stage": 3}, ValueError, "are float32"),
        (half, torch.optim.SGD(half.parameters()), {"stage": 1, "param_dtype": torch.bfloat16},
         ValueError, "bfloat16 already"),
    ]  # fmt: skip
    for of_model, optimizer, options, kind, text in cases:
        with pytest.raises(kind, match=text):
            zero.shard(of_model, optimizer, **options)
    before = weights(model)
    assert all(torch.equal(value, before[name]) for name, value in weights(Net()).items())
    optimizer_of_all = torch.optim.SGD(frozen.parameters())
    frozen.blocks[0].requires_grad_(False)
    with pytest.raises(ValueError, match="does not require grad"):
        zero.shard(frozen, optimizer_of_all, 1)
    with pytest.raises(ValueError, match="ranks disagree on the stage: rank 0 has 1, rank 1 has 2"):
        zero.shard(model, sgd, 1 + rank)
    sharded = zero.shard(model, sgd, 1)
    with pytest.raises(ValueError, match="is sharded already"):
        zero.shard(model, sgd, 1)
    with pytest.raises(ValueError, match="parameter groups of"):
        sharded.load_state_dict(torch.optim.SGD(Net().parameters()).state_dict())
    with pytest.raises(ValueError, match=r"before zero.shard\(\)"):
        sharded.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    state = sharded.state_dict()
    with pytest.raises(ValueError, match="is of rank 7 of 9"):
        sharded.load_state_dict({**state, "rank": 7, "world_size": 9})
    sharded.step()  # without gradients: nothing
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    loss_of(model, *batch(0)).backward()
    model.added = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"added.weight was added or replaced"):
        sharded.step()
    del model.added
    with pytest.raises(
        RuntimeError, match=r"param.grad of a weight that zero.shard\(\) has sharded"
    ):
        model.to(torch.float64)
    sharded.zero_grad()
    model.to(torch.float64)
    with pytest.raises(ValueError, match="has moved since"):
        sharded.step()


def test_errors() -> None:
    run_ranks(2, check_errors)


def train_odd_groups(rank: int) -> None:
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
    assert dist.get_world_size() == 3


def shard_again(rank: int) -> None:
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
    expected = train_alone("momentum")
    for name, value in weights(model).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


def test_a_model_can_be_sharded_again() -> None:
    run_ranks(2, shard_again)


def drop_gradients(rank: int) -> None:
    """model.zero_grad() at stage 1, optimizer.zero_grad() at both, in place of a step."""
    for stage in (1, 2):
        model, optimizer = make(stage)
        before = weights(model)
        droppers: list[Any] = [optimizer, *([model] if stage == 1 else [])]
        for dropper in droppers:
            loss_of(model, *batch(9, rank, 2)).backward()
            dropper.zero_grad()
            optimizer.step()
        assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
        train(model, optimizer, rank, 2)
        expected = train_alone("momentum")
        for name, value in weights(model).items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


def test_gradients_can_be_dropped() -> None:
    run_ranks(2, drop_gradients)


def checkpointed(rank: int, stage: int, reentrant: bool) -> None:
    model = Net()
    plain = type(model).forward

    def forward(x: Tensor) -> Tensor:
        out: Tensor = checkpoint(lambda y: plain(model, y), x, use_reentrant=reentrant)
        return out

    sharded = zero.shard(model, make_optimizer(model, "momentum"), stage, bucket_bytes=BUCKET_BYTES)
    for step in range(STEPS):
        x, y = batch(step, rank, 2)
        nn.functional.mse_loss(forward(x.requires_grad_()), y).backward()
        sharded.step()
        sharded.zero_grad()
    expected = train_alone("momentum")
    for name, value in weights(model).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
def test_checkpointing(stage: int, reentrant: bool) -> None:
    run_ranks(2, checkpointed, stage, reentrant)


def test_odd_groups() -> None:
    run_ranks(3, train_odd_groups)
