"""The planner's pipelines beside torch's schedules on ranks: bytes sent, and what is alive."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from planner_models import SHAPE, Decoder, rows, sent_bytes
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from ringcomm import planner
from ringcomm.planner import Cluster, Job
from ringcomm.planner.memory import memory_of_stage
from ringcomm.planner.traffic import traffic_of_stage

NUM_STAGES, NUM_MICRO_BATCHES = 2, 4
DEEP = dataclasses.replace(SHAPE, layers=4)
SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Stage(nn.Module):
    """Some layers of a decoder, and what is before or behind them."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        whole = Decoder(DEEP)
        per_stage = DEEP.layers // NUM_STAGES
        self.layers = whole.layers[stage * per_stage : (stage + 1) * per_stage]
        self.tok = whole.tok if stage == 0 else None
        self.end: Any = nn.Sequential(whole.norm, whole.head) if stage == NUM_STAGES - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.tok is None else self.tok(x)
        layers: Any = self.layers
        for layer in layers:
            x = layer(x)
        return x if self.end is None else self.end(x)


class Watch:
    """What autograd keeps: live storages, each once, without weights, and the most of them."""

    def __init__(self, module: nn.Module) -> None:
        self.weights = {param.untyped_storage().data_ptr() for param in module.parameters()}
        self.alive: dict[int, tuple[int, int]] = {}  # by address: how often, and bytes
        self.peak = 0

    def hold(self, tensor: Tensor) -> tuple[Tensor, object]:
        """The tensor, and what tells when it is let go."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key in self.weights:
            return tensor, None
        count, _ = self.alive.get(key, (0, 0))
        self.alive[key] = count + 1, storage.nbytes()
        self.peak = max(self.peak, sum(size for count, size in self.alive.values() if count))
        return tensor, _Held(self, key)

    def let_go(self, key: int) -> None:
        count, size = self.alive[key]
        self.alive[key] = count - 1, size


class _Held:
    def __init__(self, watch: Watch, key: int) -> None:
        self.watch, self.key = watch, key

    def __del__(self) -> None:
        self.watch.let_go(self.key)


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
    with torch.autograd.graph.saved_tensors_hooks(watch.hold, lambda held: held[0]):
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
    plans = planner.plan(DEEP, Cluster(NUM_STAGES, planner.find_hardware("cpu-core")), job)
    candidate = plans.ranked[0].candidate
    assert (candidate.num_micro_batches, candidate.micro_batch) == (NUM_MICRO_BATCHES, 1)
    for stage, (sent, kept) in enumerate(run_ranks(NUM_STAGES, run_stage, schedule)):
        traffic = traffic_of_stage(DEEP, plans.job, candidate, stage)
        assert sent == traffic.pipeline == traffic.sent
        memory = memory_of_stage(DEEP, plans.job, candidate, stage)
        assert kept == pytest.approx(memory.activations, rel=0.05)
    assert plans.ranked[0].memory.activations in {
        memory_of_stage(DEEP, plans.job, candidate, stage).activations for stage in range(2)
    }
