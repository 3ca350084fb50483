"""The fused ring on GPUs: bits against its parts there, and steps against the CPU's."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from emulated_gpu import needs_emulated_gpu
from gpu_ranks import (
    EMULATED,
    Gpus,
    device,
    in_gpu_ranks,
    on_gpu,
    on_gpus,
    on_gpus_with_kernels,
    on_one_gpu,
)
from test_fused_update import TWO_SLICES
from torch import Tensor
from update_runs import BF16, F32, OPTIMIZERS, grad_of, sizes, start

import ringcomm
from ringcomm import ops
from ringcomm.torch_names import reduce_scatter_single

KINDS = [(F32, F32, False), (BF16, BF16, False), (BF16, BF16, True), (F32, BF16, False)]
Kind = tuple[torch.dtype, torch.dtype, bool]


class Steps:
    """Parameters and state on a device; gradients that every rank can compute for all."""

    def __init__(self, name: str, num_elems: int, kind: Kind, where: torch.device) -> None:
        dtype, self.grad_dtype, master = kind
        self.optimizer: Any = OPTIMIZERS[name]
        self.where = where
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.param = start(num_elems, dtype).to(where)
        self.state = ops.new_shard_state(self.param, self.optimizer, master=master)
        self.shard = slice(*ops.shard_range(num_elems, self.world_size, self.rank))

    def grad(self, step: int) -> Tensor:
        grad = grad_of(self.rank, self.param.numel(), self.grad_dtype, step)
        return grad.to(self.where)

    def fused(self, step: int) -> None:
        ops.reduce_scatter_update_all_gather_(
            self.param, self.grad(step), self.state, optimizer=self.optimizer, step=step
        )

    def in_parts(self, step: int, own_group: Any) -> None:
        """An average, the update of this rank's shard by itself, and the shards to all."""
        averaged = self.grad(step)
        if averaged.numel() and averaged.numel() % self.world_size == 0:
            reduced = averaged.new_empty(averaged.numel() // self.world_size)
            reduce_scatter_single(reduced, averaged, op=dist.ReduceOp.AVG)
        else:
            dist.all_reduce(averaged, dist.ReduceOp.AVG)
            reduced = averaged[self.shard].clone()
        ops.reduce_scatter_update_all_gather_(
            self.param[self.shard],
            reduced,
            self.state,
            optimizer=self.optimizer,
            step=step,
            group=own_group,
        )
        for rank in range(self.world_size):
            begin, end = ops.shard_range(averaged.numel(), self.world_size, rank)
            dist.broadcast(self.param[begin:end], rank)

    def tensors(self) -> dict[str, Tensor]:
        """All of them, on the host."""
        named = {"param": self.param, **self.state}
        return {name: value.cpu() for name, value in named.items()}

    def assert_same(self, other: Steps) -> None:
        for name, value in self.tensors().items():
            oracle.assert_equal(value, other.tensors()[name])


def kinds_of(name: str) -> list[Kind]:
    return [kind for kind in KINDS if not (kind[2] and name.startswith("lomo"))]


def check_parts(rank: int, name: str) -> list[bytes]:
    """Also: all ranks have the same parameters."""
    found = []
    own_groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
    for kind in kinds_of(name):
        for num_elems in [*sizes(dist.get_world_size())[1:], TWO_SLICES]:
            fused, parts = (Steps(name, num_elems, kind, device()) for _ in range(2))
            for step in (1, 2):
                fused.fused(step)
                parts.in_parts(step, own_groups[rank])
            fused.assert_same(parts)
            found.append(oracle.bits(fused.param.cpu()))
    dist.destroy_process_group(own_groups[rank])
    return found


@on_gpus
@pytest.mark.parametrize("name", ["adamw", "lomo_clipped"])
def test_same_bits_as_the_parts(gpus: Gpus, name: str) -> None:
    results = gpus.run(check_parts, name, fresh=True)
    assert all(found == results[0] for found in results)


@in_gpu_ranks(on_gpus_with_kernels)
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_steps_are_those_of_the_host(rank: int, name: str) -> None:
    """The CPU's steps are tested against torch's: 2 ulp; here compilers may contract products."""
    world_size = dist.get_world_size()
    for kind in kinds_of(name):
        for num_elems in (0, 1, world_size + 1, 5000 * world_size + 1):
            ours, host = (
                Steps(name, num_elems, kind, where) for where in (device(), torch.device("cpu"))
            )
            for step in (1, 2, 3):
                ours.fused(step)
                host.fused(step)
            tolerance = 2.0**-7 if kind[0] == BF16 else 1e-5
            found = ours.param.cpu()
            torch.testing.assert_close(found, host.param, rtol=tolerance, atol=tolerance)
            for key, value in ours.state.items():
                expected = host.state[key]
                torch.testing.assert_close(value.cpu(), expected, rtol=1e-4, atol=1e-6, msg=key)


def check_refused(rank: int) -> None:
    steps = Steps("adamw", 5000, (F32, F32, False), device())
    with pytest.raises(ringcomm.RingcommError, match="this build has no kernels for GPUs"):
        steps.fused(1)
    dist.all_reduce(steps.param)  # the group goes on


@needs_emulated_gpu
def test_a_build_without_kernels_refuses() -> None:
    Gpus(EMULATED, 3, kernels=False).run(check_refused, fresh=True)


def spoilt(rank: int) -> None:
    ours, other = (Steps("adamw", 5000, (F32, F32, False), device()) for _ in range(2))
    ours.fused(1)
    other.fused(1)
    if rank == 0:
        ours.param[4999] += on_gpu(torch.tensor(0.001))
    ours.assert_same(other)


@on_one_gpu
def test_one_wrong_weight_is_seen(gpus: Gpus) -> None:
    with pytest.raises(AssertionError, match="1 of 5000 elements differ"):
        gpus.run(spoilt, fresh=True)
