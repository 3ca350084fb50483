"""DistributedDataParallel and its hooks: the loss curve of one process."""

from __future__ import annotations

from typing import Any

import curves
import pytest
import torch
import torch.distributed as dist
from curves import Run, assert_same_run, assert_weights, weights_of
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
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
    return train(wrap(model, **options), rank)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"static_graph": True},
    {"find_unused_parameters": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_one_process(options: dict[str, Any]) -> None:
    assert_same_run(run_ranks(WORLD, train_ddp, options), single_process())


def test_equals_gloo_bitwise() -> None:
    """With 2 ranks there is one order of summation, and division by 2 is exact."""
    ours = run_ranks(WORLD, train_ddp, {})
    theirs = run_ranks(WORLD, train_ddp, {}, backend="gloo")
    assert ours[0].losses == theirs[0].losses
    assert_weights(ours[0].weights, theirs[0].weights, atol=0)


def accumulate(rank: int) -> None:
    """no_sync: gradients of two micro-batches, one exchange."""
    model = wrap(make_model())
    halves = [tensor.chunk(2) for tensor in batch(0, rank, WORLD)]
    with model.no_sync():
        nn.functional.mse_loss(model(halves[0][0]), halves[1][0]).backward()
    local = model.module[7].bias.grad.clone()
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, local)
    assert not torch.equal(everyone[0], everyone[1])
    nn.functional.mse_loss(model(halves[0][1]), halves[1][1]).backward()
    reference = make_model()
    x, y = batch(0)
    (nn.functional.mse_loss(reference(x), y) * 2).backward()
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


def train_with_hook(rank: int, name: str) -> Run:
    # One bucket where the hook issues collectives from callbacks: with several, their order would
    # depend on the ranks' timing.
    cap = {"chained": 25.0, "power_sgd": 25.0}.get(name, 0.05)
    model = wrap(make_model(), bucket_cap_mb=cap)
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
        "noop": (None, debugging_hooks.noop_hook),
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
        ("power_sgd", 0.1),
    ],
)
def test_hooks(name: str, atol: float) -> None:
    assert_same_run(run_ranks(WORLD, train_with_hook, name), single_process(), atol)


def test_noop_hook() -> None:
    """Each rank trains alone, to the last bit: the control of what the others compare."""
    results = run_ranks(WORLD, train_with_hook, "noop")
    for rank, result in enumerate(results):
        alone = train(make_model(), rank)
        assert result.losses == alone.losses
        assert_weights(result.weights, alone.weights, atol=0)
    with pytest.raises(AssertionError):
        assert_same_run(results, single_process(), atol=1e-3)


FIRST_LOCAL_STEP = 2
PERIOD = 2


def train_post_local_sgd(rank: int) -> Run:
    """Two pairs of ranks, which go their own ways from step 2 on and meet in every second.

    With the other model: where averaging replaces a weight that is not contiguous, torch's DDP
    loses track of it, over any backend.
    """
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    pair, _ = dist.new_subgroups(2)
    model = wrap(curves.make_model(), bucket_cap_mb=0.001)
    state = post_localSGD_hook.PostLocalSGDState(None, pair, start_localSGD_iter=FIRST_LOCAL_STEP)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        optim=curves.sgd(model.parameters()),
        averager=PeriodicModelAverager(period=PERIOD, warmup_steps=FIRST_LOCAL_STEP),
    )
    losses = curves.train(model, rank, 4, optimizer)
    return Run(losses, weights_of(model))


def simulate_post_local_sgd() -> list[Run]:
    """The two pairs in one process."""
    models = [curves.make_model() for _ in range(2)]
    optimizers = [curves.sgd(model.parameters()) for model in models]
    losses: list[list[float]] = [[], []]

    def average(tensors: list[Any]) -> None:
        mean = (tensors[0] + tensors[1]) / 2
        for tensor in tensors:
            tensor.copy_(mean)

    for step in range(curves.STEPS):
        for pair, model in enumerate(models):
            x, y = curves.batch(step, pair, 2)
            optimizers[pair].zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            losses[pair].append(loss.item())
        parameters = list(zip(*(model.parameters() for model in models), strict=True))
        if step < FIRST_LOCAL_STEP:
            for both in parameters:
                average([parameter.grad for parameter in both])
        for optimizer in optimizers:
            optimizer.step()
        if step >= FIRST_LOCAL_STEP and (step - FIRST_LOCAL_STEP) % PERIOD == 0:
            with torch.no_grad():
                for both in parameters:
                    average(list(both))
    return [Run(own, weights_of(model)) for own, model in zip(losses, models, strict=True)]


def test_post_local_sgd() -> None:
    results = run_ranks(4, train_post_local_sgd)
    for pair, expected in enumerate(simulate_post_local_sgd()):
        assert_same_run(results[2 * pair : 2 * pair + 2], expected)


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
