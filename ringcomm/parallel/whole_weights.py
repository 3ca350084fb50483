"""The weights of a unit of fully_shard that compute: whole, and parameters of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ringcomm.parallel.unit_hooks import untraced

__all__ = ["watch_whole_weights"]


def watch_whole_weights(
    unit: nn.Module, seen: Callable[[nn.Module, str, nn.Parameter], None]
) -> Callable[[], Any]:
    """Calls seen(module, name, weight) once for each of a unit's whole weights that are trained.

    Autograd brings gradients to them, which fully_shard reduces into the sharded parameters'. They
    are there when the unit runs for the first time.

    Returns:
        What ends it.
    """
    found: set[nn.Parameter] = set()

    @untraced
    def before_forward(*_: Any) -> None:
        for module in unit.modules():
            for name, param in module.named_parameters(recurse=False):
                is_whole = not hasattr(param, "device_mesh")
                if is_whole and param.requires_grad and param not in found:
                    found.add(param)
                    seen(module, name, param)

    return unit.register_forward_pre_hook(before_forward).remove
