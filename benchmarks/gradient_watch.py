"""Measures the memory of live gradients."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from ringcomm.parallel.gradient_placeholder import GradientPlaceholder


def live_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of memory that tensors keep alive here; storage that several share counts once."""
    storages = {}
    for tensor in tensors:
        # Not to_local(), which a placeholder refuses.
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if local is not None and not isinstance(local, GradientPlaceholder):
            storage = local.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class GradientWatch:
    """Tracks the peak bytes of gradients that are kept for parameters.

    It looks when a gradient arrives, before it is accumulated. Hooks of the weights would change
    what is measured: Lomo would materialize gradients for them.

    Attributes:
        optimizer: one that keeps gradients elsewhere than in `.grad`: Lomo and AdaLomo.
    """

    def __init__(self, model: nn.Module) -> None:
        self._params = list(model.parameters())
        self.peak_bytes = 0
        self.optimizer: Any = None
        # References are kept: autograd would otherwise make new nodes, without hooks.
        self._nodes = {p: get_gradient_edge(p).node for p in self._params if p.requires_grad}
        self._hooks = [
            node.register_prehook(partial(self._arrives, param))
            for param, node in self._nodes.items()
        ]

    def _arrives(self, param: nn.Parameter, grads: Any) -> None:
        has_memory = param.grad is not None and not isinstance(param.grad, GradientPlaceholder)
        self.look(() if has_memory else grads)

    def look(self, arriving: Iterable[Tensor | None] = ()) -> None:
        """Records the current bytes, with those of gradients that arrive."""
        held_bytes = getattr(self.optimizer, "held_bytes", 0)
        now = live_bytes([*(p.grad for p in self._params), *arriving]) + held_bytes
        self.peak_bytes = max(self.peak_bytes, now)

    def stop(self) -> int:
        """Returns the peak, and removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        return self.peak_bytes
