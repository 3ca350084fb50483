"""Pipelines against one process that runs the same micro-batches: losses and weights, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from curves import DIM, NUM_OUTPUTS, ROWS, Run, batch, make_model, sgd
from ranks import run_ranks
from torch import Tensor, nn

from ringcomm.parallel import pipeline

STEPS = 3
M = 8
SCHEDULES = [*pipeline.SCHEDULES]


def make_deep(num_blocks: int = 8) -> nn.Sequential:
    return make_model(num_blocks)


def reference(model: nn.Module, num_microbatches: int = M, steps: int = STEPS) -> Run:
    """Micro-batches one after the other, their gradients added up."""
    optimizer = sgd(model.parameters())
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        found = []
        x, y = batch(step)
        for rows, wanted in zip(x.chunk(num_microbatches), y.chunk(num_microbatches), strict=True):
            loss = nn.functional.mse_loss(model(rows), wanted)
            (loss / num_microbatches).backward()
            found.append(loss.detach())
        optimizer.step()
        losses.append(float(torch.stack(found).sum() / num_microbatches))
    assert losses[-1] < losses[0]
    return Run(losses, {k: v.clone() for k, v in model.state_dict().items()})


def train(rank: int, schedule: str, options: dict[str, Any]) -> Run:
    pipe = pipeline.Pipeline(make_deep(), nn.functional.mse_loss, schedule, M, **options)
    optimizer = sgd(pipe.parameters())
    losses = []
    for step in range(STEPS):
        losses.append(float(pipe.step(*batch(step))))
        optimizer.step()
        optimizer.zero_grad()
    return Run(losses, pipe.full_state_dict())


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bits_of_one_process(schedule: str, num_ranks: int, recompute: bool) -> None:
    expected = reference(make_deep())
    for run in run_ranks(num_ranks, train, schedule, {"recompute": recompute}):
        assert run.losses == expected.losses
        assert run.weights.keys() == expected.weights.keys()
        for name, value in expected.weights.items():
            assert torch.equal(run.weights[name], value), name
