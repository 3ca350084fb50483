"""Where an offloaded optimizer finds weights and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Operands:
    """The parameter itself and its `grad`; subclasses have them elsewhere."""

    def shape(self, param: Tensor) -> torch.Size:
        """Of this rank's part of a parameter."""
        return local_of(param).shape

    def has_grad(self, param: Tensor) -> bool:
        """Whether a parameter is to be updated. Raises ValueError for a sparse gradient."""
        if param.grad is not None and param.grad.is_sparse:
            raise ValueError("gradients are dense: an embedding with sparse=False")
        return param.grad is not None

    def start(self, param: Tensor) -> None:
        """Called ahead of get()."""

    def get(self, param: Tensor) -> tuple[Tensor, Tensor]:
        """Its weights, which are written in place, and their gradient; one dimension each."""
        grad = param if param.grad is None else param.grad
        return local_of(param.detach()).view(-1), local_of(grad.detach()).reshape(-1)

    def done(self, param: Tensor) -> None:
        """Called after the last get() of a step."""


def local_of(tensor: Any) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
