"""torch's optimizers in the terms of ringcomm.ops, which update what torch's cannot reach."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringcomm import ops

Rule = ops.AdamW | ops.SGD


def rule_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Rule | None:
    """The rule of a parameter group of torch's AdamW or SGD; None where ringcomm.ops has it not."""
    if group["maximize"] or group.get("amsgrad") or isinstance(group["lr"], Tensor):
        return None
    if isinstance(optimizer, torch.optim.AdamW):
        numbers = {key: group[key] for key in ("lr", "eps", "weight_decay")}
        # betas are a list where torch.distributed.checkpoint has loaded the group.
        return ops.AdamW(**numbers, betas=tuple(group["betas"]))
    keys = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
    return ops.SGD(**{key: group[key] for key in keys})
