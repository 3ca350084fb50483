"""offload.Offloaded of a model on a device, whose pieces are copied beside the device's work."""

from __future__ import annotations

import tempfile
from typing import Any

import emulated_gpu
import pytest
import torch
from emulated_gpu import in_emulated_ranks
from torch import nn

from ringcomm.parallel import offload

pytestmark = emulated_gpu.needs_emulated_gpu

LATE = {"RINGCOMM_EMULATOR_DELAY_US": "2000", "RINGCOMM_EMULATOR_QUEUES": "0"}


@pytest.mark.parametrize("is_in_files", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@in_emulated_ranks(1, backend=None, env=LATE)
def test_steps_have_the_bits_of_the_host(rank: int, dtype: torch.dtype, is_in_files: bool) -> None:
    """Each kernel before and after a step, all of them late, sees what the program says."""
    torch.manual_seed(0)
    here = nn.ParameterList(torch.randn(n, dtype=dtype) for n in (1, 70, 1000))
    there = nn.ParameterList(param.detach().to("emugpu") for param in here)
    place: Any = {"to": "nvme", "path": tempfile.gettempdir()} if is_in_files else {"to": "cpu"}
    optimizers = [
        offload.Offloaded(torch.optim.AdamW(params, 0.1), chunk_elems=64, **place)
        for params in (here, there)
    ]
    for step in range(1, 5):
        for params, optimizer in zip((here, there), optimizers, strict=True):
            for param in params:
                param.grad = torch.ones_like(param) if param.grad is None else param.grad
                param.grad.fill_(step).add_(param.detach())  # the device is behind from here on
            optimizer.step()
            with torch.no_grad():
                for param in [*params][::-1]:  # the last one copied first
                    param.mul_(0.5)
                    param.grad.zero_()
        for ours, expected in zip(there, here, strict=True):
            assert torch.equal(ours.cpu(), expected)
    for param, other in zip(here, there, strict=True):
        states = [o.state[p] for o, p in zip(optimizers, (param, other), strict=True)]
        for key, value in states[0].items():
            assert torch.equal(states[1][key].cpu(), value)


@in_emulated_ranks(1, backend=None, num_devices=2)
def test_a_step_on_another_device_leaves_the_current_one(rank: int) -> None:
    param = nn.Parameter(torch.ones(70, device="emugpu:1"))
    optimizer = offload.Offloaded(torch.optim.AdamW([param], 0.1), chunk_elems=64)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert torch.accelerator.current_device_index() == 0
    assert param.tolist() == pytest.approx([0.899] * 70)
