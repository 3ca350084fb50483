"""What other libraries save of a sharded model: the full weights, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

import torch.distributed as dist
from torch import nn


def refuse_copy(*_: Any) -> NoReturn:
    """Raises RuntimeError: a copy would have a part of the weights, and no hooks."""
    raise RuntimeError(
        "sharded weights cannot be copied or pickled: copy the model before it is sharded, or load"
        " ringcomm.parallel.get_state_dict(model, full=True) into another one"
    )


def save_full(model: nn.Module, group: dist.ProcessGroup | None = None) -> Callable[[], None]:
    """Makes save_pretrained() of a model, or of the outermost modules that have it, write all.

    It becomes collective over the group, by default over all ranks, and the first rank writes the
    full weights; with state_dict= it stays as it was. Modules that are in such a model already are
    left alone. Returns a function that undoes it.
    """
    changed: list[nn.Module] = []
    waiting = [model]
    for module in waiting:
        save = getattr(type(module), "save_pretrained", None)
        if save is None:
            waiting += module.children()
        elif "save_pretrained" not in vars(module):
            bound: Any = module
            bound.save_pretrained = partial(_save_full, module, bound.save_pretrained, group)
            changed.append(module)

    def undo() -> None:
        for module in changed:
            vars(module).pop("save_pretrained", None)

    return undo


def _save_full(
    module: Any,
    save: Callable[..., Any],
    group: dist.ProcessGroup | None,
    *args: Any,
    state_dict: Any = None,
    **options: Any,
) -> Any:
    if state_dict is not None:
        return save(*args, state_dict=state_dict, **options)
    # By name: it is slow to import, and imports all systems.
    get_state_dict = import_module("ringcomm.parallel").get_state_dict
    full, _ = get_state_dict(module, full=True, rank0_only=True, group=group)
    try:
        if dist.get_rank(group) == 0:
            module.state_dict = lambda *_, **__: full
            return save(*args, **options)
    finally:
        vars(module).pop("state_dict", None)
        dist.barrier(group)
    return None
