"""DistributedDataParallel and its hooks: the loss curve of one process."""

from __future__ import annotations

from typing import Any

import curves
import pytest
import torch
import torch.distributed as dist
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
