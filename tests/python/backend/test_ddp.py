"""DistributedDataParallel and its hooks: the loss curve of one process."""

from __future__ import annotations

from typing import Any

import curves
import pytest
import torch
import torch.distributed as dist
import zero_models
from curves import Run, assert_same_run, assert_weights, weights_of
from ranks import run_ranks
from test_errors import ENVS
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

WORLD = 2


def make_model(_: int = 0) -> nn.Module:
    """Several buckets at bucket_cap_mb=0.05; one weight that is not contiguous."""
    torch.manual_seed(1)
    convolution: Any = nn.Conv2d(2, 8, 3)
    model = nn.Sequential(
        convolution.to(memory_format=torch.channels_last),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 36, 120),
        nn.Tanh(),
        nn.Linear(120, 60),
        nn.GELU(),
        nn.Linear(60, 3),
    )
    assert not convolution.weight.is_contiguous()
    return model


def batch(step: int, share: int = 0, num_shares: int = 1) -> tuple[Tensor, Tensor]:
    """A rank's share, or all of it. The outputs can be learned, up to noise."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(12, 2, 8, 8, generator=generator)
    y = torch.tensor([1.0, -1.0, 2.0]) + torch.randn(12, 3, generator=generator) / 2
    return x.chunk(num_shares)[share], y.chunk(num_shares)[share]


def train(model: nn.Module, rank: int, num_ranks: int = WORLD, **options: Any) -> Run:
    losses = curves.train(model, rank, num_ranks, data=batch, **options)
    return Run(losses, weights_of(model))


def single_process(**options: Any) -> Run:
    return curves.single_process(make=make_model, data=batch, **options)


def wrap(model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, **{"bucket_cap_mb": 0.05, **options})


def train_ddp(rank: int, options: dict[str, Any]) -> Run:
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)  # DDP takes rank 0's
    return train(wrap(model, **options), rank, dist.get_world_size())


@pytest.mark.parametrize(
    ("options", "env"),
    [
        ({"gradient_as_bucket_view": True}, "shm"),
        ({"static_graph": True}, "shm"),
        ({"find_unused_parameters": True}, "shm"),
        ({}, "p2p"),
        ({}, "hosts"),
    ],
    ids=str,
)
def test_equals_one_process(options: dict[str, Any], env: str) -> None:
    world_size = 2 if env == "shm" else 3
    assert_same_run(run_ranks(world_size, train_ddp, options, env=ENVS[env]), single_process())


def test_equals_gloo_bitwise() -> None:
    """With 2 ranks there is one order of summation, and division by 2 is exact."""
    ours = run_ranks(WORLD, train_ddp, {})
    assert_same_run(ours, single_process())
    theirs = run_ranks(WORLD, train_ddp, {}, backend="gloo")
    assert ours[0].losses == theirs[0].losses
    assert_weights(ours[0].weights, theirs[0].weights, atol=0)


# ---- communication hooks


def chained_hook(state: Any, bucket: Any) -> Any:
    """Sums in two exchanges, the second from the callback of the first."""
    buffer = bucket.buffer()
    half = buffer.numel() // 2
    work: Any = dist.all_reduce(buffer[:half], async_op=True)

    def second(future: Any) -> Tensor:
        rest: Any = dist.all_reduce(buffer[half:], async_op=True)
        rest.get_future().wait()
        return buffer

    return work.get_future().then(second).then(lambda future: future.value() / WORLD)


chained_hook.__annotations__.clear()  # DDP compares them with types, and these are strings


def train_with_hook(rank: int, name: str) -> Run:
    # One bucket where the hook issues collectives from callbacks: with several, their order would
    # depend on the ranks' timing.
    cap = {"chained": 25.0, "power_sgd": 25.0}.get(name, 0.05)
    model = wrap(make_model(), bucket_cap_mb=cap)
    group: Any = dist.group.WORLD
    hooks: dict[str, tuple[Any, Any]] = {
        "allreduce": (group, default_hooks.allreduce_hook),
        "fp16": (group, default_hooks.fp16_compress_hook),
        "chained": (None, chained_hook),
        "power_sgd": (
            powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2),
            powerSGD_hook.powerSGD_hook,
        ),
        "noop": (None, debugging_hooks.noop_hook),
    }
    model.register_comm_hook(*hooks[name])
    return train(model, rank)


# fp16 rounds gradients to 11 bits, five times; PowerSGD is an approximation.
ATOL = {"allreduce": 1e-5, "fp16": 1e-3, "chained": 1e-5, "power_sgd": 0.1}


@pytest.mark.parametrize("name", ATOL)
def test_hooks(name: str) -> None:
    assert_same_run(run_ranks(WORLD, train_with_hook, name), single_process(), ATOL[name])


def test_noop_hook() -> None:
    """Each rank trains alone, to the last bit: the control of what the others compare."""
    results = run_ranks(WORLD, train_with_hook, "noop")
    for rank, result in enumerate(results):
        alone = train(make_model(), rank)
        assert result.losses == alone.losses
        assert_weights(result.weights, alone.weights, atol=0)
    with pytest.raises(AssertionError):
        assert_same_run(results, single_process(), atol=1e-3)


# ---- uneven inputs


def train_uneven(rank: int) -> Run:
    """Rank 1 has two batches, rank 0 four."""
    from torch.distributed.algorithms.join import Join

    model = wrap(make_model())
    with Join([model]):
        losses = curves.train(model, rank, WORLD, steps=range(4 - 2 * rank), data=batch)
    return Run(losses, weights_of(model))


def test_join() -> None:
    """Rank 0's batches alone count half: the gradients are still divided by 2."""
    model = make_model()
    optimizer = curves.sgd(model.parameters())
    train(model, 0, 1, optimizer=optimizer, steps=range(2))
    expected = train(model, 0, optimizer=optimizer, steps=range(2, 4), scale=0.5)
    first, second = run_ranks(WORLD, train_uneven)
    assert first.losses[2:] == pytest.approx(expected.losses, rel=0, abs=1e-5)
    for result in (first, second):
        assert_weights(result.weights, expected.weights, atol=1e-5)


# ---- autocast, a GradScaler and gradient accumulation

STEPS, NUM_MICRO_BATCHES = 4, 2


def train_scaled(rank: int, world_size: int, broken_step: int) -> tuple[dict[str, Tensor], float]:
    """Steps of two micro-batches; in one of them the last rank's loss is infinite."""
    model = zero_models.Net()
    replica = DistributedDataParallel(model) if world_size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        for part in range(NUM_MICRO_BATCHES):
            x, y = zero_models.batch(NUM_MICRO_BATCHES * step + part, rank, world_size)
            is_broken = step == broken_step and rank == world_size - 1
            with torch.autocast("cpu", torch.bfloat16):
                loss = zero_models.loss_of(replica, x, y * (float("inf") if is_broken else 1))
            scaler.scale(loss / NUM_MICRO_BATCHES).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return zero_models.weights(model), scaler.get_scale()


def test_a_scaled_step_is_left_out_on_all_ranks() -> None:
    """As in one process; without the overflow the weights are others."""
    expected, scale = train_scaled(0, 1, broken_step=2)
    whole, whole_scale = train_scaled(0, 1, broken_step=-1)
    assert (scale, whole_scale) == (512, 1024)
    assert not torch.equal(whole["first.weight"], expected["first.weight"])
    results = run_ranks(3, train_scaled, 3, 2)
    for found, found_scale in results:
        assert found_scale == scale
        for name, value in expected.items():
            assert torch.equal(found[name], results[0][0][name])
            torch.testing.assert_close(found[name], value, rtol=0.02, atol=0.01)
