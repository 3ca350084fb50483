"""Measures the memory of live gradients, and finds what a rank of zero.shard() keeps."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from ringcomm.parallel import zero
from ringcomm.parallel.flat_collectives import local_of
from ringcomm.parallel.gradient_placeholder import GradientPlaceholder
from ringcomm.parallel.zero.stage1_2 import FlatZero
from ringcomm.torch_names import tree_leaves


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


def gradients_of(optimizer: Any) -> list[Tensor]:
    """This rank's gradients in memory now, buffers and shards, of a ZeroOptimizer."""
    if isinstance(optimizer, zero.ZeroInfinity):
        optimizer._shard_store.settle()
        return [*optimizer._shard_store.small_grads.values()]
    if isinstance(optimizer, FlatZero):
        tensors = (tensor for b in optimizer._buckets for tensor in (b.grads, b.shard_grad))
        return [tensor for tensor in tensors if tensor is not None]
    return [grad for _, grad in optimizer._shards()]


def states_of(optimizer: Any) -> list[Tensor]:
    """This rank's states in memory, with float32 masters of 16-bit weights, of a ZeroOptimizer."""
    inner, saved = optimizer.inner.by_param, optimizer.saved_states
    states = [saved.of(p) for p in optimizer.all_params() if not inner[p].is_offloaded]
    values = [local_of(leaf) for leaf in tree_leaves(states) if isinstance(leaf, Tensor)]
    return [value for value in values if value.dim()]


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
