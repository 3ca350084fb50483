"""zero.shard(offload_weights=True): weights, gradients and states in host memory or in files."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import slow
from full_states import full_state, full_weights, load_parts, save_parts
from gradient_watch import gradients_of, states_of
from ranks import in_ranks, run_ranks
from rows import offloaded
from steps import train_step
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import lr_scheduler
from user_classes import OFFLOADED
from zero_models import (
    Net,
    Towers,
    assert_close,
    batch,
    loss_of,
    make_optimizer,
    same,
    train,
    weights,
)

from ringcomm.parallel import offload, zero

WIDTH = 129  # 66,564 bytes a matrix of a block: large ones are above 64 KiB


def infinity(model: nn.Module, optimizer: Any, **options: Any) -> zero.ZeroInfinity:
    found = zero.shard(model, optimizer, 3, offload_weights=True, **options)
    assert isinstance(found, zero.ZeroInfinity)
    return found


class Nested(Net):
    """Calls itself before its layers run."""

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        if depth:
            x = x + self(torch.tanh(x) * self.scale, depth - 1).mean(1, keepdim=True)
        return super().forward(x)


@in_ranks(2)
def test_a_model_that_calls_itself(rank: int) -> None:
    """An inner call frees no weights of the outer one. After close() the weights are there."""
    model, alone = Nested(width=WIDTH), Nested(width=WIDTH)
    optimizer = infinity(model, make_optimizer(model, "momentum", to="cpu"))
    train(model, optimizer, rank, 2)
    train(alone, make_optimizer(alone, "momentum"))
    found = full_weights(optimizer)
    assert_close(found, weights(alone), 1e-5)
    optimizer.close()
    assert same(weights(model), found)


@in_ranks([1, 3])
def test_bytes_of_a_step(rank: int, tmp_path: Path) -> None:
    model, world_size = Net(width=WIDTH), dist.get_world_size()
    place: dict[str, Any] = {"to": "nvme", "path": tmp_path, "chunk_elems": 1 << 20}
    optimizer = infinity(model, make_optimizer(model, "adamw", **place))
    train(model, optimizer, rank, world_size, range(2))
    tier: Any = optimizer._tier
    store, units = tier.store, optimizer._weights.units
    read, written = -store.read_bytes, -store.written_bytes
    train(model, optimizer, rank, world_size, range(2, 3))
    read, written = read + store.read_bytes, written + store.written_bytes
    # Between steps the small weights are all there is.
    other = Net(width=WIDTH)
    place = {"world_size": world_size, "rank": rank, "offload_weights": True}
    memory = zero.predict_memory(other, make_optimizer(other, "adamw", to="cpu"), 3, **place)
    packed = [unit.packed_row.numel() for unit in units]
    assert memory.parameters == sum(packed)
    assert memory.states == 0 == sum(t.nbytes for t in states_of(optimizer))
    assert sum(p.untyped_storage().nbytes() for p in model.parameters()) == 0
    loss_of(model, *batch(7, rank, world_size)).backward()
    assert sum(t.nbytes for t in gradients_of(optimizer)) == memory.gradients

    def blocks(num_bytes: int) -> int:
        return -(-num_bytes // 4096) * 4096

    expected_read = expected_written = 0
    for param in model.parameters():
        begin, end = optimizer.range_of(param)
        elems = end - begin
        if param.nbytes >= 64 << 10:
            # Weights for forward, backward and step, gradients; weights and gradients back.
            expected_read += 4 * blocks(4 * elems)
            expected_written += 2 * blocks(4 * elems)
        expected_read += blocks(8 * elems)
        expected_written += blocks(8 * elems)
    assert (read, written) == (expected_read, expected_written)


@in_ranks(2)
def test_errors(rank: int, tmp_path: Path) -> None:
    def check(words: str, place: Any = None, stage: int = 3, **options: Any) -> None:
        model = Net()
        optimizer = make_optimizer(model, "sgd", **({"to": "cpu"} if place is None else place))
        with pytest.raises(ValueError, match=words):
            zero.shard(model, optimizer, stage, **{"offload_weights": True, **options})

    check("is for stage 3", stage=2)
    check("needs optimizers of class ringcomm", {})
    check("cast the model itself", param_dtype=torch.bfloat16)
    given: Any = Net(), None, 3
    with pytest.raises(TypeError, match="unexpected keyword argument 'resume'"):
        zero.shard(*given, resume=True)  # type: ignore[call-arg]
    place: dict[str, Any] = {"to": "nvme", "path": tmp_path}
    model = Net()
    optimizer = infinity(model, make_optimizer(model, "sgd", **place))
    assert same(full_weights(optimizer), weights(Net()))
    with pytest.raises(RuntimeError, match=r"no_sync\(\) is not supported"), optimizer.no_sync():
        pass
    loss_of(model, *batch(0)).backward()
    with pytest.raises(RuntimeError, match=r"Use optimizer.clip_grad_norm_\(\)"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert optimizer.clip_grad_norm_(math.inf) > 0
    with pytest.raises(RuntimeError, match=r"cannot find them: use ringcomm\.parallel\.get"):
        get_optimizer_state_dict(model, optimizer)
    with pytest.raises(ValueError, match=r"before zero\.shard"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    optimizer.step()
    model.added = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"added.weight was added"):
        optimizer.step()
    optimizer.close()


@pytest.mark.parametrize(
    "used",
    [
        [[[0, 1]], [None]],  # no weight at all on rank 1
        [[[0, 1], [0]], [[0, 1], [1]]],  # of one size: they would be averaged with each other
    ],
    ids=["none", "second micro-batch"],
)
@in_ranks(2)
def test_ranks_that_use_other_weights_are_refused(rank: int, used: list[list[list[int]]]) -> None:
    """By rank, by micro-batch: what is used; then a step that is right."""
    model = Towers()
    sharded = infinity(model, offload.Offloaded(torch.optim.SGD(model.parameters(), 0.1)), units=[])
    before = full_weights(sharded)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank)).requires_grad_()

    def step() -> None:
        for part in used[rank]:
            model(x, part).sum().backward()
        sharded.step()

    with pytest.raises(RuntimeError, match=r"(towers|stem|head|scale)\S* has a gradient on some"):
        step()
    sharded.zero_grad()
    after = full_weights(sharded)
    assert same(after, before)
    model(x, [0, 1]).sum().backward()
    sharded.step()
    after = full_weights(sharded)
    changed = [name for name, value in after.items() if not torch.equal(value, before[name])]
    assert len(changed) == 9


def make_files(
    folder: Path | None, seed: int, kind: str, dtype: torch.dtype
) -> tuple[nn.Module, zero.ZeroInfinity, lr_scheduler.StepLR]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(130, 130), nn.Tanh(), nn.Linear(130, 3)).to(dtype)
    place: dict[str, Any] = {"to": "cpu"} if folder is None else {"to": "nvme", "path": folder}
    kinds = {**OFFLOADED, "AdamW": lambda m: torch.optim.AdamW(m.parameters(), 1e-2)}
    own = offloaded(kinds[kind](model), chunk_elems=10_000, **place)
    optimizer = infinity(model, own, loss_scale="dynamic")
    return model, optimizer, lr_scheduler.StepLR(optimizer, 1, 0.9)


def step_files(model: nn.Module, optimizer: Any, scheduler: Any, steps: range) -> None:
    """A restart sets the scheduler to its step."""
    scheduler.last_epoch = steps.start
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, 130, generator=generator).to(next(model.parameters()).dtype)
        train_step(optimizer.scale(model(x).float().square().mean()), optimizer)
        scheduler.step()


def values_of(optimizer: zero.ZeroInfinity) -> list[Any]:
    found = full_state(optimizer)
    states = [state[key] for state in found["state"].values() for key in sorted(state)]
    return [*full_weights(optimizer).values(), *states, found["param_groups"]]


def train_and_die(rank: int, scratch: Path, saved: Path, *of: Any) -> None:
    model, optimizer, _ = made = make_files(scratch, 0, *of)
    step_files(*made, range(3))
    save_parts(model, optimizer, saved)
    dist.barrier()
    step_files(*made, range(3, 4))  # which is lost
    os.kill(os.getpid(), signal.SIGKILL)


def go_on(rank: int, scratch: Path | None, saved: Path | None, seed: int, *of: Any) -> list[Any]:
    model, optimizer, _ = made = make_files(scratch, seed, *of)
    if saved is not None:
        load_parts(model, optimizer, saved)
    step_files(*made, range(0 if saved is None else 3, 6))
    found = values_of(optimizer)
    optimizer.close()
    return found


@pytest.mark.parametrize(
    ("kind", "dtype", "is_in_files"),
    [
        ("AdamW", torch.float32, True),
        ("AdamW", torch.float32, False),
        ("AdamW", torch.bfloat16, True),
        ("Muon64", torch.float32, True),
        ("Adafactor", torch.bfloat16, True),
        ("Counting", torch.float32, True),
        slow("Muon64", torch.bfloat16, True),
        slow("Counting", torch.bfloat16, True),
    ],
)
def test_a_checkpoint_goes_on_after_a_restart(
    kind: str, dtype: torch.dtype, is_in_files: bool, tmp_path: Path
) -> None:
    """By get_state_dict and torch.distributed.checkpoint, with the bits of a run without an end."""
    scratch, saved, of = tmp_path / "scratch", tmp_path / "saved", (kind, dtype)
    run_ranks(2, train_and_die, scratch, saved, *of, fresh=True, may_die=[0, 1])
    assert not list(scratch.iterdir())
    found = run_ranks(2, go_on, scratch if is_in_files else None, saved, 1, *of, fresh=True)
    for mine, expected in zip(found, run_ranks(2, go_on, scratch, None, 0, *of), strict=True):
        for value, wanted in zip(mine, expected, strict=True):
            assert repr(value) == repr(wanted)
            assert not isinstance(value, Tensor) or torch.equal(value, wanted)
    # On another number of ranks.
    others = run_ranks(1, go_on, scratch, saved, 2, *of) if of == ("AdamW", torch.float32) else []
    for other in others:
        for mine, expected in zip(other[:-1], found[0][:-1], strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


@in_ranks(2)
def test_ctrl_c_in_a_forward_pass(rank: int) -> None:
    """Units are freed again in the passes after it."""
    model = Net(width=WIDTH)
    optimizer = infinity(model, make_optimizer(model, "momentum", to="cpu"))
    rows = batch(0, rank, 2)
    hook = model.last.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(rows[0])
    hook.remove()
    with torch.no_grad():
        model(rows[0])
    units = optimizer._weights.units
    assert not any(unit.is_full for unit in units)
    optimizer.close()


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
