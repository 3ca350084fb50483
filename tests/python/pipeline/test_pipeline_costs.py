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
from curves import DIM, ROWS, batch
from pipeline_models import M, make_deep
from ranks import run_ranks
from torch import Tensor, nn

import ringcomm
from ringcomm.parallel import pipeline

CASES = [("gpipe", 2), ("1f1b", 4), ("interleaved", 4), ("zero-bubble", 2), ("zbv", 4)]
ACTIVATION_BYTES = ROWS // M * DIM * 4

mse = nn.functional.mse_loss


def make(schedule: str, model: nn.Sequential | None = None, **options: Any) -> pipeline.Pipeline:
    return pipeline.Pipeline(model or make_deep(), mse, schedule, M, **options)


# ---- bytes


def sent_in_a_step(rank: int, schedule: str) -> tuple[dict[str, int], int]:
    pipe = make(schedule)
    pipe.step(*batch(0))  # finds out shapes
    before = ringcomm.stats()
    pipe.step(*batch(1))
    sent: Counter[str] = Counter()
    for key, counters in ringcomm.stats().items():
        sent[key[0]] += counters["sent_bytes"] - before.get(key, Counter())["sent_bytes"]
    own = pipe.plan.stages_of(rank)
    away = [
        (stage, other)
        for stage in own
        for other in (stage - 1, stage + 1)
        if 0 <= other < pipe.plan.num_stages and other not in own
    ]
    return {op: num for op, num in sent.items() if num}, len(away)


@pytest.mark.parametrize(("schedule", "num_ranks"), CASES)
def test_bytes_on_the_wire(schedule: str, num_ranks: int) -> None:
    """2 m b s h elements for each boundary between ranks, the loss, and what ranks agree on."""
    results = run_ranks(num_ranks, sent_in_a_step, schedule)
    last = 0 if schedule == "zbv" else num_ranks - 1
    for rank, (sent, num_sides) in enumerate(results):
        assert sent["send"] == num_sides * M * ACTIVATION_BYTES
        assert sent.get("broadcast", 0) == (4 * (num_ranks - 1) if rank == last else 0)
        assert sent["all_gather"] == 8 * (num_ranks - 1)  # a digest of shapes
        assert sent.keys() <= {"send", "broadcast", "all_gather"}
    num_stages = num_ranks * (2 if schedule in ("interleaved", "zbv") else 1)
    num_boundaries = num_stages - 1 - (schedule == "zbv")  # the V's bottom is on one rank
    total = sum(sent["send"] for sent, _ in results)
    assert total == num_boundaries * 2 * M * ACTIVATION_BYTES


# ---- memory


class Packed:
    """What autograd keeps of one tensor."""

    def __init__(self, tensor: Tensor, micro_batch: tuple[str, int]) -> None:
        self.tensor = tensor
        self.micro_batch = micro_batch


class Saved:
    """Counts, at every tensor that is saved, how many micro-batches and bytes are alive."""

    def __init__(self, pipe: pipeline.Pipeline, *batch: Tensor) -> None:
        self.alive: weakref.WeakSet[Packed] = weakref.WeakSet()
        self.max_live: Counter[str] = Counter()
        self.max_bytes: Counter[str] = Counter()
        self.first_bytes: dict[str, int] = {}
        self._given = {t.untyped_storage().data_ptr() for t in (*pipe.parameters(), *batch)}
        self._now = ("", 0)
        self._forwards: Counter[str] = Counter()
        for stage in pipe.plan.stages_of(pipe.group.rank()):
            block = pipe.module.get_submodule(pipe.stages[stage][0])
            block.register_forward_pre_hook(self._begin(str(stage)))

    def _begin(self, stage: str) -> Any:
        def begin(*_: Any) -> None:
            self._now = (stage, self._forwards[stage])
            self._forwards[stage] += 1

        return begin

    def pack(self, tensor: Tensor) -> Packed:
        found = Packed(tensor.detach(), self._now)  # an output would hold its own graph
        stage, idx = self._now
        if tensor.untyped_storage().data_ptr() not in self._given:
            self.alive.add(found)
            own = [p for p in self.alive if p.micro_batch[0] == stage]
            self.max_live[stage] = max(self.max_live[stage], len({p.micro_batch for p in own}))
            sizes = {
                p.tensor.untyped_storage().data_ptr(): p.tensor.untyped_storage().nbytes()
                for p in own
            }
            self.max_bytes[stage] = max(self.max_bytes[stage], sum(sizes.values()))
            if idx == 0 and len({p.micro_batch for p in own}) == 1:
                self.first_bytes[stage] = max(self.first_bytes.get(stage, 0), sum(sizes.values()))
        return found

    @staticmethod
    def unpack(packed: Packed) -> Tensor:
        return packed.tensor


