"""torch.distributed.pipelining over ringcomm: stages on ranks, the loss curve of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from curves import STEPS, Run, assert_weights, batch, make_model, sgd, single_process, weights_of
from ranks import run_ranks
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)

NUM_MICRO_BATCHES = 4
NUM_BLOCKS = 7  # and the head: 8 layers, over at most 4 stages
SINGLE: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
SEVERAL: dict[str, Any] = {
    "interleaved 1f1b": ScheduleInterleaved1F1B,
    "looped bfs": ScheduleLoopedBFS,
    "zero bubble": ScheduleInterleavedZeroBubble,
}


def run_pipeline(rank: int, name: str, num_ranks: int) -> Run:
    """Stage i on rank i % num_ranks. The last rank has the losses; each its stages' weights."""
    num_stages = num_ranks if name in SINGLE else 2 * num_ranks
    layers = dict(make_model(NUM_BLOCKS).named_children())
    per_stage = len(layers) // num_stages
    stages, modules = [], []
    for stage_idx in range(rank, num_stages, num_ranks):
        first = stage_idx * per_stage
        names = [str(i) for i in range(first, first + per_stage)]
        modules.append(nn.Sequential())
        for layer in names:
            modules[-1].add_module(layer, layers[layer])
        stages.append(PipelineStage(modules[-1], stage_idx, num_stages, torch.device("cpu")))
    options: dict[str, Any] = {"loss_fn": nn.functional.mse_loss}
    if name in SINGLE:
        schedule = SINGLE[name](stages[0], NUM_MICRO_BATCHES, **options)
    else:
        schedule = SEVERAL[name](stages, NUM_MICRO_BATCHES, **options)
    optimizer = sgd([p for module in modules for p in module.parameters()])
    curve = []
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        losses: list[Any] = []
        inputs = (x,) if rank == 0 else ()
        if rank == num_ranks - 1:
            schedule.step(*inputs, target=y, losses=losses)
            curve.append(sum(loss.item() for loss in losses) / NUM_MICRO_BATCHES)
        else:
            schedule.step(*inputs)
        optimizer.step()
    weights = {k: v for module in modules for k, v in weights_of(module).items()}
    return Run(curve, weights)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", [*SINGLE, *SEVERAL])
def test_pipeline(name: str, num_ranks: int) -> None:
    expected = single_process(NUM_BLOCKS)
    results = run_ranks(num_ranks, run_pipeline, name, num_ranks)
    assert results[-1].losses == pytest.approx(expected.losses, rel=0, abs=1e-5)
    weights = {k: v for result in results for k, v in result.weights.items()}
    assert_weights(weights, expected.weights, atol=1e-5)
