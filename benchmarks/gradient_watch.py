"""Measures the memory of live gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ringcomm.parallel.gradient_placeholder import GradientPlaceholder


def live_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of memory that tensors keep alive here; storage that several share counts once."""
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local is not None and not isinstance(local, GradientPlaceholder):
            storage = local.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class GradientWatch:
    """Tracks the peak bytes of gradients that are kept for parameters.

    Made before the optimizer, whose hooks come after these.

    Attributes:
        optimizer: one that keeps gradients elsewhere than in `.grad`: Lomo and AdaLomo.
    """

    def __init__(self, model: nn.Module) -> None:
        self._params = list(model.parameters())
        self.peak_bytes = 0
        self.optimizer: Any = None
        self._hooks = [
            param.register_post_accumulate_grad_hook(self.look)
            for param in self._params
            if param.requires_grad
        ]

    def look(self, _: Tensor | None = None) -> None:
        """Records the current bytes."""
        held_bytes = getattr(self.optimizer, "held_bytes", 0)
        now = live_bytes(p.grad for p in self._params) + held_bytes
        self.peak_bytes = max(self.peak_bytes, now)

    def stop(self) -> int:
        """Returns the peak, and removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        return self.peak_bytes
