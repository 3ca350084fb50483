"""ZeroInfinity after kills and power cuts at every operation on its files."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from crashing_disk import Disk, crashes
from full_states import full_state, full_weights, load_full_weights
from ranks import run_ranks
from torch import Tensor, nn

import ringcomm
from ringcomm.parallel import offload, zero


def make(folder: Path, seed: int, **options: Any) -> tuple[nn.Module, zero.ZeroInfinity]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(130, 130), nn.Tanh(), nn.Linear(130, 3))
    own = offload.AdamW(model.parameters(), 1e-2, to="nvme", path=folder, chunk_elems=10_000)
    optimizer = zero.shard(model, own, 3, offload_weights=True, **options)
    assert isinstance(optimizer, zero.ZeroInfinity)
    return model, optimizer


def step(model: nn.Module, optimizer: zero.ZeroInfinity) -> None:
    generator = torch.Generator().manual_seed(optimizer.num_steps)
    model(torch.randn(4, 130, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(optimizer: zero.ZeroInfinity) -> list[Tensor]:
    states = full_state(optimizer)["state"]
    found = [*full_weights(optimizer).values()]
    return found + [value for number in states for value in states[number].values()]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def job(folder: Path, disk: Disk | None) -> dict[int, list[Tensor]]:
    """By commit what there is after it: at first, after loads and after two steps."""
    after: dict[int, list[Tensor]] = {}

    def commit_done() -> None:
        after[len(after) + 1] = values(optimizer)
        if disk is not None:
            disk.mark(len(after))

    model, optimizer = make(folder, 0)
    commit_done()
    loaded = {key: value + 1 for key, value in full_weights(optimizer).items()}
    load_full_weights(optimizer, loaded)
    commit_done()
    step(model, optimizer)
    commit_done()
    optimizer.load_state_dict(optimizer.state_dict())
    commit_done()
    step(model, optimizer)
    commit_done()
    optimizer.close()
    return after


def crash_everywhere(rank: int, folder: Path) -> int:
    (folder / "run" / "rank0of1").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(folder / "run" / "rank0of1", patch)
        after = job(folder / "run", disk)
    disk.check_is_complete()
    seen: set[int] = set()
    for count, state in crashes(disk.before, disk.ops, every_loss=False):
        done = [op.mark for op in disk.ops[:count] if op.kind == "mark"]
        last = max(done, default=0)
        what = hash((last, repr(sorted(state.contents().items()))))
        if what in seen:
            continue
        seen.add(what)
        place = folder / f"{len(seen)}"
        place.mkdir()
        state.write(place / "rank0of1")
        if not any("index" in name and "draft" not in name for name in state.names):
            assert last == 0
            with pytest.raises(ValueError, match="nothing to resume on rank 0"):
                make(place, 1, resume=True)
            _, optimizer = make(place, 0)
            assert same(values(optimizer), after[1])
        else:
            model, optimizer = make(place, 1, resume=True)
            found = values(optimizer)
            assert same(found, after[max(last, 1)]) or same(found, after[min(last + 1, 5)])
            while optimizer.num_steps < 2 and same(found, after[3]):
                step(model, optimizer)
                assert same(values(optimizer), after[5])
        optimizer.close()
    return len(seen)


@pytest.mark.slow
def test_crashes_of_weights_loads_and_steps(tmp_path: Path) -> None:
    (num_states,) = run_ranks(1, crash_everywhere, tmp_path)
    assert num_states > 40


# ---- ranks that are a commit apart


def train_to(
    rank: int,
    folder: Path,
    num_steps: int,
    resume: bool = False,
    dies: tuple[int, float] | None = None,
) -> tuple[int, list[Tensor]]:
    """With `dies` the process is killed: after so many steps and so many seconds more."""
    model, optimizer = make(folder, 0, resume=resume)
    begun = optimizer.num_steps
    try:
        while optimizer.num_steps < num_steps:
            step(model, optimizer)
            if dies is not None and optimizer.num_steps == begun + dies[0]:
                threading.Timer(dies[1], os.kill, (os.getpid(), signal.SIGKILL)).start()
        found = values(optimizer)
        optimizer.close()
    except ringcomm.RingcommError:  # the other rank was first
        assert dies is not None
        os.kill(os.getpid(), signal.SIGKILL)
    return begun, found


def test_killed_runs_end_as_if_they_had_not_been(tmp_path: Path) -> None:
    expected = run_ranks(2, train_to, tmp_path / "whole", 40)
    draw = random.Random(2)
    for resume in (False, True):
        dies = draw.randint(1, 8), draw.uniform(0, 0.005)
        arguments = tmp_path / "files", 40, resume, dies
        run_ranks(2, train_to, *arguments, fresh=True, may_die=[0, 1])
    found = run_ranks(2, train_to, tmp_path / "files", 40, True)
    for (begun, mine), (_, theirs) in zip(found, expected, strict=True):
        assert 0 < begun < 40
        assert same(mine, theirs)


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
        assert same(mine, theirs)
