"""A model as a row of named blocks, and the modules that a rank makes of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["Blocks", "StageModule", "add_blocks", "named_blocks"]

Blocks = Mapping[str, nn.Module] | Sequence[nn.Module] | nn.Sequential | nn.ModuleList


def named_blocks(blocks: Blocks) -> dict[str, nn.Module]:
    """The blocks by the names that they have in state dicts.

    Raises:
        TypeError: this is no row of modules.
        ValueError: it is empty, or a name stands within another one.
    """
    if isinstance(blocks, nn.Sequential | nn.ModuleList):
        found: dict[str, Any] = dict(blocks._modules)
    elif isinstance(blocks, Mapping):
        found = dict(blocks)
    elif isinstance(blocks, Sequence):
        found = {str(idx): block for idx, block in enumerate(blocks)}
    else:
        raise TypeError(
            "blocks are an nn.Sequential, a list of modules, or a dict of them by name; got"
            f" {type(blocks).__name__}"
        )
    if not found:
        raise ValueError("there are no blocks")
    for name, block in found.items():
        if not isinstance(block, nn.Module):
            raise TypeError(f"block {name} is a {type(block).__name__}, no nn.Module")
        for other in found:
            if other.startswith(f"{name}."):
                raise ValueError(
                    f"block {other} would be a part of block {name}: name it otherwise"
                )
    return found


def add_blocks(root: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    """Adds blocks to a module under their names, dots and all."""
    for name, block in blocks.items():
        parent = root
        *parts, last = name.split(".")
        for part in parts:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(last, block)


class StageModule(nn.Module):
    """Blocks in turn; a tuple that one returns is the arguments of the next.

    What it returns becomes a message.
    """

    def __init__(self, blocks: Sequence[nn.Module], recompute: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self._recompute = recompute

    def forward(self, *inputs: Any) -> Any:
        """The last block's result; with `recompute` only the blocks' inputs are kept."""
        value: Any = inputs
        for block in self.blocks:
            args = value if isinstance(value, tuple) else (value,)
            if self._recompute and torch.is_grad_enabled():
                value = checkpoint(block, *args, use_reentrant=False)
            else:
                value = block(*args)
        return tuple(map(_as_message, value)) if isinstance(value, tuple) else _as_message(value)


def _as_message(value: Any) -> Any:
    """The same memory where that is contiguous, and not a view: torch detaches it in place."""
    if not isinstance(value, Tensor):
        return value
    value = value.contiguous()
    return torch.ops.aten._unsafe_view(value, value.shape) if value._is_view() else value
