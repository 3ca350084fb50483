"""Training over device collectives, on emulated GPUs, against the same on the CPU."""

from __future__ import annotations

from typing import Any

import emulated_gpu
import oracle
import pytest
import torch
import torch.distributed as dist
from emulated_gpu import run_on_gpus
from torch import Tensor, nn
from update_runs import BF16, F16, F32, OPTIMIZERS, Run

from ringcomm import ops

pytestmark = emulated_gpu.needs_emulated_gpu

GPU = "emugpu"


def run(world_size: int, fn: Any, *args: Any) -> list[Any]:
    return run_on_gpus(world_size, fn, *args)


# ---- DistributedDataParallel


def trained(rank: int, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    ddp = nn.parallel.DistributedDataParallel(model.to(device), bucket_cap_mb=1e-4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        batch = torch.from_numpy(oracle.floats(rank, 24, torch.float64, step).numpy()).view(4, 6)
        optimizer.zero_grad()
        ddp(batch.to(device)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def check_ddp(rank: int) -> list[bytes]:
    on_cpu, on_gpu = trained(rank, "cpu"), trained(rank, GPU)
    for expected, actual in zip(on_cpu, on_gpu, strict=True):
        assert torch.allclose(actual, expected, rtol=1e-12, atol=1e-12)
    return [oracle.bits(parameter) for parameter in on_gpu]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ddp(world_size: int) -> None:
    replicas = run(world_size, check_ddp)
    assert all(replica == replicas[0] for replica in replicas)


# ---- reduce_scatter_update_all_gather_


def check_updates(rank: int, name: str) -> None:
    """To the rounding of the order of sums, and of an operator more or less."""
    world_size = dist.get_world_size()
    optimizer = OPTIMIZERS[name]
    for dtype, grad_dtype, master in (
        (F32, F32, False),
        (BF16, BF16, True),
        (F16, F32, False),
    ):
        if master and name.startswith("lomo"):
            continue
        for num_elems in (0, 1, world_size + 1, 1001):
            on_cpu = Run(optimizer, num_elems, dtype, grad_dtype=grad_dtype, master=master)
            param = on_cpu.param.to(GPU)
            state = {key: value.to(GPU) for key, value in on_cpu.state.items()}
            for step in (1, 2, 3):
                on_cpu.step(step)
                ops.reduce_scatter_update_all_gather_(
                    param, on_cpu.grad(step).to(GPU), state, optimizer=optimizer, step=step
                )
            rtol, atol = (1e-5, 1e-6) if dtype == F32 else (0.02, 1e-3)
            assert torch.allclose(param.cpu().float(), on_cpu.param.float(), rtol=rtol, atol=atol)
            for key, value in state.items():
                assert torch.allclose(value.cpu(), on_cpu.state[key], rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_fused_updates(name: str) -> None:
    run(3, check_updates, name)


def check_exact_update(rank: int) -> None:
    """Powers of two: nothing is rounded, so that every bit is known."""
    world_size = dist.get_world_size()
    param = torch.full((world_size + 1,), 8.0, dtype=BF16, device=GPU)
    grad = torch.full((world_size + 1,), float(rank), dtype=BF16, device=GPU)
    state = ops.new_shard_state(param, ops.SGDStep(lr=0.5, momentum=0.5))
    for step in (1, 2):
        ops.reduce_scatter_update_all_gather_(
            param,
            grad,
            state,
            optimizer=ops.SGDStep(lr=0.5, momentum=0.5),
            step=step,
            average=False,
        )
    total = sum(range(world_size))
    assert param.tolist() == [8.0 - 0.5 * total - 0.5 * 1.5 * total] * (world_size + 1)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_update_without_rounding(world_size: int) -> None:
    run(world_size, check_exact_update)
