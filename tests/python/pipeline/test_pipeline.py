"""Pipelines beside one process that runs the same micro-batches: losses and weights, to the bit."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from curves import Run, assert_weights, sgd
from full_states import full_weights
from pipeline_models import (
    CLIP_NORM,
    STEPS,
    VOCAB,
    WIDTH,
    Case,
    M,
    alone,
    make_deep,
    make_tied,
    mse,
    token_batch,
    tokens_loss,
)
from ranks import in_ranks, run_ranks
from steps import apply_steps
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ringcomm.optim import AdaLomo, Lomo
from ringcomm.parallel import clip_grad_norm_, get_state_dict, pipeline, set_state_dict
from ringcomm.parallel.pipeline import pipeline as pipeline_module


def train(rank: int, device: str, case: Case) -> tuple[Run, list[float]]:
    place = ranks.place(device, rank)
    model = case.make()
    if case.model == "tied" and rank > 0:  # values are those of the first rank that has them
        with torch.no_grad():
            model.embed.weight.zero_()
    pipe = pipeline.Pipeline(
        *(model.blocks() if case.model == "tied" else model, case.loss, case.schedule, M),
        mesh=init_device_mesh(place.type, (case.num_ranks,)),
        device=place,
        num_stages_per_rank=case.stages_per_rank,
        costs=case.costs,
        recompute=case.recompute,
        loss_reduction="sum" if case.is_sum else "mean",
        count_items=Tensor.numel,
    )
    optimizer = sgd(pipe.parameters())
    losses, norms = [], []
    if case.evaluates:
        pipe.evaluate(*case.batch(0))
        pipe.forward(case.batch(0)[0])
    for step in range(STEPS):
        for part in range(case.num_batches):
            x, y = case.batch(case.num_batches * step + part)
            with torch.autocast(place.type, torch.bfloat16, enabled=case.autocast):
                losses.append(float(pipe.step(x, y, loss_scale=case.scale)))
        if case.clips:
            norms.append(float(clip_grad_norm_(pipe, CLIP_NORM)))
        apply_steps(optimizer)
    return Run(losses, {name: value.cpu() for name, value in full_weights(pipe).items()}), norms


SCHEDULES = {
    # https://github.com/pytorch/pytorch/pull/181365: split backward passes and shared weights.
    "shared": ("1f1b", "zero-bubble", "zbv"),
    # https://github.com/pytorch/pytorch/issues/152827: an input that a stage does not use.
    "unused": ("1f1b", "zero-bubble", "zbv"),
    # https://github.com/pytorch/pytorch/issues/727: in-place operations on leaves.
    "in place": ("gpipe", "interleaved", "zbv"),
}


@pytest.mark.parametrize(
    "case",
    [
        Case("gpipe", 1),
        Case("gpipe", 2, num_batches=2, scale=0.5, clips=True),
        Case("gpipe", 4, recompute=True, autocast=True),
        Case("1f1b", 2, autocast=True),
        Case("1f1b", 2, "tied", num_batches=2, clips=True),
        Case("1f1b", 3, "frozen", recompute=True),
        Case("1f1b", 4, evaluates=True),
        Case("interleaved", 2, stages_per_rank=3, recompute=True),
        Case("interleaved", 4, autocast=True),
        Case("interleaved", 4, "tied", clips=True),
        Case("zero-bubble", 2, is_sum=True, num_batches=2, scale=1 / 64),
        Case("zero-bubble", 2, "frozen", stages_per_rank=3),
        Case("zero-bubble", 3, "twice"),
        Case("zero-bubble", 4, recompute=True, autocast=True),
        Case("zbv", 1),
        Case("zbv", 2, "tied", num_batches=2),
        Case("zbv", 2, "frozen", recompute=True),
        Case("zbv", 3, autocast=True),
        Case("zbv", 4, evaluates=True),
        *(
            Case(schedule, 2, model)
            for model, schedules in SCHEDULES.items()
            for schedule in schedules
        ),
    ],
    ids=lambda case: "-".join(map(str, case)),
)
def test_bits_of_one_process(device: str, case: Case) -> None:
    """Nine blocks, which do not divide. Backwards are outside of autocast, as users write them.

    https://github.com/pytorch/pytorch/issues/162822: stages without a backward pass.
    https://github.com/pytorch/torchtitan/issues/1733: earlier gradients are scaled again.
    https://github.com/deepspeedai/DeepSpeed/issues/3895: messages that need no gradient.
    """
    expected, norms = alone(case)
    assert expected.losses[-1] < expected.losses[0]
    if case.autocast:
        assert expected.losses != alone(case._replace(autocast=False))[0].losses
    is_exact = device == "cpu" and case.model not in ("tied", "shared") and not case.clips
    atol = 0 if is_exact else 1e-6 if device == "cpu" else 1e-3
    for run, found in run_ranks(case.num_ranks, train, device, case):
        assert run.losses == pytest.approx(expected.losses, rel=0, abs=10 * atol)
        assert found == pytest.approx(norms, rel=1e-5 if device == "cpu" else 1e-3)
        assert_weights(run.weights, expected.weights, atol)


@in_ranks(2)
def test_a_state_goes_to_the_cpu_and_back(rank: int, device: str) -> None:
    case, states = Case("1f1b", 2), tuple[Any, ...]()
    for step, kind in enumerate((device, "cpu", device)):
        place = ranks.place(kind, rank)
        mesh = init_device_mesh(kind, (2,))
        pipe = pipeline.Pipeline(case.make(), mse, case.schedule, M, mesh=mesh, device=place)
        optimizer = sgd(pipe.parameters())
        if states:
            set_state_dict(pipe, optimizer, *states)
        assert {param.device.type for param in pipe.parameters()} == {kind}
        pipe.step(*case.batch(step))
        apply_steps(optimizer)
        states = get_state_dict(pipe, optimizer, full=True)
    assert_weights(states[0], alone(case)[0].weights, 1e-6)


@in_ranks(2)
def test_dropout_that_is_recomputed(rank: int) -> None:
    """https://github.com/allenai/OLMo-core/pull/828: other masks in the recomputation."""
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(4)]
        pipe = pipeline.Pipeline(blocks, mse, num_microbatches=4, recompute=recompute)
        torch.manual_seed(rank)
        loss = pipe.step(torch.ones(8, 8), torch.ones(8, 8))
        found.append([loss, *(param.grad for param in pipe.parameters())])
    torch.testing.assert_close(*found)


