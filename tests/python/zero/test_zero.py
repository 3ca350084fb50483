"""zero.shard(): the steps of one process, whatever each rank holds of the optimizer.

On two ranks tests/python/pairs holds any two features together; here are other numbers of ranks,
bits, and calls. Models of odd sizes: support/zero_models.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from full_states import full_state
from ranks import in_ranks, place, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from zero_models import (
    STAGES,
    STEPS,
    Net,
    assert_close,
    batch,
    loss_of,
    make,
    make_optimizer,
    same,
    sent_bytes,
    train,
    train_alone,
    weights,
)

# How much sums of three or four ranks' gradients may differ from one sum; AdamW amplifies it.
ATOL = {"sgd": 1e-6, "momentum": 1e-6, "adamw": 2e-5}


def train_ranks(
    rank: int,
    device: str,
    world_size: int,
    stage: int,
    kind: str,
    options: dict[str, Any],
    num_micro_batches: int,
) -> dict[str, Tensor]:
    options = dict(options)
    model = Net(is_tied=options.pop("tied", False)).to(place(device, rank))
    if options.pop("mesh", False):
        options["mesh"] = init_device_mesh(device, (world_size,))
    if rank != 0:
        torch.nn.init.zeros_(model.last.weight)  # rank 0's count
    _, optimizer = make(stage, kind, model, **options)
    train(model, optimizer, rank, world_size, num_micro_batches=num_micro_batches)
    return weights(model)


@pytest.mark.parametrize(
    ("world_size", "backend", "case"),
    [
        (1, "ringcomm", (1, "adamw", {"clip_grad_norm": 0.1}, 1)),
        (1, "ringcomm", (2, "momentum", {}, 2)),
        (1, "ringcomm", (3, "momentum", {"loss_scale": 1024.0}, 1)),
        (2, "gloo", (1, "momentum", {"mesh": True}, 1)),
        (2, "gloo", (2, "adamw", {"clip_grad_norm": 0.1, "loss_scale": 1024.0}, 2)),
        (2, "gloo", (3, "adamw", {"loss_scale": 1024.0}, 2)),
        (3, "ringcomm", (1, "adamw", {"loss_scale": 1024.0, "tied": True}, 2)),
        (3, "ringcomm", (2, "adamw", {"bucket_bytes": 1 << 20}, 1)),
        (3, "ringcomm", (3, "momentum", {"clip_grad_norm": 0.1, "mesh": True}, 1)),
        (4, "ringcomm", (2, "momentum", {"clip_grad_norm": 0.1, "tied": True}, 1)),
        (4, "ringcomm", (3, "adamw", {"tied": True}, 1)),
    ],
)
def test_steps_are_those_of_one_process(
    device: str, world_size: int, backend: str, case: tuple[int, str, dict[str, Any], int]
) -> None:
    _, kind, options, num_micro_batches = case
    results = run_ranks(world_size, train_ranks, device, world_size, *case, backend=backend)
    is_tied = options.get("tied", False)
    expected = train_alone(kind, options.get("clip_grad_norm"), num_micro_batches, is_tied=is_tied)
    for found in results:
        assert_close(found, expected, ATOL[kind])
        assert same(found, results[0])


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


@pytest.mark.parametrize(
    ("stage", "backend"),
    [(1, "ringcomm"), (2, "ringcomm"), (3, "ringcomm"), (1, "gloo"), (3, "gloo")],
)
def test_two_ranks_have_the_bits_of_one(stage: int, backend: str) -> None:
    expected = train_halves()
    for found in run_ranks(2, train_bits, stage, backend=backend):
        assert same(found, expected)


# ---- no_sync(), overflow and clipping


@in_ranks(2)
def test_stage_3_refuses_a_step_that_lacks_gradients(rank: int) -> None:
    """At stage 3 fully_shard keeps them, and would go on without them in silence."""
    model, optimizer = make(3)
    before = weights(model)
    with optimizer.no_sync():
        loss_of(model, *batch(0, rank, 2)).backward()
    with pytest.raises(RuntimeError, match=r"no_sync\(\) were not reduced at stage 3"):
        optimizer.step()
    assert same(weights(model), before)
    loss_of(model, *batch(1, rank, 2)).backward()
    optimizer.step()
    alone = Net()
    plain = make_optimizer(alone, "momentum")
    (loss_of(alone, *batch(0)) + loss_of(alone, *batch(1))).backward()
    plain.step()
    plain.zero_grad()
    optimizer.zero_grad()
    with optimizer.no_sync():
        loss_of(model, *batch(2, rank, 2)).backward()
    optimizer.zero_grad()  # drops it
    for net, each in ((model, optimizer), (alone, plain)):
        loss_of(net, *(batch(3, rank, 2) if net is model else batch(3))).backward()
        each.step()
    assert_close(weights(model), weights(alone))


def overflow(rank: int, stage: int, where: str) -> None:
    model, optimizer = make(stage, "adamw", loss_scale="dynamic")
    train(model, optimizer, rank, 2, range(2))
    before, state, scale = weights(model), full_state(optimizer), optimizer.loss_scale
    x, y = batch(2, rank, 2)
    if stage < 3 and rank == 1:
        param = dict(model.named_parameters())[where]
        handle = param.register_hook(lambda grad: grad * float("inf"))
    is_of_loss = stage == 3 and rank == 1
    optimizer.scale(loss_of(model, x, y * (float("inf") if is_of_loss else 1))).backward()
    if stage < 3 and rank == 1:
        handle.remove()
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.grad_norm is not None
    assert not math.isfinite(optimizer.grad_norm)
    assert same(weights(model), before)
    assert optimizer.loss_scale == scale / 2
    assert str(full_state(optimizer)["state"]) == str(state["state"])
    train(model, optimizer, rank, 2, range(3, 4))
    assert not torch.equal(weights(model)[where], before[where])


@pytest.mark.parametrize(
    ("stage", "where"), [(1, "last.bias"), (2, "first.weight"), (2, "last.bias"), (3, "last.bias")]
)
def test_an_overflow_on_one_rank_changes_nothing_on_any(stage: int, where: str) -> None:
    run_ranks(2, overflow, stage, where)


@pytest.mark.parametrize("stage", STAGES)
@in_ranks(2)
def test_clipping_nan_is_an_error_on_all_ranks(rank: int, stage: int) -> None:
    """By the option and by the method; then steps that are right."""
    model, optimizer = make(stage, clip_grad_norm=1.0)
    before = weights(model)
    with pytest.raises(ValueError, match="max_norm must be positive"):
        optimizer.clip_grad_norm_(0)
    assert optimizer.clip_grad_norm_(1.0) == 0
    x, y = batch(0, rank, 2)
    for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)):
        loss_of(model, x, y * (float("nan") if rank == 1 else 1)).backward()
        with pytest.raises(
            RuntimeError, match="norm of the gradients is nan; no weight has been written"
        ):
            call()
    optimizer.step()
    assert same(weights(model), before)
    train(model, optimizer, rank, 2)
    assert_close(weights(model), train_alone("momentum", clip=1.0))


def clip_by_optimizer(rank: int, world_size: int, stage: int, scale: float | None) -> list[Tensor]:
    """After two of three backward passes, some in no_sync(), not the same ones on all ranks."""
    model, optimizer = make(stage, loss_scale=scale)
    alone, norms = Net(), []
    plain = make_optimizer(alone, "momentum")
    for step in range(STEPS):
        for part in range(3):
            loss = optimizer.scale(loss_of(model, *batch(3 * step + part, rank, world_size)))
            if stage < 3 and part == rank:
                sent = sent_bytes()
                with optimizer.no_sync():
                    loss.backward()
                assert sent_bytes() == sent
            else:
                loss.backward()
            loss_of(alone, *batch(3 * step + part)).backward()
            if part == 1:
                seen = optimizer.clip_grad_norm_(math.inf)  # looks, and clips nothing
                norms.append(optimizer.clip_grad_norm_(0.1))
                assert torch.equal(seen, norms[-1])
                norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
                torch.testing.assert_close(norms[step], norm, rtol=1e-4, atol=0)
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    assert_close(weights(model), weights(alone), 2e-6)
    before = weights(model)
    with optimizer.no_sync():
        loss_of(model, *batch(0, rank, world_size)).backward()
    optimizer.zero_grad()
    optimizer.step()
    assert same(weights(model), before)
    return norms


@pytest.mark.parametrize(
    ("world_size", "stage", "scale"), [(2, 1, None), (3, 2, 1024.0), (3, 3, 1024.0)]
)
def test_the_optimizer_clips(world_size: int, stage: int, scale: float | None) -> None:
    results = run_ranks(world_size, clip_by_optimizer, world_size, stage, scale)
    for norms in results:
        assert all(torch.equal(a, b) for a, b in zip(norms, results[0], strict=True))
