"""zero.shard(offload_weights=True): weights, gradients and states in host memory or in files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from full_states import full_state, full_weights
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from ringcomm.parallel import offload, zero

WIDTH, NUM_BLOCKS = 129, 3  # 66,564 bytes a weight: large ones are above 64 KiB
STEPS = 4
ROWS = 12
# A bit in a gradient that is nearly 0 moves AdamW's weight by a part of lr.
ATOL = {"adamw": 2e-3, "momentum": 1e-6}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, *, checkpoints: bool = False) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if checkpoints:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        out: Tensor = self.last(x)
        return out


def make_model(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def batch(step: int, rank: int = 0, world_size: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(ROWS, size, generator=generator) for size in (5, 3))
    return x.chunk(world_size)[rank], y.chunk(world_size)[rank]


def make_optimizer(model: nn.Module, kind: str, place: dict[str, Any] | None = None) -> Any:
    if place is None:
        if kind == "adamw":
            return torch.optim.AdamW(model.parameters(), 1e-2)
        return torch.optim.SGD(model.parameters(), 1e-2, 0.9 if kind == "momentum" else 0.0)
    options = {"chunk_elems": 10_000, **place}
    if kind == "adamw":
        return offload.AdamW(model.parameters(), 1e-2, **options)
    return offload.SGD(model.parameters(), 1e-2, 0.9 if kind == "momentum" else 0.0, **options)


def infinity(model: nn.Module, optimizer: Any, **options: Any) -> zero.ZeroInfinity:
    found = zero.shard(model, optimizer, 3, offload_weights=True, **options)
    assert isinstance(found, zero.ZeroInfinity)
    return found


def loss_of(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Tensor:
    dtype = next(model.parameters()).dtype
    return nn.functional.mse_loss(model(x.to(dtype), **options).float(), y)


def train(
    model: nn.Module,
    optimizer: Any,
    steps: range,
    rank: int = 0,
    world_size: int = 1,
    num_micro_batches: int = 1,
    **options: Any,
) -> list[float]:
    losses = []
    for step in steps:
        for part in range(num_micro_batches):
            rows = batch(step * num_micro_batches + part, rank, world_size)
            loss = loss_of(model, *rows, **options)
            (optimizer.scale(loss) if hasattr(optimizer, "scale") else loss).backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_alone(kind: str, clip: float | None, num_micro_batches: int) -> dict[str, Tensor]:
    model = make_model()
    optimizer = make_optimizer(model, kind)
    for step in range(STEPS):
        for part in range(num_micro_batches):
            loss_of(model, *batch(step * num_micro_batches + part)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def train_ranks(
    rank: int, world_size: int, kind: str, place: dict[str, Any], options: dict[str, Any]
) -> dict[str, Tensor]:
    options = dict(options)
    how = {key: options.pop(key) for key in ("num_micro_batches", "checkpoints") if key in options}
    model = make_model()
    optimizer = infinity(model, make_optimizer(model, kind, place), **options)
    train(model, optimizer, range(STEPS), rank, world_size, **how)
    found = full_weights(optimizer)
    optimizer.close()
    for name, param in model.named_parameters():
        assert torch.equal(param.detach(), found[name])
    return found


def place_of(to: str, folder: Path) -> dict[str, Any]:
    return {"to": to, **({"path": folder} if to == "nvme" else {})}


@pytest.mark.parametrize(
    ("world_size", "kind", "to", "options"),
    [
        (1, "adamw", "nvme", {"clip_grad_norm": 0.1, "num_micro_batches": 2}),
        (2, "momentum", "cpu", {"num_micro_batches": 2}),
        (3, "adamw", "cpu", {"clip_grad_norm": 0.1, "loss_scale": 1024.0}),
        (3, "momentum", "nvme", {"checkpoints": True}),
        (3, "momentum", "nvme", {"clip_grad_norm": 0.1}),
    ],
)
def test_steps_are_those_of_one_process(
    world_size: int, kind: str, to: str, options: dict[str, Any], tmp_path: Path
) -> None:
    results = run_ranks(world_size, train_ranks, world_size, kind, place_of(to, tmp_path), options)
    expected = train_alone(kind, options.get("clip_grad_norm"), options.get("num_micro_batches", 1))
    for found in results:
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=ATOL[kind])
            assert torch.equal(found[name], results[0][name])


# ---- the meta device, overflow


def begin_on_meta(rank: int) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = Net()
    torch.manual_seed(rank)  # rank 0's values count
    optimizer = infinity(model, make_optimizer(model, "sgd", {"to": "cpu"}))
    assert all(param.device.type == "cpu" for param in model.parameters())
    train(model, optimizer, range(1), rank, 2)
    return full_weights(optimizer)


def test_a_model_on_the_meta_device_gets_its_values_by_units() -> None:
    first, second = run_ranks(2, begin_on_meta)
    for name, value in first.items():
        assert torch.equal(value, second[name])
        assert value.isfinite().all()
        assert name.endswith("bias") or "norm" in name or value.std() > 0.01


def overflow(rank: int, folder: Path) -> None:
    model = make_model()
    own = make_optimizer(model, "adamw", {"to": "nvme", "path": folder})
    optimizer = infinity(model, own, loss_scale="dynamic")
    train(model, optimizer, range(2), rank, 2)
    before, states = full_weights(optimizer), full_state(optimizer)
    scale = optimizer.loss_scale
    x, y = batch(2, rank, 2)
    optimizer.scale(loss_of(model, x, y * (float("inf") if rank == 1 else 1))).backward()
    optimizer.step()
    assert (optimizer.loss_scale, optimizer.num_steps) == (scale / 2, 2)
    for name, value in full_weights(optimizer).items():
        assert torch.equal(value, before[name])
    assert str(full_state(optimizer)["state"]) == str(states["state"])
    train(model, optimizer, range(3, 4), rank, 2)
    assert optimizer.num_steps == 3


def test_an_overflow_on_one_rank_changes_nothing_on_any(tmp_path: Path) -> None:
    run_ranks(2, overflow, tmp_path)


def count_bytes(rank: int, world_size: int, folder: Path) -> None:
    model = make_model()
    place = {"to": "nvme", "path": folder, "chunk_elems": 1 << 20}
    optimizer = infinity(model, make_optimizer(model, "adamw", place))
    train(model, optimizer, range(2), rank, world_size)
    before, units = optimizer.io_bytes, optimizer._weights.units
    train(model, optimizer, range(2, 3), rank, world_size)
    read, written = (now - then for now, then in zip(optimizer.io_bytes, before, strict=True))
    # Between steps the small weights are all there is.
    memory = zero.predict_memory(
        make_model(),
        make_optimizer(make_model(), "adamw", {"to": "cpu"}),
        3,
        world_size=world_size,
        rank=rank,
        offload_weights=True,
    )
    assert memory.parameters == sum(unit.packed_row.numel() for unit in units)
    assert memory.states == 0 == sum(t.nbytes for t in optimizer.state_tensors())
    assert sum(p.untyped_storage().nbytes() for p in model.parameters()) == 0
    loss_of(model, *batch(7, rank, world_size)).backward()
    assert sum(t.nbytes for t in optimizer.gradient_tensors()) == memory.gradients
    optimizer.zero_grad()

    def blocks(num_bytes: int) -> int:
        return -(-num_bytes // 4096) * 4096

    expected_read = expected_written = packed = 0
    for param in model.parameters():
        begin, end = optimizer.range_of(param)
        elems = end - begin
        if param.nbytes >= 64 << 10:
            # Weights for forward, backward and step, gradients; weights and gradients back.
            expected_read += 4 * blocks(4 * elems)
            expected_written += 2 * blocks(4 * elems)
        expected_read += blocks(8 * elems)
        expected_written += blocks(8 * elems)
    packed = sum(blocks(row) for row in (unit.packed_row.numel() for unit in units))
    assert (read, written) == (expected_read, expected_written + packed)


@pytest.mark.parametrize("world_size", [1, 3])
def test_bytes_of_a_step(world_size: int, tmp_path: Path) -> None:
    run_ranks(world_size, count_bytes, world_size, tmp_path)


# ---- what is refused


def refuse(rank: int, folder: Path) -> None:
    def check(words: str, kind: Any = None, stage: int = 3, **options: Any) -> None:
        model = make_model()
        optimizer = kind(model) if kind else offload.SGD(model.parameters())
        with pytest.raises(ValueError, match=words):
            zero.shard(model, optimizer, stage, **{"offload_weights": True, **options})

    check("is for stage 3", stage=2)
    check("wants an optimizer of ringcomm", lambda model: torch.optim.SGD(model.parameters()))
    check("cast the model itself", param_dtype=torch.bfloat16)
    check("resume is for offload_weights", offload_weights=False, resume=True)
    check("nothing to resume", resume=True)
    model = make_model()
    optimizer = infinity(model, offload.SGD(model.parameters()))
    with pytest.raises(RuntimeError, match=r"no_sync\(\) is not to be had"), optimizer.no_sync():
        pass
    loss_of(model, *batch(0)).backward()
    with pytest.raises(RuntimeError, match=r"Use optimizer.clip_grad_norm_\(\)"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert optimizer.clip_grad_norm_(math.inf) > 0
    with pytest.raises(RuntimeError, match=r"cannot find them: use ringcomm\.parallel\.get"):
        get_optimizer_state_dict(model, optimizer)
    optimizer.close()
    model = make_model()
    optimizer = infinity(model, offload.SGD(model.parameters(), to="nvme", path=folder))
    train(model, optimizer, range(1), rank, 2)
    optimizer.close()

    def in_folder(model: nn.Module) -> Any:
        return offload.SGD(model.parameters(), to="nvme", path=folder)

    check("resume=True goes on", in_folder)
    other = nn.Sequential(nn.Linear(7, 7))
    with pytest.raises(ValueError, match="of another model"):
        zero.shard(other, in_folder(other), 3, offload_weights=True, resume=True)


def test_errors(tmp_path: Path) -> None:
    run_ranks(2, refuse, tmp_path)


# ---- odd models


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 140)
        self.blocks = nn.ModuleList(nn.Linear(140, 140) for _ in range(3))
        self.blocks[2].weight = self.blocks[0].weight  # tied, over units
        self.blocks[1].requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))  # smaller than the world
        self.none = nn.Parameter(torch.ones(0))
        self.last = nn.Linear(140, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        out: Tensor = self.last(x) * self.scale + self.none.sum()
        return out


def odd_groups(model: Odd) -> list[dict[str, Any]]:
    rest = [p for p in model.parameters() if p.requires_grad and p is not model.scale]
    return [{"params": rest}, {"params": [model.scale], "lr": 0.01}, {"params": []}]


def train_odd(rank: int, world_size: int, folder: Path) -> dict[str, Tensor]:
    model = Odd()
    own = offload.SGD(odd_groups(model), 0.05, 0.9, to="nvme", path=folder)
    optimizer = infinity(model, own)
    train(model, optimizer, range(STEPS), rank, world_size)
    with pytest.raises(ValueError, match=r"before zero\.shard"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    found = full_weights(optimizer)
    model.added = nn.Linear(2, 2)
    loss_of(model, *batch(9, rank, world_size)).backward()
    with pytest.raises(ValueError, match=r"added.weight was added"):
        optimizer.step()
    return found


@pytest.mark.parametrize("world_size", [1, 4])
def test_odd_models(world_size: int, tmp_path: Path) -> None:
    alone = Odd()
    optimizer = torch.optim.SGD(odd_groups(alone), 0.05, 0.9)
    train(alone, optimizer, range(STEPS))
    for found in run_ranks(world_size, train_odd, world_size, tmp_path):
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


# ---- ranks that use different weights


class Towers(nn.Module):
    """Two layers of one size, of which a batch runs some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(6, 6)
        self.scales = nn.ParameterList(torch.ones(6) for _ in range(2))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        x = self.stem(x) if used else x
        for i in used:
            x = x * self.scales[i]
        return x.square().mean()


def use_other_weights(rank: int, used: list[list[list[int]]]) -> None:
    """By rank, by micro-batch: what is used; then a step that is right."""
    model = Towers()
    sharded = infinity(model, offload.SGD(model.parameters(), 0.1), units=[])
    before = full_weights(sharded)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank)).requires_grad_()

    def step() -> None:
        for part in used[rank]:
            model(x, part).backward()
        sharded.step()

    with pytest.raises(RuntimeError, match=r"(scales|stem)\.\w+ gets a gradient on some ranks"):
        step()
    sharded.zero_grad()
    after = full_weights(sharded)
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    model(x, [0, 1]).backward()
    sharded.step()
    after = full_weights(sharded)
    assert not any(torch.equal(value, before[name]) for name, value in after.items())


@pytest.mark.parametrize(
    "used",
    [
        [[[0, 1]], [[]]],  # no weight at all on rank 1
        [[[0, 1], [0]], [[0, 1], [1]]],  # of one size: they would be averaged with each other
    ],
    ids=["none", "second micro-batch"],
)
def test_ranks_that_use_other_weights_are_refused(used: list[list[list[int]]]) -> None:
    run_ranks(2, use_other_weights, used)
