"""States of weights before their first step, which torch's optimizers make in the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor

from ringcomm.parallel.offload.optimizers import Offloaded
from ringcomm.parallel.optimizer_classes import new_state
from ringcomm.parallel.zero import ZeroOptimizer

State = dict[str, Any]

# float32 values of 16-bit weights; optional for optimizers without masters.
MASTER = "master"


class Unstepped:
    """The weights whose state stands for none: their next step begins without it.

    A state dict has a value for every key, so that a checkpoint can be loaded into it. But no
    value is the same as none for momentum with dampening, NAdam, ASGD and Rprop.
    """

    def __init__(self) -> None:
        self.params: set[Any] = set()

    def make_states(self, optimizer: Any) -> None:
        """Makes the missing states."""
        is_zero = isinstance(optimizer, ZeroOptimizer)
        for group in optimizer.param_groups:
            for param in group["params"]:
                if is_zero and optimizer._inner_by_param[param].is_offloaded:
                    continue
                known = optimizer._state_of(param) if is_zero else optimizer.state.get(param, {})
                if not param.requires_grad or known.keys() - {MASTER}:
                    continue
                if is_zero and not optimizer.updates(param):
                    continue
                own = _value_of(optimizer, param)
                new = new_state(_inner_of(optimizer, param), group, param, own)
                if new and is_zero:
                    optimizer._set_state(param, new)
                elif new:
                    optimizer.state[param] = new
                self.params.add(param)
        if is_zero:
            optimizer.share_keys()

    def loaded(self, optimizer: Any, states: Mapping[Any, State]) -> None:
        """To be called with states that replace those of the optimizer."""
        self.params.clear()
        for param, state in states.items():
            inner = _inner_of(optimizer, param)
            is_torchs = type(inner).__module__.startswith("torch.optim")
            counts_from_0 = is_torchs and not isinstance(inner, torch.optim.Adagrad)
            if counts_from_0 and float(state.get("step", 1)) == 0:
                self.params.add(param)


def _value_of(optimizer: Any, param: Any) -> Any:
    """A copy of what this rank updates of a weight; zeros of a whole one that others have, too."""
    if not isinstance(optimizer, ZeroOptimizer):
        return param.detach().clone()
    if optimizer.owner_of(param) is not None and isinstance(param, DTensor):
        return torch.zeros(param.shape, dtype=param.dtype, device=param.device)
    part = optimizer._part_of(param).detach()
    return part.to(torch.promote_types(part.dtype, torch.float32), copy=True)


def _inner_of(optimizer: Any, param: Any) -> Any:
    """The optimizer of a class that updates a weight, in that of zero.shard() or Offloaded."""
    if isinstance(optimizer, ZeroOptimizer):
        return optimizer.inner_of(param)
    return getattr(optimizer, "inner", optimizer)


_unstepped: WeakKeyDictionary[Any, Unstepped] = WeakKeyDictionary()


def make_states(optimizer: Any) -> Unstepped:
    """Makes the missing states of an optimizer, until its next step."""
    if not isinstance(optimizer, ZeroOptimizer):
        optimizer = getattr(optimizer, "optimizer", optimizer)  # what Accelerate has wrapped
    if optimizer not in _unstepped:
        _unstepped[optimizer] = Unstepped()
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer.register_step_pre_hook(_drop_states)
    if hasattr(optimizer, "make_states"):  # it applies gradients in the backward pass
        optimizer.make_states()
    elif not isinstance(optimizer, Offloaded):
        _unstepped[optimizer].make_states(optimizer)
    return _unstepped[optimizer]


def _drop_states(optimizer: Any, *_: Any) -> None:
    params = _unstepped[optimizer].params if optimizer in _unstepped else set()
    for param in params:
        if isinstance(optimizer, ZeroOptimizer):
            optimizer._set_state(param, {})
        elif isinstance(optimizer, Offloaded):
            optimizer.set_state_of(param, {})
        else:
            optimizer.state.pop(param, None)
    params.clear()


def is_elsewhere(optimizer: Any) -> bool:
    """Whether states are in another tier than device memory."""
    return isinstance(optimizer, Offloaded) or getattr(optimizer, "has_offloaded", False)
