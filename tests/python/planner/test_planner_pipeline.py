"""The planner's pipelines beside torch's schedules on ranks: bytes sent, and what is alive."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import pytest
import torch
from planner_models import SHAPE, Decoder, rows, sent_bytes
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from ringcomm.planner import Cluster, Job, plan
from ringcomm.planner.memory import memory_of_stage
from ringcomm.planner.step_time import traffic_of_stage

NUM_STAGES, NUM_MICRO_BATCHES = 2, 4
DEEP = dataclasses.replace(SHAPE, layers=4)
SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Stage(nn.Module):
    """Some layers of a decoder, and what is before or behind them."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        whole = Decoder(DEEP)
        per_stage = DEEP.layers // NUM_STAGES
        layers = list(whole.layers)[stage * per_stage : (stage + 1) * per_stage]
        before = [whole.tok] if stage == 0 else []
        behind = [whole.norm, whole.head] if stage == NUM_STAGES - 1 else []
        self.all = nn.Sequential(*before, *layers, *behind)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.all(x)
        return found


class Held:
    """What autograd has saved, until it lets go."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Watch:
    """The most bytes that autograd keeps: live storages, each once, without weights."""

    def __init__(self, module: nn.Module) -> None:
        self.weights = {param.untyped_storage().data_ptr() for param in module.parameters()}
        self.alive: weakref.WeakSet[Held] = weakref.WeakSet()
        self.peak = 0

    def hold(self, tensor: Tensor) -> Held:
        held = Held(tensor)
        self.alive.add(held)
        storages = [held.tensor.untyped_storage() for held in self.alive]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        kept = sum(size for key, size in sizes.items() if key not in self.weights)
        self.peak = max(self.peak, kept)
        return held


def run_stage(rank: int, schedule: str) -> tuple[int, int]:
    """Bytes sent in a step, and the most that the forward passes keep."""
    module = Stage(rank)
    stage = PipelineStage(module, rank, NUM_STAGES, torch.device("cpu"))
    loss = Decoder(DEEP).loss

    def loss_of(logits: Tensor, wanted: Tensor) -> Tensor:
        found: Tensor = loss(logits.flatten(0, 1), wanted.flatten())
        return found

    steps = SCHEDULES[schedule](stage, NUM_MICRO_BATCHES, loss_fn=loss_of)
    ids = torch.cat([rows(0), rows(1)])
    given = (ids[:, :-1],) if rank == 0 else ()
    wanted = {"target": ids[:, 1:]} if rank == NUM_STAGES - 1 else {}
    # The first one exchanges shapes, for which torch runs, and keeps, one forward pass more.
    steps.step(*given, **wanted)
    watch, before = Watch(module), sent_bytes()
    with torch.autograd.graph.saved_tensors_hooks(watch.hold, lambda held: held.tensor):
        steps.step(*given, **wanted)
    return sent_bytes() - before, watch.peak


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_of_torch(schedule: str) -> None:
    job = Job(
        NUM_MICRO_BATCHES * SHAPE.context,
        precision="fp32",
        fused_norms=False,
        systems=("ddp",),
        schedules=(schedule,),
        checkpointings=("none",),
        pp=NUM_STAGES,
    )
    best = plan(DEEP, Cluster(NUM_STAGES, "cpu-core"), job).ranked[0]
    candidate = best.candidate
    assert (candidate.num_micro_batches, candidate.micro_batch) == (NUM_MICRO_BATCHES, 1)
    activations = []
    for stage, (sent, kept) in enumerate(run_ranks(NUM_STAGES, run_stage, schedule)):
        traffic = traffic_of_stage(candidate, stage)
        assert sent == traffic.pipeline == traffic.sent
        activations.append(memory_of_stage(candidate, stage).activations)
        assert kept == pytest.approx(activations[-1], rel=0.05)
    assert best.memory.activations in activations