class Positions(nn.Module):
    """Keeps a table for each length, and counts what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.tables: dict[int, Tensor] = {}
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        length = x.shape[1]
        if length not in self.tables:
            self.tables[length] = torch.arange(length, dtype=torch.float32)[:, None].cos()
        return self.linear(x).tanh() + self.tables[length]


def of_length(length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    x, y = torch.randn(2, 2 * M, length, 6, generator=generator)
    return x, y


LENGTHS = range(3, 10)


@in_ranks(2)
def test_many_lengths(rank: int) -> None:
    """Few of them have stages kept."""
    pipeline_module.MAX_SHAPES = 4
    torch.manual_seed(0)
    blocks = [Positions() for _ in range(4)]
    pipe = pipeline.Pipeline(blocks, mse, "1f1b", M)
    for length in LENGTHS:
        x, y = of_length(length)
        whole = nn.Sequential(*blocks)(x.clone())
        assert float(pipe.step(x, y)) == pytest.approx(float(mse(whole, y)), rel=1e-6)
    assert len(pipe._made) == 4
    for wrong in (of_length(4 + rank), of_length(4) if rank == 0 else (torch.zeros(3, 4, 6),) * 2):
        with pytest.raises(
            ValueError, match=r"ranks disagree on the inputs|3 rows of inputs do not"
        ):
            pipe.step(*wrong)
    pipe.evaluate(*of_length(LENGTHS[-1]))
    pipe.evaluate(*of_length(LENGTHS[0]))
    # One forward of zeros, for the first length; the whole model ran as well.
    counts = [block.num_calls for block in pipe.module.children() if isinstance(block, Positions)]
    num = len(LENGTHS)
    assert counts == [(num + 2) * M + 1 + num] * 2


@in_ranks(2)
def test_ddp_does_not_see_backwards_in_halves(rank: int) -> None:
    """Other systems beside a pipeline: tests/python/training, the table of meshes."""
    alone = [dist.new_group([r]) for r in range(2)][rank]
    wrap = lambda stage: DistributedDataParallel(stage, process_group=alone)  # noqa: E731
    with pytest.raises(ValueError, match="DistributedDataParallel does not see the grad"):
        pipeline.Pipeline(make_deep(), mse, "zero-bubble", M, wrap=wrap)


def make_mirror() -> nn.Sequential:
    """The second half has the weights of the first in the other order."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    for first, last in zip(layers[:2], layers[:1:-1], strict=True):
        last.weight = first.weight
    return nn.Sequential(*layers)


