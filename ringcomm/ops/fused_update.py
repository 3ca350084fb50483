"""Optimizer steps on flat buffers, of one rank or fused with their collectives.

reduce_scatter_update_all_gather_ is ZeRO stage 1 (Rajbhandari et al. 2020) in one pass: gradients
are reduced chunk by chunk, the rank that owns a chunk updates its parameters while the sum is in
cache, and the new parameters are gathered. docs/design/collectives.md has the steps.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm.backend import resolve_group

_ops: Any = torch.ops.ringcomm


# ---- the optimizers, whose operators check the numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGDStep:
    """torch.optim.SGD: W <- W - lr * d, with d = g + weight_decay * W, or its running sum.

    State: "momentum_buffer", where momentum is not 0.
    """

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    operator_name: ClassVar[str] = "sgd"

    @property
    def numbers(self) -> list[float]:
        """As the operators take them."""
        return [self.lr, self.weight_decay, self.momentum, self.dampening]

    @property
    def state_names(self) -> tuple[str, ...]:
        """The keys of the state, torch.optim's own."""
        return ("momentum_buffer",) if self.momentum != 0 else ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamWStep:
    """torch.optim.AdamW (Loshchilov and Hutter 2019): decoupled decay, biases corrected by step.

    State: "exp_avg" and "exp_avg_sq".
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    operator_name: ClassVar[str] = "adamw"
    nesterov: ClassVar[bool] = False

    @property
    def numbers(self) -> list[float]:
        """As the operators take them."""
        return [self.lr, self.weight_decay, *self.betas, self.eps]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LomoStep:
    """LOMO (Lv et al. 2023): W <- (1 - lr * weight_decay) * W - lr * clamp(g, +-clip_value).

    No state. Clipping by norm is a factor, and goes into grad_scale.
    """

    lr: float
    weight_decay: float = 0.0
    clip_value: float | None = None
    state_names: ClassVar[tuple[str, ...]] = ()
    operator_name: ClassVar[str] = "lomo"
    nesterov: ClassVar[bool] = False

    @property
    def numbers(self) -> list[float]:
        """As the operators take them; ValueError unless clip_value is positive or None."""
        if self.clip_value is not None and not self.clip_value > 0:
            raise ValueError(
                f"ringcomm: clip_value must be positive or None, got {self.clip_value}"
            )
        return [self.lr, self.weight_decay, self.clip_value or 0.0]


def shard_range(num_elems: int, world_size: int, rank: int) -> tuple[int, int]:
    """The elements [begin, end) of a flat buffer that `rank` owns.

    Shards are contiguous, in rank order, and differ by one element at most, the longer ones first.
    Raises ValueError if `rank` is not in [0, world_size), or num_elems is negative.
    """
    if not 0 <= rank < world_size or num_elems < 0:
        raise ValueError(f"rank {rank} of {world_size} has no shard of {num_elems} elements")
    base, num_longer = divmod(num_elems, world_size)
    begin = rank * base + min(rank, num_longer)
    return begin, begin + base + (rank < num_longer)


def reduce_scatter_update_all_gather_(
    param: Tensor,
    grad: Tensor,
    state: Mapping[str, Tensor],
    *,
    optimizer: SGDStep | AdamWStep | LomoStep,
    step: int,
    group: dist.ProcessGroup | None = None,
    average: bool = True,
    grad_scale: float = 1.0,
) -> Tensor:
    """Reduces the gradient over the ranks and updates the parameters with it, in place.

    The result has the same bits on all ranks, and as reduce_scatter, update and all_gather one
    after the other. Each step is within 2 ulp of torch.optim. Infinities and NaN are written too.

    Args:
        param: any shape, contiguous, float32, float16 or bfloat16; the same on all ranks. It may
            require grad, as in the step of an optimizer.
        grad: this rank's gradient, of the same shape; one of the three dtypes, the same on all
            ranks. 16-bit gradients are summed in fp32 and rounded once.
        state: this rank's shard of the optimizer's state: for each of `optimizer.state_names` a
            one-dimensional float32 tensor with the elements of `shard_range`, zeros before the
            first step; updated in place. With "master", a float32 copy of this rank's shard of
            16-bit parameters, updates are applied to it, and `param` is its rounded copy.
        optimizer: the update and its hyper-parameters; equal on all ranks.
        step: the number of this update, starting at 1; equal on all ranks.
        group: a group of backend "ringcomm"; None for the default group.
        average: divide the sum by the number of ranks.
        grad_scale: a factor of the reduced gradient, such as the inverse of a loss scale or a
            factor that clips the norm; equal on all ranks.

    Returns:
        `param`.

    Raises:
        ValueError: a tensor has the wrong shape, strides or device, shares memory with another, is
            missing or unexpected; a hyper-parameter is out of range; the group's backend is not
            ringcomm. Nothing has been sent.
        TypeError: a tensor has an unsupported dtype.
        MismatchError: arguments that must be equal differ between ranks.
        RingcommError: a rank failed or called something else. `param` and the state may hold any
            values; `grad` is unchanged.

    Collective; blocks until the result is available.
    """
    states = _states_of(optimizer, state)
    name = resolve_group(group).group_name
    with torch.no_grad():
        _ops.reduce_scatter_update_all_gather_(
            *(param, grad, *states, name),
            optimizer=optimizer.operator_name,
            numbers=optimizer.numbers,
            nesterov=optimizer.nesterov,
            step=step,
            average=average,
            grad_scale=grad_scale,
        )
    return param


def _states_of(
    optimizer: SGDStep | AdamWStep | LomoStep, state: Mapping[str, Tensor]
) -> tuple[list[Tensor], Tensor | None]:
    """The states in the operators' order, and the master weights."""
    if set(state) - {"master"} != set(optimizer.state_names):
        raise ValueError(
            f"the state of {type(optimizer).__name__} must have {list(optimizer.state_names)} and"
            f" may have 'master', got {sorted(state)}"
        )
    if isinstance(optimizer, LomoStep) and "master" in state:
        raise ValueError("LomoStep has no state and no 'master'")
    return [state[name] for name in optimizer.state_names], state.get("master")


