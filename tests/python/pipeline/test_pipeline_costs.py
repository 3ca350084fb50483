"""What a step costs: bytes on the wire, activations, forwards; and the order of it all."""

from __future__ import annotations

import gc
import itertools
import json
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import slow
from curves import DIM, ROWS, batch
from pipeline_models import M, make_deep, mse
from ranks import in_ranks, run_ranks
from schedule_simulation import orders_of, simulate
from torch import Tensor
from zero_models import sent_bytes

from ringcomm.parallel import pipeline
from ringcomm.parallel.pipeline.torch_stage import HAS_HALVES

ACTIVATION_BYTES = ROWS // M * DIM * 4


class Packed:
    """What autograd keeps of one tensor."""

    def __init__(self, tensor: Tensor, micro_batch: tuple[int, int]) -> None:
        self.tensor, self.micro_batch = tensor.detach(), micro_batch  # an output has a graph


class Saved:
    """By stage, the most micro-batches and bytes that autograd keeps."""

    def __init__(self, pipe: pipeline.Pipeline, *batch: Tensor) -> None:
        self.alive: weakref.WeakSet[Packed] = weakref.WeakSet()
        self.max_live: Counter[int] = Counter()
        self.max_bytes: Counter[int] = Counter()
        self.num_forwards: Counter[int] = Counter()
        self._given = {t.untyped_storage().data_ptr() for t in (*pipe.parameters(), *batch)}
        self._stage = 0
        for stage in pipe.plan.stages_of(pipe.group.rank()):
            block = pipe.module.get_submodule(pipe.stages[stage][0])
            block.register_forward_pre_hook(lambda *_, stage=stage: self._begin(stage))

    def _begin(self, stage: int) -> None:
        self._stage = stage
        self.num_forwards[stage] += 1

    def pack(self, tensor: Tensor) -> Packed:
        stage = self._stage
        found = Packed(tensor, (stage, self.num_forwards[stage]))
        if tensor.untyped_storage().data_ptr() not in self._given:
            self.alive.add(found)
            own = [p for p in self.alive if p.micro_batch[0] == stage]
            storages = [p.tensor.untyped_storage() for p in own]
            num_bytes = sum({s.data_ptr(): s.nbytes() for s in storages}.values())
            self.max_live[stage] = max(self.max_live[stage], len({p.micro_batch for p in own}))
            self.max_bytes[stage] = max(self.max_bytes[stage], num_bytes)
        return found


def run_step(rank: int, schedule: str, recompute: bool) -> dict[str, Any]:
    pipe = pipeline.Pipeline(make_deep(), mse, schedule, M, recompute=recompute)
    for _ in range(3):  # finds out shapes, and asks the loss
        pipe.step(*batch(0))
    x, y = batch(1)
    saved, before = Saved(pipe, x, y), sent_bytes()
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda packed: packed.tensor):
        pipe.step(x, y, record=True)
    sent = sent_bytes() - before
    gc.collect()
    assert not saved.alive
    own = pipe.plan.stages_of(rank)
    away = [
        s for s in own for t in (s - 1, s + 1) if t in range(pipe.plan.num_stages) if t not in own
    ]
    return {
        "sent": dict(sent),
        "num_sides": len(away),
        "saved": {k: v for k, v in vars(saved).items() if isinstance(v, Counter)},
        "plan": pipe.plan,
        "timeline": pipe.timeline(),
    }


