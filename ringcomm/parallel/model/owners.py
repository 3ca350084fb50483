"""Which object shards or trains a weight: it records this, and the other systems ask."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary


class _Owners:
    """Keyed weakly by parameter, with weak references: the owners hold the parameters."""

    def __init__(self) -> None:
        self._owner_of: Any = WeakIdKeyDictionary()

    def note(self, params: Iterable[nn.Parameter], owner: Any) -> None:
        """Records the owner of parameters; None when it gives them up."""
        for param in params:
            self._owner_of.pop(param, None)
            if owner is not None:
                self._owner_of[param] = weakref.ref(owner)

    def find(self, param: Tensor) -> Any:
        """The owner of a parameter, or None."""
        reference = self._owner_of.get(param)
        return None if reference is None else reference()


_shards, _trainers = _Owners(), _Owners()
# WeightShards.
note_shards, find_shards = _shards.note, _shards.find
# Optimizers that take gradients: ZeroOptimizer, Lomo, AdaLomo; ParameterServer.
note_trainer, find_trainer = _trainers.note, _trainers.find
