"""Ways to average gradients over ranks and to update parameters with them, for fused_update.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm import ops
from ringcomm.measure.ranks import Team
from ringcomm.torch_names import all_gather_single, reduce_scatter_single

OPTIMIZERS = ("sgd", "momentum", "adamw", "lomo")
LR = 1e-3
# Steps of the check: enough for every term of the update to matter.
NUM_CHECKED_STEPS = 3
# Allowed after those steps between ways that round differently.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}

_OURS: dict[str, ops.SGDStep | ops.AdamWStep | ops.LomoStep] = {
    "sgd": ops.SGDStep(lr=LR),
    "momentum": ops.SGDStep(lr=LR, momentum=0.9),
    "adamw": ops.AdamWStep(lr=LR),
    "lomo": ops.LomoStep(lr=LR),
}


def torch_optimizer(kind: str, param: Tensor) -> torch.optim.Optimizer:
    """torch's own, in one pass over memory; of LOMO, plain descent."""
    if kind == "adamw":
        return torch.optim.AdamW([param], lr=LR, fused=True)
    return torch.optim.SGD([param], lr=LR, momentum=0.9 if kind == "momentum" else 0.0, fused=True)


def keeps_master(kind: str, dtype: torch.dtype) -> bool:
    """Whether there are fp32 masters: for 16-bit weights, except with LOMO."""
    return dtype != torch.float32 and kind != "lomo"


def start(num_elems: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The parameters before the first step."""
    return torch.linspace(-1, 1, num_elems, device=device).to(dtype)


def gradient_of(rank: int, num_elems: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Multiples of 1/64 that differ from rank to rank: sums over a few ranks are exact."""
    index = torch.arange(num_elems, device=device)
    return ((index * (rank + 3) % 97 - 48).float() / 64).to(dtype)


class Way:
    """Parameters, a gradient, and the step.

    Attributes:
        state_bytes: of this rank's optimizer state, master weights included.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        num_elems: int,
        team: Team,
        groups: Any,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        device = device or torch.device("cpu")
        self.param = start(num_elems, dtype, device)
        self.grad = gradient_of(team.rank, num_elems, dtype, device)
        self.group = groups[name if name in groups else "ringcomm"]
        self.state_bytes = 0
        self._num_steps = 0
        self._world_size = team.world_size
        self._kind = kind
        self._has_master = keeps_master(kind, dtype)
        make: Callable[[], Callable[[], None]] = {
            "fused": self._fused,
            "zero1": self._zero1,
            "nccl": self._zero1,
        }.get(name, self._whole)
        self.step = make()

    def _fused(self) -> Callable[[], None]:
        optimizer = _OURS[self._kind]
        state = ops.new_shard_state(self.param, optimizer, self.group, master=self._has_master)
        self.state_bytes = sum(tensor.nbytes for tensor in state.values())

        def step() -> None:
            self._num_steps += 1
            ops.reduce_scatter_update_all_gather_(
                self.param,
                self.grad,
                state,
                optimizer=optimizer,
                step=self._num_steps,
                group=self.group,
            )

        return step

    def _zero1(self) -> Callable[[], None]:
        begin, end = ops.shard_range(
            self.param.numel(), self._world_size, dist.get_rank(self.group)
        )
        shard = self.param[begin:end]
        reduced = torch.empty_like(shard)
        weight = shard.float() if self._has_master else shard
        weight.grad = torch.empty_like(weight) if self._has_master else reduced
        optimizer = torch_optimizer(self._kind, weight)

        def step() -> None:
            reduce_scatter_single(reduced, self.grad, group=self.group)
            if self._has_master:
                assert weight.grad is not None
                weight.grad.copy_(reduced)
            assert weight.grad is not None
            weight.grad.div_(self._world_size)
            optimizer.step()
            if self._has_master:
                shard.copy_(weight)
            all_gather_single(self.param, shard, group=self.group)

        return step

    def _whole(self) -> Callable[[], None]:
        weight = self.param.float() if self._has_master else self.param
        optimizer = torch_optimizer(self._kind, weight)
        averaged = self.grad.clone()
        weight.grad = averaged.float() if self._has_master else averaged

        def step() -> None:
            # In place: from the second step on each rank has the average, which stays what it is.
            dist.all_reduce(averaged, group=self.group)
            averaged.div_(self._world_size)
            assert weight.grad is not None
            if self._has_master:
                weight.grad.copy_(averaged)
            optimizer.step()
            if self._has_master:
                self.param.copy_(weight)

        return step


def count_wrong(ways: dict[str, Way], kind: str, team: Team) -> dict[str, int]:
    """Elements of all ranks that differ from a single process's, after some steps. Collective."""
    param = next(iter(ways.values())).param
    num_elems, dtype, device = param.numel(), param.dtype, param.device
    whole = start(num_elems, dtype, device)
    expected = whole.float() if keeps_master(kind, dtype) else whole
    total = torch.zeros(num_elems, device=device)
    for rank in range(team.world_size):
        total += gradient_of(rank, num_elems, dtype, device).float()
    expected.grad = (total / team.world_size).to(expected.dtype)
    del total
    optimizer = torch_optimizer(kind, expected)
    for _ in range(NUM_CHECKED_STEPS):
        optimizer.step()
    tolerance = TOLERANCES[dtype]
    wrong = {}
    for name, way in ways.items():
        for _ in range(NUM_CHECKED_STEPS):
            way.step()
        is_close = torch.isclose(way.param, expected.to(dtype), rtol=tolerance, atol=tolerance)
        wrong[name] = sum(team.share(int((~is_close).sum())))
    return wrong


def floor_bytes(param: Tensor, state_bytes: int, world_size: int, has_master: bool) -> int:
    """What the ranks together read and write: gradients, parameters, and the states twice.

    Without a master copy the parameters are read too, each once.
    """
    read_once = 0 if has_master else param.nbytes
    return 2 * world_size * param.nbytes + 2 * state_bytes + read_once
