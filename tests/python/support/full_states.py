"""Whole states of models and optimizers for tests, by ringcomm.parallel.get_state_dict()."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn

from ringcomm.parallel import get_state_dict, set_state_dict


def model_of(owner: Any) -> Any:
    """The model of an optimizer of zero.shard() or of WeightShards; what is a model itself."""
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
