"""Values for modules that were made on the meta device: by their own reset_parameters()."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import nn

__all__ = ["check_can_materialize", "materialize"]


def check_can_materialize(model: nn.Module) -> None:
    """Whether all modules with tensors on the meta device can give them values.

    Raises:
        ValueError: one has no reset_parameters(), or has parameters with values as well.
    """
    for name, module in model.named_modules():
        tensors = list(chain(module.parameters(recurse=False), module.buffers(recurse=False)))
        if not any(tensor.is_meta for tensor in tensors):
            continue
        kind = f"{name or 'the model'}, a {type(module).__name__},"
        if not hasattr(module, "reset_parameters"):
            raise ValueError(
                f"{kind} is on the meta device and has no reset_parameters() to give it values"
            )
        if not all(tensor.is_meta for tensor in tensors):
            raise ValueError(f"{kind} is in parts on the meta device")


def materialize(model: nn.Module, params: Sequence[nn.Parameter], device: torch.device) -> None:
    """Gives those of these parameters that are on the meta device memory and values.

    The parameters stay the objects that they are. Modules come in the order of model.modules();
    each reset_parameters() sees all parameters of its module. Modules of buffers alone get values
    as well.
    """
    wanted = set(params)
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        buffers = module.buffers(recurse=False)
        has_wanted = any(param.is_meta and param in wanted for param in own.values())
        if not has_wanted and (own or not any(buffer.is_meta for buffer in buffers)):
            continue
        for param in own.values():
            if param.is_meta:
                value = torch.empty_like(param, device=device)
                new = nn.Parameter(value, requires_grad=param.requires_grad)
                torch.utils.swap_tensors(param, new)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device=device)
        module.reset_parameters()  # type: ignore[operator]
