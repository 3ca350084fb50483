"""Pipelines beside one process that runs the same micro-batches: losses and weights, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
from curves import Run, assert_weights, batch, sgd
from full_states import full_weights
from pipeline_models import M, Tied, accumulate, make_deep, make_tied, token_batch, tokens_loss
from ranks import RankFailure, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ringcomm.parallel import clip_grad_norm_, pipeline, zero
from ringcomm.parallel.pipeline import pipeline as pipeline_module

STEPS = 3

mse = nn.functional.mse_loss


def reference(make: Callable[[], nn.Module] = make_deep, autocast: bool = False) -> Run:
    """Micro-batches one after the other, their gradients added up."""
    model = make()
    optimizer = sgd(model.parameters())
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(accumulate(model, mse, *batch(step), autocast=autocast))
        optimizer.step()
    assert losses[-1] < losses[0]
    return Run(losses, {k: v.clone() for k, v in model.state_dict().items()})


def train(
    rank: int, device: str, num_ranks: int, schedule: str, options: dict[str, Any], autocast: bool
) -> Run:
    place = ranks.place(device, rank)
    mesh = init_device_mesh(place.type, (num_ranks,))
    pipe = pipeline.Pipeline(make_deep(), mse, schedule, M, mesh=mesh, device=place, **options)
    optimizer = sgd(pipe.parameters())
    losses = []
    for step in range(STEPS):
        with torch.autocast(place.type, torch.bfloat16, enabled=autocast):
            losses.append(float(pipe.step(*batch(step))))
        optimizer.step()
        optimizer.zero_grad()
    return Run(losses, {name: value.cpu() for name, value in full_weights(pipe).items()})


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "options", "autocast"),
    [
        ("gpipe", 1, {}, False),
        ("gpipe", 4, {"recompute": True}, True),
        ("1f1b", 2, {}, True),
        ("1f1b", 3, {"recompute": True}, False),
        ("1f1b", 4, {}, False),
        ("interleaved", 2, {"num_stages_per_rank": 3, "recompute": True}, False),
        ("interleaved", 4, {}, True),
        ("zero-bubble", 2, {"num_stages_per_rank": 3}, False),
        ("zero-bubble", 4, {"recompute": True}, True),
        ("zbv", 1, {}, False),
        ("zbv", 2, {"recompute": True}, False),
        ("zbv", 3, {}, True),
        ("zbv", 4, {}, False),
    ],
    ids=str,
)
def test_bits_of_one_process(
    device: str, schedule: str, num_ranks: int, options: dict[str, Any], autocast: bool
) -> None:
    """Nine blocks, which do not divide. Backwards are outside of autocast, as users write them."""
    expected = reference(autocast=autocast)
    if autocast:
        assert expected.losses != reference().losses
    for run in run_ranks(num_ranks, train, device, num_ranks, schedule, options, autocast):
        if device == "cpu":
            assert run.losses == expected.losses
        assert_weights(run.weights, expected.weights, atol=0 if device == "cpu" else 1e-3)


# ---- gradients


def sum_loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


def gradients(rank: int, schedule: str, is_sum: bool) -> tuple[float, dict[str, Tensor]]:
    """Of two steps, whose loss is scaled."""
    loss_fn, reduction = (sum_loss, "sum") if is_sum else (mse, "mean")
    pipe = pipeline.Pipeline(make_deep(), loss_fn, schedule, M, loss_reduction=reduction)
    losses = [float(pipe.step(*batch(step), loss_scale=1024.0)) for step in range(2)]
    return losses[0], {k: p.grad for k, p in pipe.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("schedule", "is_sum"), [("gpipe", False), ("zero-bubble", True)])
def test_gradients_of_steps_add_up_and_are_scaled(schedule: str, is_sum: bool) -> None:
    model = make_deep()
    loss_fn, scale = (sum_loss, 1024.0 * M) if is_sum else (mse, 1024.0)
    losses = [accumulate(model, loss_fn, *batch(step), scale=scale) for step in range(2)]
    expected = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    found: dict[str, Tensor] = {}
    for loss, part in run_ranks(2, gradients, schedule, is_sum):
        assert loss == pytest.approx(losses[0] * (M if is_sum else 1), rel=1e-6)
        found |= part
    assert_weights(found, expected, atol=0)


# ---- batches of many lengths


class Positions(nn.Module):
    """Keeps a table for each length, and counts what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.tables: dict[int, Tensor] = {}
        self.longest: Tensor | None = None
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        length = x.shape[1]
        if length not in self.tables:
            self.tables[length] = torch.arange(length, dtype=torch.float32)[:, None].cos()
        if self.longest is None or len(self.longest) < length:
            self.longest = torch.arange(length, dtype=torch.float32)[:, None].sin()
        return self.linear(x).tanh() + self.tables[length] + self.longest[:length]


def make_positions() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Positions() for _ in range(4)))


