"""The fused ring on GPUs: bits against its parts there, and steps against the CPU's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from emulated_gpu import needs_build_without_kernels, needs_emulated_gpu
from gpu_ranks import (
    EMULATED,
    Gpus,
    device,
    in_gpu_ranks,
    on_gpus,
    on_gpus_with_kernels,
)
from update_runs import BF16, F32, OPTIMIZERS, Run, check_bits, kinds_of

import ringcomm


def check_bits_here(rank: int, name: str) -> None:
    check_bits(rank, [name], device())


@on_gpus
@pytest.mark.parametrize("name", ["adamw", "lomo_clipped"])
def test_same_bits_as_the_parts(gpus: Gpus, name: str) -> None:
    gpus.run(check_bits_here, name, fresh=True)


@in_gpu_ranks(on_gpus_with_kernels)
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_steps_are_those_of_the_host(rank: int, name: str) -> None:
    """The CPU's steps are tested against torch's: 2 ulp; here compilers may contract products."""
    world_size = dist.get_world_size()
    for dtype, grad_dtype, master in kinds_of(name, device()):
        for num_elems in (0, 1, world_size + 1, 5000 * world_size + 1):
            ours, host = (
                Run(OPTIMIZERS[name], num_elems, dtype, where, grad_dtype=grad_dtype, master=master)
                for where in (device(), "cpu")
            )
            for step in (1, 2, 3):
                ours.step(step)
                host.step(step)
            tolerance = 2.0**-7 if dtype == BF16 else 1e-5
            found = ours.param.cpu()
            torch.testing.assert_close(found, host.param, rtol=tolerance, atol=tolerance)
            for key, value in ours.state.items():
                expected = host.state[key]
                torch.testing.assert_close(value.cpu(), expected, rtol=1e-4, atol=1e-6, msg=key)


def check_refused(rank: int) -> None:
    run = Run(OPTIMIZERS["adamw"], 5000, F32, device())
    with pytest.raises(ringcomm.RingcommError, match="this build has no kernels for GPUs"):
        run.step(1)
    dist.all_reduce(run.param)  # the group goes on


@needs_emulated_gpu
@needs_build_without_kernels
def test_a_build_without_kernels_refuses() -> None:
    Gpus(EMULATED, 3, kernels=False).run(check_refused, fresh=True)
