"""What DistributedDataParallel is not to look at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["ignored_in_ddp", "set_ignored_in_ddp"]


def ignored_in_ddp(model: nn.Module) -> list[str]:
    """The names of parameters and buffers that it leaves alone."""
    return list(getattr(model, "_ddp_params_and_buffers_to_ignore", []))


def set_ignored_in_ddp(model: nn.Module, names: Iterable[str]) -> None:
    """Sets them; to be called before the model is wrapped."""
    ddp: Any = DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(model, list(names))
