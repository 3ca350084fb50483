"""Gradients in memory that was set aside for them: the other half of Md (ZeRO-R)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


class GradientArena:
    """Buffers whose views become `param.grad`.

    Attributes:
        buffers: one of one dimension for each dtype and device, in the order of the parameters.
    """

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        trained = [param for param in dict.fromkeys(params) if param.requires_grad]
        for param in trained:
            if not (param.is_leaf and type(param.data) is Tensor):
                raise TypeError(
                    f"gradients of plain parameters have room in an arena, got a {type(param.data)}"
                    " or what is computed from others; give what is sharded to its own system"
                )
        kinds: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
        for param in trained:
            kinds.setdefault((param.device, param.dtype), []).append(param)
        self.buffers: list[Tensor] = []
        self._handles = []
        for (device, dtype), alike in kinds.items():
            buffer = torch.zeros(sum(p.numel() for p in alike), dtype=dtype, device=device)
            self.buffers.append(buffer)
            sizes = [param.numel() for param in alike]
            for param, place in zip(alike, buffer.split(sizes), strict=True):
                move = _mover(_like(param, place))
                move(param)
                self._handles.append(param.register_post_accumulate_grad_hook(move))

    @property
    def num_bytes(self) -> int:
        """Of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def remove(self) -> None:
        """Lets gradients come where autograd makes them; those that are there stay."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _like(param: Tensor, place: Tensor) -> Tensor:
    """A view in a parameter's shape, and with its strides where it is dense."""
    if torch.empty_like(param, device="meta").stride() == param.stride():
        return place.as_strided(param.shape, param.stride())
    return place.view(param.shape)


def _mover(view: Tensor) -> Callable[[Tensor], None]:
    def move(param: Tensor) -> None:
        grad = param.grad
        if grad is None or grad is view or grad.layout != torch.strided:
            return
        # A graph of second order goes through a gradient that requires one.
        if grad.dtype != view.dtype or grad.requires_grad:
            return
        if grad.data_ptr() != view.data_ptr() or view.numel() == 0:
            view.copy_(grad)
        param.grad = view

    return move


def gradient_arena(params: Iterable[nn.Parameter]) -> GradientArena:
    """Has the gradients of some parameters stand one behind the other, for good.

        activations.gradient_arena(model.parameters())

    A gradient that autograd has made goes to its place at once, and `param.grad` is a view of it;
    sums over micro-batches are made there. After `zero_grad()` it is None until the next one comes
    and takes the place again, so that optimizers leave out what has none. Hooks go with the
    parameters.

    Args:
        params: those that require no gradient are left out; gradients that are there move.

    Returns:
        The buffers.

    Raises:
        TypeError: a parameter is a DTensor or another subclass, or no leaf; nothing has changed.

    Not collective. Sparse gradients, those of create_graph=True and those of another dtype stay
    where they are. Not with what places gradients itself: DistributedDataParallel with
    gradient_as_bucket_view, zero.shard().
    """
    return GradientArena(params)
