"""What offloaded optimizers work on, and how their states are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ringcomm.parallel.flat_collectives import local_of


class Operands:
    """Access to a parameter and its gradient; subclasses store them elsewhere."""

    def shape(self, param: Tensor) -> torch.Size:
        """The shape of this rank's part of a parameter."""
        return local_of(param).shape

    def has_grad(self, param: Tensor) -> bool:
        """Whether a parameter has a gradient. Raises ValueError for a sparse gradient."""
        if param.grad is not None and param.grad.is_sparse:
            raise ValueError("gradients must be dense: make the embedding with sparse=False")
        return param.grad is not None

    def start(self, param: Tensor) -> None:
        """Called ahead of get()."""

    def get(self, param: Tensor) -> tuple[Tensor, Tensor | None]:
        """The weights, to be written in place, and their gradient if there is one."""
        grad = None if param.grad is None else local_of(param.grad.detach())
        return local_of(param.detach()), grad

    def done(self, param: Tensor) -> None:
        """Called after the last get() of a step."""


class StatesView(Mapping[Any, dict[str, Any]]):
    """Copies of offloaded states by parameter, made on lookup; {} before the first update."""

    def __init__(self, stepped: Iterable[Any], state_of: Callable[[Any], dict[str, Any]]) -> None:
        self._stepped, self._state_of = list(stepped), state_of

    def __getitem__(self, param: Any) -> dict[str, Any]:
        """A copy: use load_state_dict() to replace it."""
        return self._state_of(param)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._stepped)

    def __len__(self) -> int:
        return len(self._stepped)


def numbered_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The parameter groups as in torch's state_dict()."""
    number, groups = count(), optimizer.param_groups
    return [{**group, "params": [next(number) for _ in group["params"]]} for group in groups]