def of_length(length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    x, y = torch.randn(2, 2 * M, length, 6, generator=generator)
    return x, y


def train_lengths(rank: int) -> tuple[list[float], dict[str, Any], list[int]]:
    pipeline_module.MAX_SHAPES = 8
    model = make_positions()
    pipe = pipeline.Pipeline(model, mse, "1f1b", M)
    optimizer = sgd(pipe.parameters())
    losses = []
    for length in LENGTHS:
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(float(pipe.step(*of_length(length))))
        optimizer.step()
        optimizer.zero_grad()
    assert len(pipe._made) == 8
    for wrong in (of_length(4 + rank), of_length(4) if rank == 0 else (torch.zeros(3, 4, 6),) * 2):
        with pytest.raises(
            ValueError, match=r"ranks disagree on the inputs|3 rows of inputs do not"
        ):
            pipe.step(*wrong)
    pipe.evaluate(*of_length(4))
    counts = [block.num_calls for block in pipe.module.children() if isinstance(block, Positions)]
    return losses, full_weights(pipe), counts


LENGTHS = [*range(3, 19)]


def test_many_lengths() -> None:
    """Each new length costs a forward of zeros, and few have stages kept for them."""
    model = make_positions()
    optimizer = sgd(model.parameters())
    losses = []
    for length in LENGTHS:
        optimizer.zero_grad()
        losses.append(accumulate(model, mse, *of_length(length), autocast=True))
        optimizer.step()
    for found, state, counts in run_ranks(2, train_lengths):
        assert found == pytest.approx(losses, rel=1e-6)
        assert_weights(state, model.state_dict(), atol=0)
        # 16 steps and an evaluation, whose length is new again.
        assert counts == [17 * M + 17] * 2


# ---- weights that stages share, and clipping


def train_tied(rank: int, schedule: str, max_norm: float) -> tuple[Run, list[float]]:
    model = make_tied()
    if rank > 0:  # values are those of the first rank that has them
        with torch.no_grad():
            model.embed.weight.zero_()
    pipe = pipeline.Pipeline(model.blocks(), tokens_loss, schedule, M)
    optimizer = sgd(pipe.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        for part in (0, 1):  # two batches a step
            losses.append(float(pipe.step(*token_batch(2 * step + part))))
        norms.append(float(clip_grad_norm_(pipe, max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return Run(losses, full_weights(pipe)), norms


def reference_tied(max_norm: float) -> tuple[Run, list[float]]:
    model: Tied = make_tied()
    optimizer = sgd(model.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in (0, 1):
            losses.append(accumulate(model, tokens_loss, *token_batch(2 * step + part)))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
    return Run(losses, {k: v.clone() for k, v in model.state_dict().items()}), norms


@pytest.mark.parametrize(("schedule", "num_ranks"), [("1f1b", 2), ("interleaved", 4), ("zbv", 2)])
def test_embedding_and_head_share_a_weight(schedule: str, num_ranks: int) -> None:
    """Names, gradients and norms are those of the whole model; the norm is clipped."""
    expected, norms = reference_tied(0.5)
    assert min(norms) > 0.5
    for run, found in run_ranks(num_ranks, train_tied, schedule, 0.5):
        assert run.losses == pytest.approx(expected.losses, rel=0, abs=1e-5)
        assert found == pytest.approx(norms, rel=1e-5)
        assert_weights(run.weights, expected.weights, atol=1e-6)


def train_frozen(rank: int, schedule: str) -> dict[str, Tensor]:
    model = make_deep()
    for block in list(model)[:3]:  # the first stage, and a part of the second
        block.requires_grad_(False)
    pipe = pipeline.Pipeline(model, mse, schedule, M, costs=[3, 3, 1, 1, 1, 1, 1, 1, 1])
    pipe.step(*batch(0))
    return {k: p.grad for k, p in pipe.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "zbv"])
def test_frozen_blocks(schedule: str) -> None:
    model = make_deep()
    for block in list(model)[:3]:
        block.requires_grad_(False)
    accumulate(model, mse, *batch(0))
    expected = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    found: dict[str, Tensor] = {}
    for part in run_ranks(2, train_frozen, schedule):
        found |= part
    assert_weights(found, expected, atol=0)


# ---- beside data parallelism


def train_on_mesh(rank: int, way: str, schedule: str) -> Run:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    dp_group = mesh.get_group("dp")
    wrap = None
    if way == "ddp":
        wrap = lambda stage: DistributedDataParallel(stage, process_group=dp_group)  # noqa: E731
    pipe = pipeline.Pipeline(make_deep(), mse, schedule, M // 2, mesh=mesh["pp"], wrap=wrap)
    optimizer: torch.optim.Optimizer = sgd(pipe.parameters())
    if way == "zero":
        optimizer = zero.shard(pipe.module, optimizer, 1, group=dp_group)
    losses = []
    for step in range(STEPS):
        losses.append(float(pipe.step(*batch(step, mesh.get_local_rank("dp"), 2))))
        optimizer.step()
        optimizer.zero_grad()
    return Run(losses, full_weights(pipe))


@pytest.mark.parametrize(("way", "schedule"), [("ddp", "interleaved"), ("zero", "zero-bubble")])
def test_two_pipelines_of_two_stages(way: str, schedule: str) -> None:
    """Ranks 0 and 1 see one half of the rows, ranks 2 and 3 the other."""
    expected = reference()
    results = run_ranks(4, train_on_mesh, way, schedule)
    means = [(a + b) / 2 for a, b in zip(results[0].losses, results[2].losses, strict=True)]
    assert means == pytest.approx(expected.losses, rel=0, abs=1e-6)
    assert results[0].losses != results[2].losses
    for run in results:
        assert_weights(run.weights, expected.weights, atol=1e-6)


def test_ddp_does_not_see_backwards_in_halves() -> None:
    with pytest.raises(RankFailure, match="DistributedDataParallel does not see the grad"):
        run_ranks(4, train_on_mesh, "ddp", "zero-bubble")
