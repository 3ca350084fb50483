"""zero.shard(offload_weights=True): weights, gradients and states in host memory or in files;
kills and power cuts at every operation on these."""

from __future__ import annotations

import math
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from crashing_disk import Disk, crashes
from full_states import full_state, full_weights, load_full_weights
from oracle import all_equal
from ranks import in_ranks, run_ranks
from steps import train_step
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from zero_models import (
    Net,
    Towers,
    assert_alike,
    assert_close,
    batch,
    loss_of,
    make_optimizer,
    place_of,
    same,
    train,
    train_alone,
    weights,
)

import ringcomm
from ringcomm.parallel import offload, zero

WIDTH = 129  # 66,564 bytes a matrix of a block: large ones are above 64 KiB
# A bit in a gradient that is nearly 0 moves AdamW's weight by a part of lr.
ATOL = {"adamw": 2e-3, "momentum": 1e-5}


def infinity(model: nn.Module, optimizer: Any, **options: Any) -> zero.ZeroInfinity:
    found = zero.shard(model, optimizer, 3, offload_weights=True, **options)
    assert isinstance(found, zero.ZeroInfinity)
    return found


ODD = {"is_tied": True, "is_frozen": True}  # over units


@pytest.mark.parametrize(
    ("world_size", "case"),
    [
        (1, ("adamw", "nvme", {"clip_grad_norm": 0.1}, 2, {})),
        (3, ("adamw", "cpu", {"clip_grad_norm": 0.1, "loss_scale": 1024.0}, 1, {})),
        (3, ("momentum", "nvme", {}, 2, {})),
        (4, ("momentum", "nvme", {"clip_grad_norm": 0.1}, 1, ODD)),
    ],
)
@in_ranks()
def test_steps_are_those_of_one_process(
    rank: int, world_size: int, case: Any, tmp_path: Path
) -> None:
    kind, to, options, num_micro_batches, model_options = case
    model = Net(width=WIDTH, **model_options)
    if model_options:
        model.nothing = nn.ParameterList([torch.ones(0)])
    own = make_optimizer(model, kind, chunk_elems=10_000, **place_of(to, tmp_path))
    optimizer = infinity(model, own, **options)
    train(model, optimizer, rank, world_size, num_micro_batches=num_micro_batches)
    found = full_weights(optimizer)
    optimizer.close()
    for name, param in model.named_parameters():
        assert torch.equal(param.detach(), found[name])
    clip = options.get("clip_grad_norm")
    expected = train_alone(kind, clip, num_micro_batches, width=WIDTH, **model_options)
    assert_close(found, expected, ATOL[kind])
    assert_alike(found)


@in_ranks([1, 3])
def test_bytes_of_a_step(rank: int, tmp_path: Path) -> None:
    model, world_size = Net(width=WIDTH), dist.get_world_size()
    place: dict[str, Any] = {"to": "nvme", "path": tmp_path, "chunk_elems": 1 << 20}
    optimizer = infinity(model, make_optimizer(model, "adamw", **place))
    train(model, optimizer, rank, world_size, range(2))
    before, units = optimizer.io_bytes, optimizer._weights.units
    train(model, optimizer, rank, world_size, range(2, 3))
    read, written = (now - then for now, then in zip(optimizer.io_bytes, before, strict=True))
    # Between steps the small weights are all there is.
    other = Net(width=WIDTH)
    place = {"world_size": world_size, "rank": rank, "offload_weights": True}
    memory = zero.predict_memory(other, make_optimizer(other, "adamw", to="cpu"), 3, **place)
    packed = [unit.packed_row.numel() for unit in units]
    assert memory.parameters == sum(packed)
    assert memory.states == 0 == sum(t.nbytes for t in optimizer.state_tensors())
    assert sum(p.untyped_storage().nbytes() for p in model.parameters()) == 0
    loss_of(model, *batch(7, rank, world_size)).backward()
    assert sum(t.nbytes for t in optimizer.gradient_tensors()) == memory.gradients

    def blocks(num_bytes: int) -> int:
        return -(-num_bytes // 4096) * 4096

    expected_read, expected_written = 0, sum(map(blocks, packed))
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
    check("needs optimizers of ringcomm", {})
    check("cast the model itself", param_dtype=torch.bfloat16)
    check("resume= needs offload_weights=True", offload_weights=False, resume=True)
    check("nothing to resume", resume=True)
    place: dict[str, Any] = {"to": "nvme", "path": tmp_path}
    other = nn.Sequential(nn.Linear(200, 200))
    infinity(other, offload.SGD(other.parameters(), **place)).close()
    model = Net()  # whose files replace those of a job that ended before its first step
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
    check("continue it with resume=True", place)
    other = nn.Sequential(nn.Linear(7, 7))
    with pytest.raises(ValueError, match="from another model"):
        infinity(other, offload.SGD(other.parameters(), **place), resume=True)


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
    sharded = infinity(model, offload.SGD(model.parameters(), 0.1), units=[])
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


def make_files(folder: Path, seed: int, **options: Any) -> tuple[nn.Module, zero.ZeroInfinity]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(130, 130), nn.Tanh(), nn.Linear(130, 3))
    own = offload.AdamW(model.parameters(), 1e-2, to="nvme", path=folder, chunk_elems=10_000)
    optimizer = zero.shard(model, own, 3, offload_weights=True, **options)
    assert isinstance(optimizer, zero.ZeroInfinity)
    return model, optimizer


