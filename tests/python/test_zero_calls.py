"""zero.shard(): bytes, memory, state dicts, overflow, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from zero_models import (
    BUCKET_BYTES,
    STEPS,
    Net,
    batch,
    loss_of,
    make_optimizer,
    train_alone,
    weights,
)

import ringcomm
from ringcomm.parallel import zero

STAGES = [1, 2, 3]


def make(
    stage: int, kind: str = "momentum", model: nn.Module | None = None, **options: Any
) -> tuple[nn.Module, zero.ZeroOptimizer]:
    model = model or Net()
    options = {"bucket_bytes": BUCKET_BYTES, **options}
    return model, zero.shard(model, make_optimizer(model, kind), stage, **options)


def train(
    model: nn.Module, optimizer: Any, rank: int, world_size: int, steps: range = range(STEPS)
) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, *batch(step, rank, world_size))
        optimizer.scale(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def sent_bytes() -> dict[str, int]:
    found: dict[str, int] = {}
    for (name, _), entry in ringcomm.stats().items():
        found[name] = found.get(name, 0) + entry["sent_bytes"]
    return found


def local_of(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def live_bytes(tensors: Any) -> int:
    found = {}
    for tensor in tensors:
        storage = local_of(tensor).untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


# ---- bits


def train_halves() -> dict[str, Tensor]:
    """One process that averages the gradients of two halves, as two ranks do."""
    model = Net()
    optimizer = make_optimizer(model, "momentum")
    for step in range(STEPS):
        halves = []
        for rank in range(2):
            optimizer.zero_grad()
            loss_of(model, *batch(step, rank, 2)).backward()
            halves.append([param.grad for param in model.parameters()])
        for param, first, second in zip(model.parameters(), *halves, strict=True):
            param.grad = (first + second) / 2
        optimizer.step()
    return weights(model)


def train_bits(rank: int, stage: int) -> dict[str, Tensor]:
    model, optimizer = make(stage)
    train(model, optimizer, rank, 2)
    return weights(model)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("backend", ["ringcomm", "gloo"])
def test_two_ranks_have_the_bits_of_one(stage: int, backend: str) -> None:
    expected = train_halves()
    for found in run_ranks(2, train_bits, stage, backend=backend):
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_missing_mean_would_be_seen() -> None:
    """The control: SGD by the sum is another run."""
    model = Net()
    optimizer = make_optimizer(model, "momentum")
    for step in range(STEPS):
        (2 * loss_of(model, *batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = train_alone("momentum")
    assert not torch.allclose(weights(model)["last.weight"], expected["last.weight"], atol=1e-3)


# ---- bytes


def count_bytes(rank: int, world_size: int, stage: int, options: dict[str, Any]) -> None:
    model = Net(is_frozen=True)
    optimizer = make_optimizer(model, "adamw")
    options = {"bucket_bytes": BUCKET_BYTES, **options}
    expected = zero.predict_traffic(
        model, optimizer, stage, world_size=world_size, rank=rank, **options
    )
    sharded = zero.shard(model, optimizer, stage, **options)
    for step in range(2):
        before = sent_bytes()
        train(model, sharded, rank, world_size, range(step, step + 1))
        found = {name: sent - before.get(name, 0) for name, sent in sent_bytes().items()}
        # Facts of the step, if any: a SUM of three float64, a MAX of one float32.
        facts = found.pop("all_reduce", 0)
        looks = "clip_grad_norm" in options
        if step > 0:
            assert facts == ((world_size - 1) * (24 + 4) if looks else 0)
        assert sum(found.values()) == expected
    num_elems = sum(param.numel() for param in model.parameters() if param.requires_grad)
    assert optimizer is not sharded
    assert num_elems > 0


@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 1.0}, {"param_dtype": torch.bfloat16}])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_bytes_are_the_formulas(world_size: int, stage: int, options: dict[str, Any]) -> None:
    run_ranks(world_size, count_bytes, world_size, stage, options)


def test_formulas_by_hand() -> None:
    """2, 2 and 3 parts of (N - 1) / N where N divides, over all ranks where it does not."""
    model: Any = nn.Sequential(nn.Linear(16, 8, bias=False), nn.Linear(8, 16, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    for stage, parts in ((1, 2), (2, 2), (3, 3)):
        assert (
            zero.predict_traffic(model, optimizer, stage, world_size=4) == parts * 3 * 4 * 256 // 4
        )
    odd = Net()
    optimizer = make_optimizer(odd, "adamw")  # type: ignore[assignment]
    num_elems = sum(param.numel() for param in odd.parameters())
    by_rank = [zero.predict_traffic(odd, optimizer, 2, world_size=3, rank=r) for r in range(3)]
    assert sum(by_rank) == 2 * 2 * 4 * num_elems


# ---- memory


def measure_memory(rank: int, world_size: int, stage: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[nn.Linear(96, 96) for _ in range(6)])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    num_elems = sum(param.numel() for param in model.parameters())
    expected = zero.predict_memory(
        model, optimizer, stage, world_size=world_size, rank=rank, **options
    )
    sharded = zero.shard(model, optimizer, stage, **options)
    x = torch.randn(4, 96)
    dtype = options.get("param_dtype") or torch.float32
    peak = [0]

    def look(_: Tensor) -> None:
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        kept = [] if stage == 3 else sharded.gradient_tensors()
        peak[0] = max(peak[0], live_bytes([*grads, *kept]))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(look)
    for _ in range(2):
        model(x).float().square().mean().backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        at_end = grads if stage == 3 else sharded.gradient_tensors()
        gradients = live_bytes(at_end)
        sharded.step()
        sharded.zero_grad()
    parameters = live_bytes(model.parameters())
    states = live_bytes(sharded.state_tensors())
    assert parameters == pytest.approx(expected.parameters, rel=0.05)
    assert gradients == pytest.approx(expected.gradients, rel=0.05)
    assert states == pytest.approx(expected.states, rel=0.05)
    assert peak[0] <= (expected.gradients + expected.buffers) * 1.05
    # The paper's: 16-bit weights and gradients, twelve bytes of state.
    if dtype != torch.float32:
        formula = {
            1: 4 + 12 / world_size,
            2: 2 + 14 / world_size,
            3: 16 / world_size,
        }[stage]
        assert parameters + gradients + states == pytest.approx(formula * num_elems, rel=0.05)


@pytest.mark.parametrize("options", [{}, {"param_dtype": torch.bfloat16}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_memory_is_what_was_predicted(world_size: int, stage: int, options: dict[str, Any]) -> None:
    run_ranks(world_size, measure_memory, world_size, stage, {"bucket_bytes": 40_000, **options})


def watch_buffers(rank: int, num_layers: int) -> int:
    """The most that stage 2 keeps of whole gradients in a backward pass."""
    model: Any = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(num_layers)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sharded = zero.shard(model, optimizer, 2, bucket_bytes=2 * 64 * 64 * 4)
    peak = 0

    def look(_: Tensor) -> None:
        nonlocal peak
        shards = sum(b.shard_grad.nbytes for b in sharded._buckets if b.shard_grad is not None)  # type: ignore[attr-defined]
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        peak = max(peak, live_bytes([*grads, *sharded.gradient_tensors()]) - shards)

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(look)
    model(torch.randn(4, 64)).sum().backward()
    return peak


def test_whole_gradients_are_of_one_bucket_whatever_the_model() -> None:
    for num_layers in (4, 16):
        assert run_ranks(2, watch_buffers, num_layers) == [2 * 64 * 64 * 4] * 2


# ---- overflow, clipping, statistics


def check_overflow(rank: int, stage: int, where: str) -> None:
    model, optimizer = make(stage, "adamw", loss_scale="dynamic")
    train(model, optimizer, rank, 2, range(2))
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())
    scale = optimizer.loss_scale
    loss = loss_of(model, *batch(2, rank, 2))
    if rank == 1:
        param = dict(model.named_parameters())[where]
        handle = param.register_hook(lambda grad: grad * float("inf"))
    optimizer.scale(loss).backward()
    if rank == 1:
        handle.remove()
    optimizer.step()
    optimizer.zero_grad()
    found = optimizer.last_statistics
    assert found is not None
    assert found.num_not_finite > 0
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    after = optimizer.state_dict()
    assert optimizer.loss_scale == scale / 2
    assert str(after["shards"]) == str(state["shards"])
    train(model, optimizer, rank, 2, range(3, 4))
    assert not torch.equal(weights(model)[where], before[where])


@pytest.mark.parametrize("where", ["first.weight", "last.bias"])
@pytest.mark.parametrize("stage", [1, 2])
def test_an_overflow_on_one_rank_changes_nothing_on_any(stage: int, where: str) -> None:
    run_ranks(2, check_overflow, stage, where)


def check_statistics(rank: int, world_size: int, stage: int) -> None:
    model, optimizer = make(stage)
    alone = Net()
    loss_of(alone, *batch(0)).backward()
    grads = torch.cat([param.grad.flatten() for param in alone.parameters()])  # type: ignore[union-attr]
    loss_of(model, *batch(0, rank, world_size)).backward()
    before = sent_bytes().get("all_reduce", 0), len(grads)
    calls = {key: entry["num_calls"] for key, entry in ringcomm.stats().items()}
    found = optimizer.statistics()
    num_all_reduces = sum(
        entry["num_calls"] - calls.get(key, 0)
        for key, entry in ringcomm.stats().items()
        if key[0] == "all_reduce"
    )
    assert num_all_reduces == 2
    assert before[1] == len(grads)
    assert found.grad_norm == pytest.approx(float(grads.double().norm()), rel=1e-5)
    assert found.grad_max == pytest.approx(float(grads.abs().max()), rel=1e-5)
    assert found.num_not_finite == 0
    assert optimizer.statistics() == found  # looked at again, nothing is reduced twice
    optimizer.step()
    make_optimizer(alone, "momentum").step()
    for name, value in weights(model).items():
        torch.testing.assert_close(
            value, dict(alone.named_parameters())[name].detach(), rtol=0, atol=1e-6
        )


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_statistics(world_size: int, stage: int) -> None:
    run_ranks(world_size, check_statistics, world_size, stage)


# ---- state dicts


def save_and_resume(rank: int, stage: int, kind: str, options: dict[str, Any]) -> None:
    model, optimizer = make(stage, kind, **options)
    train(model, optimizer, rank, 2, range(2))
    with torch.no_grad():
        kept = {
            n: p.to_local().clone() if isinstance(p, DTensor) else p.clone()
            for n, p in model.named_parameters()
        }
    state = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, rank, 2, range(2, 4))
    expected = weights(model)
    again, resumed = make(stage, kind, **options)
    with torch.no_grad():
        for name, param in again.named_parameters():
            local_of(param).copy_(kept[name])
    resumed.load_state_dict(state)
    train(again, resumed, rank, 2, range(2, 4))
    assert all(torch.equal(value, expected[name]) for name, value in weights(again).items())
    assert resumed.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


@pytest.mark.parametrize("options", [{}, {"loss_scale": "dynamic"}], ids=str)
@pytest.mark.parametrize("kind", ["momentum", "adamw"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_has_the_same_bits(stage: int, kind: str, options: dict[str, Any]) -> None:
    run_ranks(2, save_and_resume, stage, kind, options)


def save_full(rank: int, world_size: int, stage: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    model, optimizer = make(stage)
    train(model, optimizer, rank, world_size, range(2))
    return weights(model), zero.full_state_dict(optimizer)


def load_full(
    rank: int, world_size: int, stage: int, values: dict[str, Tensor], state: dict[str, Any]
) -> dict[str, Tensor]:
    model = Net()
    model.load_state_dict(values)
    _, optimizer = make(stage, model=model)
    zero.load_full_state_dict(optimizer, state)
    train(model, optimizer, rank, world_size, range(2, STEPS))
    return weights(model)


@pytest.mark.parametrize("stages", [(1, 2), (2, 3), (3, 1)], ids=str)
def test_runs_go_on_with_other_ranks_and_stages(stages: tuple[int, int]) -> None:
    (values, state), other = run_ranks(2, save_full, 2, stages[0])
    assert str(state) == str(other[1])
    expected = train_alone("momentum")
    for world_size in (3, 1):
        for found in run_ranks(world_size, load_full, world_size, stages[1], values, state):
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
    # Into torch's own optimizer, and from it.
    model = Net()
    model.load_state_dict(values)
    optimizer = make_optimizer(model, "momentum")
    optimizer.load_state_dict(state)
    for step in range(2, 3):
        loss_of(model, *batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    results = run_ranks(2, go_on_from_torch, stages[1], weights(model), optimizer.state_dict())
    for name, value in expected.items():
        torch.testing.assert_close(results[0][name], value, rtol=0, atol=1e-6)


def go_on_from_torch(
    rank: int, stage: int, values: dict[str, Tensor], state: dict[str, Any]
) -> dict[str, Tensor]:
    """An optimizer that has state already."""
    model = Net()
    model.load_state_dict(values)
    optimizer = make_optimizer(model, "momentum")
    optimizer.load_state_dict(state)
    sharded = zero.shard(model, optimizer, stage, bucket_bytes=BUCKET_BYTES)
    train(model, sharded, rank, 2, range(3, STEPS))
    return weights(model)


# ---- 16 bits


def train_16_bits(rank: int, stage: int, dtype: torch.dtype) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 5))
    scale = 1024.0 if dtype == torch.float16 else None
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, fused=True)
    sharded = zero.shard(model, optimizer, stage, param_dtype=dtype, loss_scale=scale)
    losses = []
    for step in range(30):
        generator = torch.Generator().manual_seed(step % 5)
        x = torch.randn(8, 16, generator=generator).chunk(2)[rank]
        y = x[:, :5].sin()
        loss = (model(x).float() - y).square().mean()
        sharded.scale(loss).backward()
        sharded.step()
        sharded.zero_grad()
        losses.append(float(loss.detach()))
    state = zero.full_state_dict(sharded)["state"]
    if stage < 3:
        params = [param for group in sharded.param_groups for param in group["params"]]
        for number, param in enumerate(params):
            assert param.dtype == dtype
            assert torch.equal(state[number]["master"].to(dtype), param.detach())
    return losses, {name: value.dtype for name, value in weights(model).items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stage", STAGES)
def test_16_bit_weights_with_masters_learn(stage: int, dtype: torch.dtype) -> None:
    for losses, _ in run_ranks(2, train_16_bits, stage, dtype):
        assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


# ---- explain


def check_explanation(rank: int, stage: int) -> None:
    """The elements that live ranks hold after a phase are those of the table."""
    model: Any = nn.Linear(5, 2, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    sharded = zero.shard(model, optimizer, stage)
    held = {row.phase: row for row in zero.explain(10, 3, stage).holdings if row.rank == rank}

    def check(phase: str) -> None:
        row = held[phase]
        grads = live_bytes(sharded.gradient_tensors()) // 4
        assert grads == (0 if row.gradients is None else row.gradients[1] - row.gradients[0])
        assert live_bytes(model.parameters()) // 4 == row.weights[1] - row.weights[0]  # type: ignore[index]

    check("start")
    model(torch.randn(3, 5)).sum().backward()
    check("backward" if stage == 1 else "reduce-scatter")
    sharded.step()
    sharded.zero_grad()
    states = [t for t in sharded.state_tensors() if t.dim()]
    states_elems = held["all-gather"].states[1] - held["all-gather"].states[0]  # type: ignore[index]
    assert live_bytes(states) == 8 * states_elems


@pytest.mark.parametrize("stage", [1, 2])
def test_explanations_are_what_ranks_hold(stage: int) -> None:
    run_ranks(3, check_explanation, stage)


def test_explanations_print() -> None:
    text = str(zero.explain(10, 3, 2))
    assert "reduce-scatter  0     0-9         0-3        0-3" in text
    assert "7-9" in str(zero.explain(10, 3, 3))
    assert "-" in str(zero.explain(1, 3, 1))
    with pytest.raises(ValueError, match="stage is 1, 2 or 3"):
        zero.explain(10, 3, 4)


# ---- what is refused


def check_errors(rank: int) -> None:
    model = Net()
    sgd = make_optimizer(model, "sgd")
    adam = torch.optim.Adam(model.parameters())
    frozen = Net()
    half = nn.Linear(3, 3).to(torch.bfloat16)
    cases: list[tuple[Any, Any, dict[str, Any], type[Exception], str]] = [
        (model, adam, {"stage": 1}, TypeError, "AdamW or SGD to shard, got Adam"),
        (model, sgd, {"stage": 4}, ValueError, "stage is 1, 2 or 3, got 4"),
        (sgd, model, {"stage": 1}, TypeError, "wants a model and its optimizer"),
        (DistributedDataParallel(Net()), sgd, {"stage": 1}, ValueError, "give model.module"),
        (Net(), sgd, {"stage": 1}, ValueError, "is not the model's"),
        (model, torch.optim.SGD([model.scale]), {"stage": 1}, ValueError, "in no group"),
        (model, sgd, {"stage": 1, "bucket_bytes": 0}, ValueError, "bucket_bytes is positive"),
        (model, sgd, {"stage": 1, "param_dtype": torch.int8}, ValueError, "param_dtype is None"),
        (model, sgd, {"stage": 1, "loss_scale": -1.0}, ValueError, "loss_scale is None"),
        (model, sgd, {"stage": 1, "clip_grad_norm": 0}, ValueError, "clip_grad_norm is a positive"),
        (model, sgd, {"stage": 2, "units": []}, ValueError, "at stage 3 alone"),
        (half, torch.optim.SGD(half.parameters()), {"stage": 3}, ValueError, "are float32"),
        (half, torch.optim.SGD(half.parameters()), {"stage": 1, "param_dtype": torch.bfloat16},
         ValueError, "bfloat16 already"),
    ]  # fmt: skip
    for of_model, optimizer, options, kind, text in cases:
        with pytest.raises(kind, match=text):
            zero.shard(of_model, optimizer, **options)
    before = weights(model)
    assert all(torch.equal(value, before[name]) for name, value in weights(Net()).items())
    optimizer_of_all = torch.optim.SGD(frozen.parameters())
    frozen.blocks[0].requires_grad_(False)
    with pytest.raises(ValueError, match="does not require grad"):
        zero.shard(frozen, optimizer_of_all, 1)
    with pytest.raises(ValueError, match="ranks disagree on the stage: rank 0 has 1, rank 1 has 2"):
        zero.shard(model, sgd, 1 + rank)
    sharded = zero.shard(model, sgd, 1)
    with pytest.raises(ValueError, match="is sharded already"):
        zero.shard(model, sgd, 1)
    with pytest.raises(ValueError, match="load_full_state_dict"):
        sharded.load_state_dict(make_optimizer(Net(), "sgd").state_dict())
    state = sharded.state_dict()
    with pytest.raises(ValueError, match="is of rank 7 of 9"):
        sharded.load_state_dict({**state, "rank": 7, "world_size": 9})
    sharded.step()  # without gradients: nothing
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    loss_of(model, *batch(0)).backward()
    model.added = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"added.weight was added or replaced"):
        sharded.step()
    del model.added
    model.to(torch.float64)
    with pytest.raises(ValueError, match="has moved since"):
        sharded.step()


def test_errors() -> None:
    run_ranks(2, check_errors)


def train_odd_groups(rank: int) -> None:
    """An empty parameter group, weights without elements, schedulers and closures."""
    model: Any = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    model.nothing = nn.Parameter(torch.empty(0, 4))
    groups = [{"params": []}, {"params": list(model.parameters())}]
    sharded = zero.shard(model, torch.optim.SGD(groups, 0.1), 2)
    schedule = torch.optim.lr_scheduler.StepLR(sharded, 1, 0.5)
    before = weights(model)

    def closure() -> Tensor:
        sharded.zero_grad()
        loss: Tensor = model(torch.ones(2, 4)).sum()
        loss.backward()
        return loss

    loss = sharded.step(closure)
    assert isinstance(loss, Tensor)
    schedule.step()
    assert sharded.param_groups[1]["lr"] == 0.05
    first = before["0.weight"] - weights(model)["0.weight"]
    sharded.step(closure)
    assert first.abs().max() > 0
    assert dist.get_world_size() == 3


def test_odd_groups() -> None:
    run_ranks(3, train_odd_groups)
