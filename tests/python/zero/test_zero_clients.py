"""zero.shard() and what training loops do around it; test_pairs.py has DDP, Accelerate, Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from full_states import full_weights
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel
from zero_models import (
    STAGES,
    STEPS,
    Net,
    batch,
    loss_of,
    make,
    make_optimizer,
    weights,
)

import ringcomm  # noqa: F401
from ringcomm.parallel import offload, zero

MAX_NORM = 0.1


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-6)


# ---- clipping


def clip_by_optimizer(rank: int, world_size: int, stage: int, scale: float | None) -> list[Tensor]:
    """In every step, after two of three backward passes: what came before is clipped."""
    model, optimizer = make(stage, loss_scale=scale)
    norms = []
    for step in range(STEPS):
        for part in range(3):
            loss = loss_of(model, *batch(3 * step + part, rank, world_size))
            optimizer.scale(loss).backward()
            if part == 1:
                norms.append(optimizer.clip_grad_norm_(MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
    alone = Net()
    plain = make_optimizer(alone, "momentum")
    for step in range(STEPS):
        for part in range(3):
            loss_of(alone, *batch(3 * step + part)).backward()
            if part == 1:
                norm = nn.utils.clip_grad_norm_(alone.parameters(), MAX_NORM)
                torch.testing.assert_close(norms[step], norm, rtol=1e-4, atol=0)
        plain.step()
        plain.zero_grad()
    assert_close(weights(model), weights(alone))
    return norms


@pytest.mark.parametrize(
    ("world_size", "stage", "scale"),
    [(2, 1, None), (3, 2, 1024.0), (3, 3, 1024.0)],
)
def test_the_optimizer_clips(world_size: int, stage: int, scale: float | None) -> None:
    results = run_ranks(world_size, clip_by_optimizer, world_size, stage, scale)
    for norms in results:
        assert all(torch.equal(a, b) for a, b in zip(norms, results[0], strict=True))


def clip_offloaded(rank: int) -> None:
    model, alone = Net(), Net()
    own = offload.SGD(model.parameters(), 0.05, 0.9)
    plain = torch.optim.SGD(alone.parameters(), 0.05, 0.9)
    sharded = zero.shard(model, own, 3, offload_weights=True)
    for step in range(2):
        for part in range(2):
            loss_of(model, *batch(2 * step + part, rank, 2)).backward()
            loss_of(alone, *batch(2 * step + part)).backward()
        norm = sharded.clip_grad_norm_(MAX_NORM)
        torch.testing.assert_close(
            norm, nn.utils.clip_grad_norm_(alone.parameters(), MAX_NORM), rtol=1e-4, atol=0
        )
        with pytest.raises(RuntimeError, match=r"Use optimizer.clip_grad_norm_\(\)"):
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        for optimizer in (sharded, plain):
            optimizer.step()
            optimizer.zero_grad()
    assert isinstance(sharded, zero.ZeroInfinity)
    assert_close(full_weights(sharded), weights(alone))
    with pytest.raises(RuntimeError, match=r"cannot find them: use ringcomm\.parallel\.get"):
        get_optimizer_state_dict(model, sharded)


def test_offloaded_weights_clip() -> None:
    run_ranks(2, clip_offloaded)


def check_clip_errors(rank: int, stage: int) -> None:
    model, optimizer = make(stage)
    before = weights(model)
    with pytest.raises(ValueError, match="max_norm is positive"):
        optimizer.clip_grad_norm_(0)
    assert optimizer.clip_grad_norm_(1.0) == 0
    x, y = batch(0, rank, 2)
    loss_of(model, x, y * (float("nan") if rank == 1 else 1)).backward()
    with pytest.raises(RuntimeError, match="not finite; no weight has been written"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())


@pytest.mark.parametrize("stage", STAGES)
def test_errors_of_clipping(stage: int) -> None:
    run_ranks(2, check_clip_errors, stage)


# ---- torch's own, around stages 1 and 2


def ddp_runs_a_part(model: nn.Module, original: Any, sharded: Any) -> None:
    """Whose forward the model's own hook does not see."""
    assert isinstance(model, Net)
    replica = DistributedDataParallel(model.last)
    replica(torch.randn(2, 13)).sum().backward()


def original_steps(model: nn.Module, original: Any, sharded: Any) -> None:
    loss_of(model, *batch(0)).backward()
    original.step()


def sets_to_zero(model: nn.Module, original: Any, sharded: Any) -> None:
    loss_of(model, *batch(0)).backward()
    model.zero_grad(set_to_none=False)


def refuse(rank: int, stage: int, do: Callable[[Any, Any, Any], None], text: str) -> None:
    model = Net()
    original = make_optimizer(model, "momentum")
    sharded = zero.shard(model, original, stage)
    before = weights(model)
    with pytest.raises(RuntimeError, match=text):
        do(model, original, sharded)
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())


SHARDED = "param.grad of a weight that zero.shard"


@pytest.mark.parametrize(
    ("do", "text"),
    [
        (original_steps, SHARDED),
        (sets_to_zero, SHARDED),
        (ddp_runs_a_part, SHARDED),
    ],
)
@pytest.mark.parametrize("stage", [1, 2])
def test_what_would_go_by_one_rank_raises(stage: int, do: Any, text: str) -> None:
    run_ranks(2, refuse, stage, do, text)