@in_ranks(2)
def test_several_tied_weights_in_another_order(rank: int) -> None:
    whole, model = make_mirror(), make_mirror()
    if rank > 0:  # values are those of the first rank that has them
        torch.nn.init.zeros_(model.get_parameter("2.weight"))
    pipe = pipeline.Pipeline(model, mse, "1f1b", M)
    plain, own = (torch.optim.SGD(each.parameters(), 0.1) for each in (whole, pipe.module))
    for step in range(STEPS):
        x = torch.randn(M, WIDTH, generator=torch.Generator().manual_seed(step))
        mse(whole(x), x).backward()
        pipe.step(x, x)
        for optimizer in (plain, own):
            apply_steps(optimizer)
    assert_weights(full_weights(pipe), whole.state_dict(), atol=1e-6)


@in_ranks(4)
def test_stages_of_fully_shard_in_two_dtypes(rank: int) -> None:
    """Gradients in float32 of weights that are gathered in bfloat16."""
    rows = [dist.new_group([first, first + 1]) for first in (0, 2)]
    columns = [dist.new_group([first, first + 2]) for first in (0, 1)]
    mesh = DeviceMesh.from_group(columns[rank % 2], "cpu")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    found = []
    for options in ({}, {"mp_policy": policy}):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        wrap: Any = functools.partial(fully_shard, mesh=mesh, **options)
        pipe = pipeline.Pipeline(model, mse, "1f1b", M, group=rows[rank // 2], wrap=wrap)
        optimizer = torch.optim.SGD(pipe.module.parameters(), 0.1)
        x = torch.randn(M, WIDTH, generator=torch.Generator().manual_seed(rank // 2))
        pipe.step(x, x.bfloat16() if options else x)  # torch 2.11 has no losses of two dtypes
        assert all(param.grad is not None for param in pipe.module.parameters())
        optimizer.step()
        found.append({name: value.float() for name, value in full_weights(pipe).items()})
    assert_weights(found[1], found[0], atol=1e-2)


def make_untied() -> Any:
    model = make_tied()
    model.head = nn.Linear(WIDTH, VOCAB)
    return model


def train_in_backward(rank: int, kind: Any, schedule: str, num_stages: int | None) -> Run:
    """Two stages, each on two data-parallel ranks."""
    rows = [dist.new_group([first, first + 1]) for first in (0, 2)]
    columns = [dist.new_group([first, first + 2]) for first in (0, 1)]
    pipe = pipeline.Pipeline(
        *(make_untied().blocks(), tokens_loss, schedule, M // 2),
        group=rows[rank // 2],
        num_stages_per_rank=num_stages,
        count_items=Tensor.numel,
    )
    optimizer = kind(
        pipe.module, 0.1, group=columns[rank % 2], accumulation_steps=M // 2, weight_decay=0.01
    )
    losses = []
    for step in range(STEPS):
        x, y = (part.chunk(2)[rank // 2] for part in token_batch(step))
        losses.append(float(pipe.step(x, y)))
        apply_steps(optimizer)
    return Run(losses, full_weights(pipe))


@pytest.mark.parametrize(
    ("kind", "schedule", "num_stages"),
    [(Lomo, "interleaved", 2), (AdaLomo, "zero-bubble", 2), (Lomo, "zbv", None)],
)
def test_updates_in_the_backward_pass(kind: Any, schedule: str, num_stages: int | None) -> None:
    """Also of backward passes in halves, in which torch sets gradients of weights itself."""
    model = make_untied()
    optimizer = kind(model, 0.1, accumulation_steps=M, weight_decay=0.01)
    losses = []
    for step in range(STEPS):
        parts = zip(*(part.chunk(M) for part in token_batch(step)), strict=True)
        found = [tokens_loss(model(x), y) for x, y in parts]
        for loss in found:
            optimizer.backward(loss / M)
        losses.append(float(sum(found) / M))
        apply_steps(optimizer)
    runs = run_ranks(4, train_in_backward, kind, schedule, num_stages)
    for first, second in ((runs[0], runs[2]), (runs[1], runs[3])):
        pairs = zip(first.losses, second.losses, strict=True)
        assert [sum(pair) / 2 for pair in pairs] == pytest.approx(losses, rel=1e-5)
    for run in runs:
        assert_weights(run.weights, model.state_dict(), atol=1e-5)