def optimizer_update_(
    param: Tensor,
    grad: Tensor,
    state: Mapping[str, Tensor],
    *,
    optimizer: SGDStep | AdamWStep,
    step: int,
    grad_scale: float = 1.0,
) -> Tensor:
    """Updates CPU parameters with their gradient, in place, with all of torch's threads.

    Arguments, result, errors and arithmetic are those of `reduce_scatter_update_all_gather_`, with
    a state for all elements. The result has the same bits for any number of threads and any
    partition of the parameters. A wrong argument raises before anything is written.
    """
    states = _states_of(optimizer, state)
    with torch.no_grad():
        _ops.optimizer_update_(
            *(param, grad, *states),
            optimizer=optimizer.operator_name,
            numbers=optimizer.numbers,
            nesterov=optimizer.nesterov,
            step=step,
            grad_scale=grad_scale,
        )
    return param


for _name in ("reduce_scatter_update_all_gather_", "optimizer_update_"):
    torch.library.register_fake(f"ringcomm::{_name}", lambda *_, **__: None)


# ---- torch's optimizers

Rule = AdamWStep | SGDStep


def rule_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Rule | None:
    """The update rule of a parameter group of torch's AdamW or SGD; None if it is not supported."""
    if type(optimizer) not in (torch.optim.AdamW, torch.optim.SGD):
        return None
    if group["maximize"] or group.get("amsgrad") or isinstance(group["lr"], Tensor):
        return None
    if isinstance(optimizer, torch.optim.AdamW):
        numbers = {key: group[key] for key in ("lr", "eps", "weight_decay")}
        # betas are a list if torch.distributed.checkpoint has loaded the group.
        return AdamWStep(**numbers, betas=tuple(group["betas"]))
    keys = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
    return SGDStep(**{key: group[key] for key in keys})