@pytest.mark.parametrize(
    ("schedule", "num_ranks"),
    [("gpipe", 2), ("zero-bubble", 2), slow("1f1b", 4), slow("interleaved", 4), slow("zbv", 4)],
)
def test_a_step(schedule: str, num_ranks: int, tmp_path: Path) -> None:
    results = run_ranks(num_ranks, run_step, schedule, False)
    plan = results[0]["plan"]
    check_bytes(results, plan)
    simulated = simulate(schedule, num_ranks, M).max_live()
    saved: dict[str, Counter[int]] = {}
    for result in results:
        for name, found in result["saved"].items():
            saved.setdefault(name, Counter()).update(found)
    # min(m, p-i) micro-batches in stage i of 1F1B, m in GPipe.
    max_live = dict(sorted(saved["max_live"].items()))
    if HAS_HALVES or schedule not in ("zero-bubble", "zbv"):
        assert max_live == simulated
    else:  # both halves of a backward at once
        assert all(max_live[stage] <= num for stage, num in simulated.items())
    assert set(saved["num_forwards"].values()) == {M}
    for result in results:
        check_timeline(result["timeline"], plan)
        assert result["timeline"].max_live() == simulated
    check_trace(results[0]["timeline"], tmp_path / "step.json")
    if schedule in ("1f1b", "zbv"):  # recomputation is a forward more, and keeps blocks' inputs
        for result, plain in zip(
            run_ranks(num_ranks, run_step, schedule, True), results, strict=True
        ):
            assert set(result["saved"]["num_forwards"].values()) == {2 * M}
            most = [max(found["saved"]["max_bytes"].values()) for found in (result, plain)]
            assert most[0] < 0.6 * most[1]


def check_bytes(results: list[dict[str, Any]], plan: Any) -> None:
    """2 m b s h elements for each boundary between ranks, the loss, and what ranks agree on."""
    num_ranks, is_v = len(results), plan.schedule == "zbv"
    for rank, result in enumerate(results):
        expected = {
            "send": result["num_sides"] * M * ACTIVATION_BYTES,
            "all_gather": 8 * (num_ranks - 1),  # a digest of shapes
        }
        if rank == plan.rank_of(plan.num_stages - 1):
            expected["broadcast"] = 4 * (num_ranks - 1)
        assert result["sent"] == expected
    num_boundaries = plan.num_stages - 1 - is_v  # the V's bottom is on one rank
    total = sum(result["sent"]["send"] for result in results)
    assert total == num_boundaries * 2 * M * ACTIVATION_BYTES


def check_timeline(timeline: pipeline.Timeline, plan: Any) -> None:
    """Each rank does what the plan says, in its order, and nothing before what it needs."""
    for rank, planned in enumerate(orders_of(plan)):
        order = timeline.of_rank(rank)
        assert [action[1:4] for action in order] == [tuple(work) for work in planned]
        for action, following in itertools.pairwise(order):
            assert action.begin_us <= action.end_us <= following.begin_us
    ends: dict[Any, Any] = {a[1:4]: a.end_us for a in timeline.actions}
    for _, kind, stage, micro_batch, begin_us, _ in timeline.actions:
        # Stage 0 has its gradients when the next one has done the half for inputs.
        needed = {"F": [("F", stage - 1)], "W": [("I", stage)]}.get(
            kind, [("F", stage), (kind, stage + 1)]
        )
        for needed_kind, other in needed:
            if 0 <= other < plan.num_stages:
                assert ends[needed_kind, other, micro_batch] <= begin_us
    assert 0 < timeline.bubble() < 1


def check_trace(timeline: pipeline.Timeline, path: Path) -> None:
    timeline.export_chrome_trace(path)
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    assert {event["tid"] for event in events} == set(range(timeline.num_ranks))
    busy_us = sum(float(timeline.busy_us(rank)) for rank in range(timeline.num_ranks))
    assert sum(event["dur"] for event in events) == pytest.approx(busy_us)
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(timeline.span_us)


def live_storages() -> dict[int, int]:
    tensors = [x for x in gc.get_objects() if issubclass(type(x), Tensor)]
    found = [t.untyped_storage() for t in tensors if t.device.type == "cpu"]
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@in_ranks(2)
def test_messages_leave_no_memory_behind(rank: int, schedule: str) -> None:
    """Tensors that are alive behind a step are weights and gradients. torch's own stage keeps room
    for all micro-batches' messages, both ways."""
    gc.collect()
    before = live_storages()
    pipe = pipeline.Pipeline(make_deep(), mse, schedule, M)
    x, y = batch(0)
    pipe.step(x, y)
    del x, y
    gc.collect()
    own = [t.untyped_storage() for p in pipe.parameters() for t in (p, p.grad) if t is not None]
    new = {ptr: size for ptr, size in live_storages().items() if ptr not in before}
    assert sum(new.values()) == sum({s.data_ptr(): s.nbytes() for s in own}.values())
