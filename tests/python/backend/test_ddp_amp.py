"""DDP over ringcomm with autocast, a GradScaler and gradient accumulation."""

from __future__ import annotations

import torch
from ranks import run_ranks
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from zero_models import Net, batch, loss_of, weights

STEPS, NUM_MICRO_BATCHES = 4, 2


def train(rank: int, world_size: int, broken_step: int) -> tuple[dict[str, Tensor], float]:
    """Steps of two micro-batches; in one of them rank 1's loss is infinite."""
    model = Net()
    replica = DistributedDataParallel(model) if world_size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        for part in range(NUM_MICRO_BATCHES):
            x, y = batch(NUM_MICRO_BATCHES * step + part, rank, world_size)
            is_broken = step == broken_step and rank == world_size - 1
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(replica, x, y * (float("inf") if is_broken else 1))
            scaler.scale(loss / NUM_MICRO_BATCHES).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return weights(model), scaler.get_scale()


def test_a_scaled_step_is_left_out_on_all_ranks() -> None:
    expected, scale = train(0, 1, broken_step=2)
    assert scale == 512
    for world_size in (2, 3, 4):
        results = run_ranks(world_size, train, world_size, 2)
        for found, found_scale in results:
            assert found_scale == scale
            for name, value in expected.items():
                assert torch.equal(found[name], results[0][0][name])
                torch.testing.assert_close(found[name], value, rtol=0.02, atol=0.01)


def test_negative_control() -> None:
    """Without the overflow the weights are others."""
    left_out, _ = train(0, 1, broken_step=2)
    whole, scale = train(0, 1, broken_step=-1)
    assert scale == 1024
    assert not torch.equal(whole["first.weight"], left_out["first.weight"])
