"""Which object shards or trains a weight: it records this, and the other systems ask."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

# Keyed weakly by parameter, with weak references: the owners hold the parameters.
_shards: Any = WeakIdKeyDictionary()
_trainers: Any = WeakIdKeyDictionary()


def note_shards(params: Iterable[nn.Parameter], shards: Any) -> None:
    """Records the WeightShards of parameters; None when they are closed."""
    for param in params:
        _shards.pop(param, None)
        if shards is not None:
            _shards[param] = weakref.ref(shards)


def find_shards(param: Tensor) -> Any:
    """The WeightShards of a parameter; None for an ordinary parameter."""
    return _alive(_shards.get(param))


def note_trainer(params: Iterable[nn.Parameter], trainer: Any) -> None:
    """Records the optimizer that takes the gradients of parameters; None when it is closed."""
    for param in params:
        _trainers.pop(param, None)
        if trainer is not None:
            _trainers[param] = weakref.ref(trainer)


def find_trainer(param: Tensor) -> Any:
    """The ZeroOptimizer, Lomo, AdaLomo or ParameterServer of a parameter, or None."""
    return _alive(_trainers.get(param))


def _alive(reference: Any) -> Any:
    return None if reference is None else reference()
