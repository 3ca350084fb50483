"""Parameters, gradients and optimizers for the tests of reduce_scatter_update_all_gather_.

On the CPU (test_fused_update.py) and on GPUs (tests/python/device/test_gpu_fused_update.py).
"""

from __future__ import annotations

from itertools import product
from typing import Any

import oracle
import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm import ops
from ringcomm.ops import AdamWStep, LomoStep, SGDStep
from ringcomm.torch_names import reduce_scatter_single

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
Kind = tuple[torch.dtype, torch.dtype, bool]  # of parameters, of gradients, with a master
KINDS: list[Kind] = [(F32, F32, False), (BF16, BF16, False), (BF16, BF16, True)]
KINDS += [(F16, F32, False), (F32, BF16, False)]
# A slice of 256 KiB and an element, on each rank.
TWO_SLICES = 65_537

OPTIMIZERS: dict[str, Any] = {
    "sgd": SGDStep(lr=0.1),
    "momentum": SGDStep(lr=0.1, momentum=0.9, weight_decay=0.01),
    "dampening": SGDStep(lr=0.01, momentum=0.9, dampening=0.5),
    "nesterov": SGDStep(lr=0.01, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adamw": AdamWStep(lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1),
    "adamw_low_betas": AdamWStep(lr=1e-2, betas=(0.3, 0.5), eps=1e-3, weight_decay=0.0),
    "lomo": LomoStep(lr=0.1, weight_decay=0.1),
    "lomo_clipped": LomoStep(lr=0.1, clip_value=0.3),
}


def sizes(world_size: int) -> list[int]:
    """Nothing; fewer than ranks; one each; a longer shard; many; many, and odd."""
    return [0, 1, world_size, world_size + 1, 1000 * world_size, 5000 * world_size + 1]


def grad_of(rank: int, num_elems: int, dtype: torch.dtype, step: int) -> Tensor:
    return oracle.floats(rank, num_elems, F32, seed=step + 2).to(dtype)


def start(num_elems: int, dtype: torch.dtype) -> Tensor:
    return oracle.floats(0, num_elems, F32, seed=1).to(dtype)


def average(world_size: int, num_elems: int, dtype: torch.dtype, step: int) -> Tensor:
    """In fp32, in the order of the ranks, rounded to the gradient's dtype."""
    grads = [grad_of(rank, num_elems, dtype, step).float() for rank in range(world_size)]
    total = grads[0]
    for grad in grads[1:]:
        total = total + grad
    return (total / world_size).to(dtype)


class Run:
    """Parameters, this rank's state, and gradients that every rank can compute for all."""

    def __init__(
        self,
        optimizer: Any,
        num_elems: int,
        dtype: torch.dtype,
        where: Any = "cpu",
        *,
        grad_dtype: torch.dtype | None = None,
        master: bool = False,
    ) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.optimizer = optimizer
        self.grad_dtype = grad_dtype or dtype
        self.param = start(num_elems, dtype).to(where)
        self.shard = slice(*ops.shard_range(num_elems, self.world_size, self.rank))
        shard = self.param[self.shard].float()
        self.state = {name: torch.zeros_like(shard) for name in optimizer.state_names}
        if master:
            self.state["master"] = shard

    def grad(self, step: int) -> Tensor:
        grad = grad_of(self.rank, self.param.numel(), self.grad_dtype, step)
        return grad.to(self.param.device)

    def step(self, step: int, **kwargs: Any) -> None:
        grad = self.grad(step)
        result = ops.reduce_scatter_update_all_gather_(
            self.param, grad, self.state, optimizer=self.optimizer, step=step, **kwargs
        )
        assert result is self.param
        oracle.assert_equal(grad.cpu(), self.grad(step).cpu())

    def step_in_parts(self, step: int, alone: Any) -> None:
        """An average, the update of this rank's shard by itself, and the shards to all."""
        averaged = self.grad(step)
        if averaged.numel() > 0 and averaged.numel() % self.world_size == 0:
            reduced = averaged.new_empty(averaged.numel() // self.world_size)
            reduce_scatter_single(reduced, averaged, op=dist.ReduceOp.AVG)
        else:
            dist.all_reduce(averaged, dist.ReduceOp.AVG)
            reduced = averaged[self.shard].clone()
        options: dict[str, Any] = {"optimizer": self.optimizer, "step": step, "group": alone}
        own = (self.param[self.shard], reduced, self.state)
        ops.reduce_scatter_update_all_gather_(*own, **options)
        for rank in range(self.world_size):
            begin, end = ops.shard_range(averaged.numel(), self.world_size, rank)
            dist.broadcast(self.param[begin:end], rank)

    def assert_same(self, other: Run) -> None:
        """Parameters and state, to the last bit."""
        oracle.assert_equal(self.param.cpu(), other.param.cpu())
        for name, value in self.state.items():
            oracle.assert_equal(value.cpu(), other.state[name].cpu())


def kinds_of(name: str, where: Any) -> list[Kind]:
    """Of an optimizer; GPUs have no parameters in float16."""
    kinds = [kind for kind in KINDS if where == "cpu" or kind[0] != F16]
    return [kind for kind in kinds if not (kind[2] and name.startswith("lomo"))]


def check_bits(rank: int, names: list[str], where: Any = "cpu", in_parts: bool = True) -> None:
    """All ranks have the same parameters, those of the parts of a step one after the other."""
    world_size = dist.get_world_size()
    alone = [dist.new_group([other]) for other in range(world_size)][rank]
    largest = TWO_SLICES * (world_size if where == "cpu" else 1)
    for name, num_elems in product(names, [*sizes(world_size), largest]):
        for dtype, grad_dtype, master in kinds_of(name, where):
            made = (OPTIMIZERS[name], num_elems, dtype, where)
            fused, parts = (Run(*made, grad_dtype=grad_dtype, master=master) for _ in "ab")
            for step in (1, 2):
                fused.step(step)
                if in_parts:
                    parts.step_in_parts(step, alone)
                    fused.assert_same(parts)
            first = fused.param.clone()
            dist.broadcast(first, 0)
            oracle.assert_equal(first.cpu(), fused.param.cpu())
