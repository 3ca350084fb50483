"""Whole states of models and optimizers for tests, by ringcomm.parallel.get_state_dict()."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as by_torchs

from ringcomm.parallel import get_state_dict, set_state_dict


def model_of(owner: Any) -> Any:
    """The model of an optimizer of zero.shard(); what is a model itself."""
    model = owner if isinstance(owner, nn.Module) else getattr(owner, "_model", owner)
    return model() if isinstance(model, weakref.ref) else model


def full_weights(owner: Any, **options: Any) -> dict[str, Tensor]:
    """Whole weights and buffers. Collective."""
    return get_state_dict(model_of(owner), full=True, **options)[0]


def load_full_weights(owner: Any, values: Any, **options: Any) -> None:
    """Takes them. Collective."""
    set_state_dict(model_of(owner), None, values, **options)


def full_state(optimizer: Any, **options: Any) -> dict[str, Any]:
    """The whole state of an optimizer of zero.shard(). Collective."""
    return get_state_dict(model_of(optimizer), optimizer, full=True, **options)[1]


def load_full_state(optimizer: Any, state: Any, **options: Any) -> None:
    """Takes one. Collective."""
    set_state_dict(model_of(optimizer), optimizer, None, state, **options)


def save_parts(
    owner: Any, optimizer: Any, folder: Path, *, by_torch: bool = False, **options: Any
) -> None:
    """A checkpoint in parts, by torch's functions for states or ringcomm's. Collective."""
    get: Any = by_torchs.get_state_dict if by_torch else get_state_dict
    values, state = get(owner, optimizer, **options)
    dcp.save({"model": values, "optimizer": state}, checkpoint_id=folder)


def load_parts(
    owner: Any,
    optimizer: Any,
    folder: Path,
    *,
    by_torch: bool = False,
    no_dist: bool = False,
    **options: Any,
) -> None:
    """Loads one. Collective."""
    get: Any = by_torchs.get_state_dict if by_torch else get_state_dict
    found = dict(zip(("model", "optimizer"), get(owner, optimizer, **options), strict=True))
    dcp.load(found, checkpoint_id=folder, no_dist=no_dist)
    if by_torch:
        values, state = (found[name] for name in ("model", "optimizer"))
        options |= {"model_state_dict": values, "optim_state_dict": state}
        by_torchs.set_state_dict(owner, optimizer, **options)
    else:
        set_state_dict(owner, optimizer, found["model"], found["optimizer"])