def saved_in_a_step(rank: int, schedule: str) -> dict[int, tuple[int, int, int]]:
    pipe = make(schedule)
    pipe.step(*batch(0))
    x, y = batch(1)
    saved = Saved(pipe, x, y)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
        pipe.step(x, y)
    gc.collect()
    assert not saved.alive
    return {
        int(stage): (num, saved.max_bytes[stage], saved.first_bytes[stage])
        for stage, num in saved.max_live.items()
    }


@pytest.mark.parametrize(("schedule", "num_ranks"), CASES)
def test_activations_alive(schedule: str, num_ranks: int) -> None:
    """min(m, p-i) micro-batches in stage i of 1F1B, m in GPipe; and so many times its bytes."""
    simulated = pipeline.simulate(schedule, num_ranks, M).max_live()
    found: dict[int, tuple[int, int, int]] = {}
    for part in run_ranks(num_ranks, saved_in_a_step, schedule):
        found |= part
    assert {stage: num for stage, (num, _, _) in found.items()} == simulated
    if schedule in ("gpipe", "1f1b", "interleaved"):
        for num, num_bytes, first_bytes in found.values():
            assert num_bytes == num * first_bytes


def left_after_a_step(rank: int, schedule: str) -> tuple[int, int]:
    """Bytes of all tensors that are alive behind a step, and those of weights and gradients."""
    gc.collect()
    before = live_storages()
    pipe = make(schedule)
    x, y = batch(0)
    pipe.step(x, y)
    del x, y
    gc.collect()
    own = [t.untyped_storage() for p in pipe.parameters() for t in (p, p.grad) if t is not None]
    new = {ptr: size for ptr, size in live_storages().items() if ptr not in before}
    return sum(new.values()), sum({s.data_ptr(): s.nbytes() for s in own}.values())


def live_storages() -> dict[int, int]:
    tensors = [x for x in gc.get_objects() if issubclass(type(x), Tensor)]
    found = [t.untyped_storage() for t in tensors if t.device.type == "cpu"]
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_messages_leave_no_memory_behind(schedule: str) -> None:
    """torch's own stage keeps room for all micro-batches' messages, both ways."""
    for all_bytes, own_bytes in run_ranks(2, left_after_a_step, schedule):
        assert all_bytes == own_bytes


# ---- recomputation


def forwards_in_a_step(rank: int, schedule: str, recompute: bool) -> tuple[int, int]:
    pipe = make(schedule, recompute=recompute)
    pipe.step(*batch(0))
    calls: Counter[str] = Counter()
    for name, block in pipe.module.named_children():
        block.register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
    x, y = batch(1)
    saved = Saved(pipe, x, y)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
        pipe.step(x, y)
    assert len(set(calls.values())) == 1
    return max(calls.values()), max(saved.max_bytes.values())


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_recomputation_is_a_forward_more_and_keeps_blocks_inputs(schedule: str) -> None:
    plain = run_ranks(2, forwards_in_a_step, schedule, False)
    again = run_ranks(2, forwards_in_a_step, schedule, True)
    for (num, num_bytes), (num_again, bytes_again) in zip(plain, again, strict=True):
        assert (num, num_again) == (M, 2 * M)
        assert bytes_again < 0.6 * num_bytes


# ---- timelines


def record(rank: int, schedule: str) -> tuple[pipeline.Timeline, Any]:
    pipe = make(schedule)
    pipe.step(*batch(0))
    pipe.step(*batch(1), record=True)
    return pipe.timeline(), pipe.plan


@pytest.mark.parametrize(("schedule", "num_ranks"), CASES)
def test_timeline(schedule: str, num_ranks: int, tmp_path: Path) -> None:
    """Each rank does what the plan says, in its order, and nothing before what it needs."""
    for timeline, plan in run_ranks(num_ranks, record, schedule):
        for rank in range(num_ranks):
            order = timeline.of_rank(rank)
            found = [action[1:4] for action in order]
            assert found == [tuple(work) for work in plan.orders[rank]]
            for action, following in itertools.pairwise(order):
                assert action.begin_us <= action.end_us <= following.begin_us
        ends = {(a.kind, a.stage, a.micro_batch): a.end_us for a in timeline.actions}
        for action in timeline.actions:
            if action.kind == "F":
                needed = [("F", action.stage - 1)]
            elif action.kind == "W":
                needed = [("I", action.stage)]
            else:
                needed = [("F", action.stage), (action.kind, action.stage + 1)]
            for kind, stage in needed:
                if 0 <= stage < plan.num_stages:
                    # Stage 0 has its gradients when the next one has done the half for inputs.
                    assert ends[kind, stage, action.micro_batch] <= action.begin_us
        assert 0 < timeline.bubble() < 1
        assert timeline.max_live() == pipeline.simulate(schedule, num_ranks, M).max_live()
    timeline.export_chrome_trace(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text(encoding="utf-8"))["traceEvents"]
    assert {event["tid"] for event in events} == set(range(num_ranks))
    assert sum(event["dur"] for event in events) == pytest.approx(
        sum(float(timeline.busy_us(rank)) for rank in range(num_ranks))
    )
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(timeline.span_us)
