"""Parameters, gradients and optimizers for the tests of reduce_scatter_update_all_gather_."""

from __future__ import annotations

from typing import Any

import oracle
import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm import ops
from ringcomm.ops import AdamWStep, LomoStep, SGDStep

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

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

    def __init__(self, optimizer: Any, num_elems: int, dtype: torch.dtype, **kwargs: Any) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.optimizer = optimizer
        self.grad_dtype = kwargs.pop("grad_dtype", dtype)
        self.param = start(num_elems, dtype)
        self.state = ops.new_shard_state(self.param, optimizer, **kwargs)
        self.shard = slice(*ops.shard_range(num_elems, self.world_size, self.rank))

    def grad(self, step: int) -> Tensor:
        return grad_of(self.rank, self.param.numel(), self.grad_dtype, step)

    def step(self, step: int, **kwargs: Any) -> None:
        grad = self.grad(step)
        result = ops.reduce_scatter_update_all_gather_(
            self.param, grad, self.state, optimizer=self.optimizer, step=step, **kwargs
        )
        assert result is self.param
        oracle.assert_equal(grad, self.grad(step))
