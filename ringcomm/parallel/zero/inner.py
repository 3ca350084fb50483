"""The optimizer that updates shards: torch's, or one with its state elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringcomm.parallel import offload
from ringcomm.parallel.offload.operands import Operands

OFFLOADED = (offload.AdamW, offload.SGD)
KINDS = (torch.optim.AdamW, torch.optim.SGD, *OFFLOADED)


def is_offloaded(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its state is neither in `state` nor on the device."""
    return isinstance(optimizer, OFFLOADED)


def made_over(
    optimizer: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    operands: Operands | None = None,
) -> Any:
    """An optimizer of the same kind over other parameters; the groups hold all hyper-parameters.

    With state elsewhere it takes weights and gradients from `operands`, by default from `grad`.
    """
    if isinstance(optimizer, OFFLOADED):
        return optimizer.over(groups, operands=operands)
    return type(optimizer)(groups)  # type: ignore[call-arg]


def state_of(optimizer: torch.optim.Optimizer, param: Tensor) -> dict[str, Any]:
    """A parameter's state; {} before the first step."""
    if isinstance(optimizer, OFFLOADED):
        return optimizer.state_of(param)
    return dict(optimizer.state.get(param, {}))


def set_state_of(optimizer: torch.optim.Optimizer, param: Tensor, state: dict[str, Any]) -> None:
    """Replaces it."""
    if isinstance(optimizer, OFFLOADED):
        optimizer.set_state_of(param, state)
    elif state:
        optimizer.state[param] = state
    else:
        optimizer.state.pop(param, None)