def step_files(model: nn.Module, optimizer: zero.ZeroInfinity) -> None:
    generator = torch.Generator().manual_seed(optimizer.num_steps)
    train_step(model(torch.randn(4, 130, generator=generator)).square().mean(), optimizer)


def values_of(optimizer: zero.ZeroInfinity) -> list[Tensor]:
    states = full_state(optimizer)["state"]
    found = [*full_weights(optimizer).values()]
    return found + [value for number in states for value in states[number].values()]


def job(folder: Path, disk: Disk | None) -> dict[int, list[Tensor]]:
    """By commit what there is after it: at first, after loads and after two steps."""
    after: dict[int, list[Tensor]] = {}

    def commit_done() -> None:
        after[len(after) + 1] = values_of(optimizer)
        if disk is not None:
            disk.mark(len(after))

    model, optimizer = make_files(folder, 0)
    commit_done()
    loaded = {key: value + 1 for key, value in full_weights(optimizer).items()}
    load_full_weights(optimizer, loaded)
    commit_done()
    step_files(model, optimizer)
    commit_done()
    optimizer.load_state_dict(optimizer.state_dict())
    commit_done()
    step_files(model, optimizer)
    commit_done()
    optimizer.close()
    return after


@pytest.mark.slow
@in_ranks(1)
def test_crashes_of_weights_loads_and_steps(rank: int, tmp_path: Path) -> None:
    (tmp_path / "run" / "rank0of1").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(tmp_path / "run" / "rank0of1", patch)
        after = job(tmp_path / "run", disk)
    disk.check_is_complete()
    seen: set[int] = set()
    for count, state in crashes(disk.before, disk.ops, every_loss=False):
        done = [op.mark for op in disk.ops[:count] if op.kind == "mark"]
        last = max(done, default=0)
        what = hash((last, repr(sorted(state.contents().items()))))
        if what in seen:
            continue
        seen.add(what)
        place = tmp_path / f"{len(seen)}"
        place.mkdir()
        state.write(place / "rank0of1")
        if not any("index" in name and "draft" not in name for name in state.names):
            assert last == 0
            with pytest.raises(ValueError, match="nothing to resume on rank 0"):
                make_files(place, 1, resume=True)
            _, optimizer = make_files(place, 0)
            assert all_equal(values_of(optimizer), after[1])
        else:
            model, optimizer = make_files(place, 1, resume=True)
            found = values_of(optimizer)
            assert all_equal(found, after[max(last, 1)]) or all_equal(
                found, after[min(last + 1, 5)]
            )
            while optimizer.num_steps < 2 and all_equal(found, after[3]):
                step_files(model, optimizer)
                assert all_equal(values_of(optimizer), after[5])
        optimizer.close()
    assert len(seen) > 40


def train_to(
    rank: int,
    folder: Path,
    num_steps: int,
    resume: bool = False,
    dies: tuple[int, float] | None = None,
) -> tuple[int, list[Tensor]]:
    """With `dies` the process is killed: after so many steps and so many seconds more."""
    model, optimizer = make_files(folder, 0, resume=resume)
    begun = optimizer.num_steps
    try:
        while optimizer.num_steps < num_steps:
            step_files(model, optimizer)
            if dies is not None and optimizer.num_steps == begun + dies[0]:
                threading.Timer(dies[1], os.kill, (os.getpid(), signal.SIGKILL)).start()
        found = values_of(optimizer)
        optimizer.close()
    except ringcomm.RingcommError:  # the other rank was first
        assert dies is not None
        os.kill(os.getpid(), signal.SIGKILL)
    return begun, found


def test_killed_runs_end_as_if_they_had_not_been(tmp_path: Path) -> None:
    expected = run_ranks(2, train_to, tmp_path / "whole", 24)
    draw = random.Random(2)
    for resume in (False, True):
        dies = draw.randint(1, 8), draw.uniform(0, 0.005)
        arguments = tmp_path / "files", 24, resume, dies
        run_ranks(2, train_to, *arguments, fresh=True, may_die=[0, 1])
    found = run_ranks(2, train_to, tmp_path / "files", 24, True)
    for (begun, mine), (_, theirs) in zip(found, expected, strict=True):
        assert 0 < begun < 24
        assert all_equal(mine, theirs)


@pytest.mark.parametrize("last_step", [1, 3])
def test_a_rank_that_is_a_step_ahead_goes_back(last_step: int, tmp_path: Path) -> None:
    """From step 1 as well: step 0 are the weights that the job began with."""
    expected = run_ranks(2, train_to, tmp_path / "whole", 4)
    run_ranks(2, train_to, tmp_path / "files", last_step)
    store = offload.FileStore(tmp_path / "files" / "rank1of2")
    store.roll_back()
    store.close()
    found = run_ranks(2, train_to, tmp_path / "files", 4, True)
    for (begun, mine), (_, theirs) in zip(found, expected, strict=True):
        assert begun == last_step - 1
        assert all_equal(mine, theirs)
