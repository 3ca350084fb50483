"""The main job's training systems against one process that holds everything.

SGD wherever weights are compared: Adam does not see a gradient that is N times too large.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from training.corpus import Batches
from training.launch import run_ranks
from training.learn import system_bytes
from training.mesh import MeshSizes
from training.model import PRESETS, Llama, ModelConfig, initial_weights, shard_range
from training.system import TrainState
from training.systems import build_system
from training.updaters import live_bytes
from training.wire import Wire

CPU = torch.device("cpu")
TINY = PRESETS["tiny"]
# Nothing divides by 3 here: 86 + 85 + 85 vocabulary rows, 34 + 33 + 33 feed-forward columns, and
# 2 + 1 + 1 key/value heads.
UNEVEN = ModelConfig(dim=48, num_layers=2, num_heads=8, num_kv_heads=4, ffn_dim=100)
CONTEXT = 24
STEPS = 4
TIMEOUT_S = 40
BACKENDS = ["gloo"] + (["ringcomm"] if "ringcomm" in dist.Backend.backend_list else [])


def on_ranks(world_size: int, backend: str, folder: Path, work: Callable[[Wire], Any]) -> list[Any]:
    """What ``work`` returns on each rank; a rank that takes too long is ended by its alarm."""

    def main(rank: int) -> int:
        signal.alarm(TIMEOUT_S)
        torch.set_num_threads(1)
        store = dist.FileStore(str(folder / "store"), world_size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        assert dist.group.WORLD is not None
        torch.save(work(Wire(backend, dist.group.WORLD, CPU)), folder / f"{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()
        return 0

    assert run_ranks(world_size, main) == 0
    return [torch.load(folder / f"{rank}.pt") for rank in range(world_size)]


def train(
    parallel: str, optimizer: str, config: ModelConfig, wire: Wire | None, **options: Any
) -> dict[str, Any]:
    """A few steps on random bytes; the losses and the whole state afterwards."""
    system = build_system(
        parallel, optimizer, config, wire, TrainState.fresh(config, 1), CPU, **options
    )
    system.updater.measured = True
    text = bytes(
        torch.randint(0, 256, (5000,), generator=torch.Generator().manual_seed(5)).tolist()
    )
    batches = Batches(text, CONTEXT, 1, CPU)
    lr = 0.003 if optimizer == "adamw" else 0.5
    before = wire.sent() if wire else None
    if wire:
        wire.reset()
    losses = [system.step(*batches.rows(step, 12), lr) for step in range(STEPS)]
    now = wire.sent() if wire else None
    return {
        "losses": losses,
        "state": vars(system.state()),
        "memory": vars(system.memory()),
        "sent": system_bytes(now.since(before)) if now and before else None,
        "formula": wire.formula_bytes if wire else 0,
    }


def assert_same(ours: dict[str, Any], reference: dict[str, Any], atol: float) -> None:
    for kind in ("losses", "state"):
        torch.testing.assert_close(ours[kind], reference[kind], rtol=0, atol=atol)


def mean_losses(ranks: list[dict[str, Any]]) -> list[float]:
    return [sum(step) / len(step) for step in zip(*(r["losses"] for r in ranks), strict=True)]


@pytest.mark.parametrize(("size", "millions"), [("0.8M", 0.8), ("4.6M", 4.6), ("20M", 20)])
def test_presets_are_as_large_as_they_say(size: str, millions: float) -> None:
    config = PRESETS[size]
    with torch.device("meta"):
        model = Llama(config)
    assert sum(p.numel() for p in model.parameters()) == config.num_params
    assert config.num_params / 1e6 == pytest.approx(millions, rel=0.02)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("total", [0, 1, 7, 8, 256])
def test_shards_cover_everything_once(total: int, world_size: int) -> None:
    parts = [shard_range(total, world_size, rank) for rank in range(world_size)]
    assert [i for part in parts for i in part] == list(range(total))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_model_sees_only_the_past() -> None:
    model = Llama(TINY)
    model.load_state_dict(initial_weights(TINY, 0))
    ids = torch.randint(0, 256, (1, CONTEXT))
    changed = ids.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % 256
    with torch.no_grad():
        a, b = model.logits(ids), model.logits(changed)
    assert a.shape == (1, CONTEXT, 256)
    torch.testing.assert_close(a[:, :10], b[:, :10])
    assert not torch.allclose(a[:, 10:], b[:, 10:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("world_size", "config"), [(2, TINY), (3, UNEVEN)], ids=["even", "uneven"])
def test_tensor_parallel_equals_one_process(
    tmp_path: Path, backend: str, world_size: int, config: ModelConfig
) -> None:
    def work(wire: Wire) -> Any:
        ours = train("tp", "sgd", config, wire)
        return ours, (train("single", "sgd", config, None) if wire.rank == 0 else None)

    ranks = on_ranks(world_size, backend, tmp_path, work)
    for ours, _ in ranks:
        assert_same(ours, ranks[0][1], atol=1e-5)
        assert ours["losses"] == ranks[0][0]["losses"]


EXPERTS = replace(TINY, num_experts=3)
DEEP = replace(TINY, num_layers=4)
MESHES = {
    "tp 2, shared tokens": (2, TINY, MeshSizes(tp=2, shares_tokens=True)),
    "tp 4, copied heads": (4, TINY, MeshSizes(tp=4)),
    "tp 3, uneven": (3, UNEVEN, MeshSizes(tp=3, shares_tokens=True)),
    "pp 2": (2, TINY, MeshSizes(pp=2)),
    "pp 2, gpipe": (2, TINY, MeshSizes(pp=2, schedule="gpipe", num_microbatches=3)),
    "pp 2, interleaved": (2, DEEP, MeshSizes(pp=2, schedule="interleaved")),
    "pp 2, zero-bubble": (2, TINY, MeshSizes(pp=2, schedule="zero-bubble")),
    "pp 2, zbv": (2, DEEP, MeshSizes(pp=2, schedule="zbv")),
    "ep 2": (2, EXPERTS, MeshSizes(ep=2)),
    "ep 3": (3, EXPERTS, MeshSizes(ep=3)),
    "dp 2, tp 2": (4, TINY, MeshSizes(tp=2, zero_stage=1)),
    "dp 2, pp 2, ZeRO-2": (4, TINY, MeshSizes(pp=2, num_microbatches=3, zero_stage=2)),
    "dp 2, pp 2, tp 2, ZeRO-1": (8, TINY, MeshSizes(pp=2, tp=2, num_microbatches=3, zero_stage=1)),
    "replicas 2, ep 2": (4, EXPERTS, MeshSizes(ep=2)),
    "ep 2, tp 2, shared tokens": (4, EXPERTS, MeshSizes(ep=2, tp=2, shares_tokens=True)),
    "pp 2, zero-bubble, tp 2, shared tokens": (
        4,
        TINY,
        MeshSizes(pp=2, tp=2, shares_tokens=True, schedule="zero-bubble"),
    ),
    "dp 2, pp 2, tp 2, shared tokens": (
        8,
        TINY,
        MeshSizes(pp=2, tp=2, shares_tokens=True, num_microbatches=3),
    ),
    "ep 2, pp 2, tp 2": (8, EXPERTS, MeshSizes(ep=2, pp=2, tp=2, num_microbatches=3)),
}


def test_the_norm_of_meshes_is_one_that_clips() -> None:
    clipped, free = (train("single", "sgd", TINY, None, clip_grad_norm=n) for n in (0.1, None))
    assert abs(clipped["losses"][-1] - free["losses"][-1]) > 1e-3


@pytest.mark.parametrize("name", list(MESHES))
def test_meshes_equal_one_process(tmp_path: Path, name: str) -> None:
    world_size, config, mesh = MESHES[name]

    clips = {"clip_grad_norm": 0.1}

    def work(wire: Wire) -> Any:
        ours = train("mesh", "sgd", config, wire, mesh=mesh, **clips)
        return ours, (train("single", "sgd", config, None, **clips) if wire.rank == 0 else None)

    ranks = on_ranks(world_size, BACKENDS[-1], tmp_path, work)
    reference = ranks[0][1]
    assert mean_losses([ours for ours, _ in ranks]) == pytest.approx(reference["losses"], abs=1e-5)
    for ours, _ in ranks:
        torch.testing.assert_close(ours["state"], reference["state"], rtol=0, atol=1e-5)
        torch.testing.assert_close(ours["state"], ranks[0][0]["state"], rtol=0, atol=0)
    if world_size == 2 or mesh.zero_stage:  # where no group has more than two ranks
        for ours, _ in ranks:
            assert ours["sent"] == ours["formula"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("parallel", "world_size"),
    [("ddp", 2), ("ddp", 3), *((f"zero{stage}", n) for stage in (1, 2, 3) for n in (2, 3))],
)
def test_data_parallel_equals_one_process(
    tmp_path: Path, backend: str, parallel: str, world_size: int
) -> None:
    """With SGD, so that a gradient which is not averaged shows; 41,120 does not divide by 3."""

    def work(wire: Wire) -> Any:
        ours = train(parallel, "sgd", TINY, wire)
        return ours, (train("single", "sgd", TINY, None) if wire.rank == 0 else None)

    ranks = on_ranks(world_size, backend, tmp_path, work)
    reference = ranks[0][1]
    assert mean_losses([ours for ours, _ in ranks]) == pytest.approx(reference["losses"], abs=1e-5)
    for ours, _ in ranks:
        torch.testing.assert_close(ours["state"], reference["state"], rtol=0, atol=1e-5)
        torch.testing.assert_close(ours["state"], ranks[0][0]["state"], rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero1_equals_adamw(tmp_path: Path, backend: str) -> None:
    """Also the gathered moments, and half of the state in half of the memory."""

    def work(wire: Wire) -> Any:
        return train("zero1", "adamw", TINY, wire), train("ddp", "adamw", TINY, wire)

    for ours, ddp in on_ranks(2, backend, tmp_path, work):
        assert_same(ours, ddp, atol=1e-6)
        assert set(ours["state"]["moments"]) == {"exp_avg", "exp_avg_sq"}
        params = TINY.num_params * 4
        assert ddp["memory"]["params"] == ddp["memory"]["grads"] == params
        assert ddp["memory"]["states"] == pytest.approx(2 * params, rel=0.01)
        # The moments of half of the weights; the shard itself is a view.
        assert ours["memory"]["states"] == pytest.approx(params, rel=0.01)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lomo_equals_sgd_bitwise(tmp_path: Path, backend: str) -> None:
    """In one process and, since division by 2 is exact, on 2 ranks beside DDP; and its memory."""

    def work(wire: Wire) -> Any:
        pairs = [(train("ddp", o, TINY, wire)) for o in ("lomo", "sgd")]
        return pairs, [train("single", o, TINY, None) for o in ("lomo", "sgd")]

    for pairs in on_ranks(2, backend, tmp_path, work):
        for lomo, sgd in pairs:
            assert lomo["losses"] == sgd["losses"]
            torch.testing.assert_close(lomo["state"], sgd["state"], rtol=0, atol=0)
            largest = max(p.numel() for p in Llama(TINY).parameters())
            assert lomo["memory"]["grads"] == 4 * largest
            assert sgd["memory"]["grads"] == 4 * TINY.num_params
            assert lomo["memory"]["states"] == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocking_ddp_equals_ddp_and_counts(tmp_path: Path, backend: str) -> None:
    def work(wire: Wire) -> Any:
        ours = []
        for overlap in (True, False):
            wire.reset()
            ours.append(train("ddp", "sgd", TINY, wire, overlap=overlap))
            ours[-1]["formula"] = wire.formula_bytes
        return ours

    for overlapped, blocking in on_ranks(2, backend, tmp_path, work):
        assert_same(blocking, overlapped, atol=0)
        # 2(N-1)/N of the gradients, N = 2.
        assert overlapped["formula"] == blocking["formula"] == STEPS * 4 * TINY.num_params


@pytest.mark.parametrize("backend", BACKENDS)
def test_formula_of_each_system(tmp_path: Path, backend: str) -> None:
    """Per step on 2 ranks: P for LOMO, ZeRO-1; 4 L + 2 activations and the loss's sums for TP."""

    def work(wire: Wire) -> dict[str, tuple[float, float | None]]:
        found = {}
        for parallel, optimizer in (("ddp", "lomo"), ("zero1", "sgd"), ("tp", "sgd")):
            system = build_system(parallel, optimizer, TINY, wire, TrainState.fresh(TINY, 1), CPU)
            wire.reset()
            before = wire.sent()
            ids = torch.zeros(4, CONTEXT, dtype=torch.int64)
            system.step(ids, ids, 0.1)
            now = wire.sent()
            counted = float(now.since(before).total) if now and before else None
            found[parallel] = (wire.formula_bytes, counted)
        return found

    tokens = 4 * CONTEXT
    expected = {
        "ddp": 4 * TINY.num_params,
        "zero1": 4 * TINY.num_params + 21 + 1 + 1,  # a byte for each weight and bucket, and one
        "tp": 4 * tokens * (4 * TINY.num_layers + 2) * TINY.dim + 24 * (tokens + 1),
    }
    for found in on_ranks(2, backend, tmp_path, work):
        for name, (formula, counted) in found.items():
            assert formula == expected[name]
            assert counted in (None, formula)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_collective_of_layers_in_parts_is_timed(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two ranks: 4 L + 2 of activations, and the loss's."""

    def work(wire: Wire) -> int:
        state = TrainState.fresh(TINY, 1)
        system = build_system("tp", "sgd", TINY, wire, state, CPU, overlap=False)
        calls: list[float] = []
        monkeypatch.setattr(wire, "_end", lambda start, sent: calls.append(start))
        ids = torch.zeros(4, CONTEXT, dtype=torch.int64)
        system.step(ids, ids, 0.1)
        return len(calls)

    for found in on_ranks(2, backend, tmp_path, work):
        assert found == 4 * TINY.num_layers + 2 + 1


def test_live_bytes_counts_shared_storage_once() -> None:
    whole = torch.zeros(100)
    assert live_bytes([whole, whole[:50], None, torch.zeros(10)]) == 440
