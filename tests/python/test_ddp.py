"""DistributedDataParallel and its neighbours, beside one process that sees the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

WORLD = 2
STEPS = 5
BATCH = 6


def make_model() -> nn.Module:
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


def batch(step: int, rank: int | None) -> tuple[Tensor, Tensor]:
    """A rank's half, or all of it for None."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(WORLD * BATCH, 2, 8, 8, generator=generator)
    y = torch.randn(WORLD * BATCH, 3, generator=generator)
    if rank is None:
        return x, y
    part = slice(rank * BATCH, (rank + 1) * BATCH)
    return x[part], y[part]


def train(model: nn.Module, rank: int | None, steps: int = STEPS) -> dict[str, Tensor]:
    """SGD with momentum; the weights afterwards."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return copy.deepcopy(inner.state_dict())


def wrap(model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=0.05, **options)


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], atol: float) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=atol, msg=name)


def train_ddp(rank: int, options: dict[str, Any]) -> dict[str, Tensor]:
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)  # DDP takes rank 0's
    return train(wrap(model, **options), rank)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"static_graph": True},
    {"find_unused_parameters": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_one_process(options: dict[str, Any]) -> None:
    """Up to the order of the batch's sum, 1e-5; all ranks to the last bit."""
    expected = train(make_model(), None)
    results = run_ranks(WORLD, train_ddp, options)
    for weights in results:
        assert_close(weights, expected, atol=1e-5)
        assert_close(weights, results[0], atol=0)


def test_equals_gloo_bitwise() -> None:
    """With 2 ranks there is one order of summation, and division by 2 is exact."""
    ours = run_ranks(WORLD, train_ddp, {})
    theirs = run_ranks(WORLD, train_ddp, {}, backend="gloo")
    for weights, expected in zip(ours, theirs, strict=True):
        assert_close(weights, expected, atol=0)


def accumulate(rank: int) -> None:
    """no_sync: gradients of two micro-batches, one exchange."""
    model = wrap(make_model())
    halves = [tensor.chunk(2) for tensor in batch(0, rank)]
    with model.no_sync():
        nn.functional.mse_loss(model(halves[0][0]), halves[1][0]).backward()
    local = model.module[7].bias.grad.clone()
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, local)
    assert not torch.equal(everyone[0], everyone[1])
    nn.functional.mse_loss(model(halves[0][1]), halves[1][1]).backward()
    reference = make_model()
    (nn.functional.mse_loss(reference(batch(0, None)[0]), batch(0, None)[1]) * 2).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-5)


def test_no_sync() -> None:
    run_ranks(WORLD, accumulate)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.shared, self.left, self.right = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return (self.left if rank == 0 else self.right)(self.shared(x))


def train_branches(rank: int) -> None:
    """Each rank uses another part; a third is used by none."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4)
    reference = Branches()
    (sum(reference(x[r], r).square().mean() for r in range(2)) / 2).backward()
    module = Branches()
    module.unused = nn.Linear(4, 4)
    model = wrap(module, find_unused_parameters=True)
    for _ in range(2):
        model.zero_grad()
        model(x[rank], rank).square().mean().backward()
        for name, parameter in reference.named_parameters():
            actual = module.get_parameter(name).grad
            torch.testing.assert_close(actual, parameter.grad, rtol=0, atol=1e-6)
        assert module.unused.weight.grad is None


def test_unused_parameters() -> None:
    run_ranks(WORLD, train_branches)


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


def train_with_hook(rank: int, name: str) -> dict[str, Tensor]:
    # One bucket where the hook issues collectives from callbacks: with several, their order would
    # depend on the ranks' timing.
    cap = {"chained": 25.0, "power_sgd": 25.0}.get(name, 0.05)
    model = DistributedDataParallel(make_model(), bucket_cap_mb=cap)
    group: Any = dist.group.WORLD
    hooks: dict[str, tuple[Any, Any]] = {
        "allreduce": (group, default_hooks.allreduce_hook),
        "fp16": (group, default_hooks.fp16_compress_hook),
        "fp16_wrapper": (group, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
        "chained": (None, chained_hook),
        "power_sgd": (
            powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2),
            powerSGD_hook.powerSGD_hook,
        ),
    }
    model.register_comm_hook(*hooks[name])
    return train(model, rank)


# fp16 rounds gradients to 11 bits, five times; PowerSGD is an approximation.
@pytest.mark.parametrize(
    ("name", "atol"),
    [
        ("allreduce", 1e-5),
        ("fp16", 1e-3),
        ("fp16_wrapper", 1e-3),
        ("chained", 1e-5),
        ("power_sgd", 1),
    ],
)
def test_hooks(name: str, atol: float) -> None:
    expected = train(make_model(), None)
    results = run_ranks(WORLD, train_with_hook, name)
    for weights in results:
        assert_close(weights, expected, atol=atol)
        assert_close(weights, results[0], atol=0)


# ---- beside DDP


def train_zero(rank: int) -> dict[str, Tensor]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = wrap(make_model())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1, momentum=0.9
    )
    for step in range(STEPS):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return copy.deepcopy(model.module.state_dict())


def test_zero_redundancy_optimizer() -> None:
    expected = train(make_model(), None)
    for weights in run_ranks(WORLD, train_zero):
        assert_close(weights, expected, atol=1e-5)


def train_uneven(rank: int) -> dict[str, Tensor]:
    """join: rank 1 has fewer batches."""
    from torch.distributed.algorithms.join import Join

    model = wrap(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for step in range(4 - 2 * rank):
            x, y = batch(step, rank)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return copy.deepcopy(model.module.state_dict())


def test_uneven_inputs() -> None:
    first, second = run_ranks(WORLD, train_uneven)
    assert_close(first, second, atol=0)
