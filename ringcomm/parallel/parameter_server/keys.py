"""Keys of a parameter server: a trainable parameter each, which server has it, how it travels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["Key", "Packing", "assign", "keys_of"]


@dataclass(frozen=True)
class Key:
    """One trainable parameter.

    Attributes:
        wire_dtype: what its gradients and values are cast to when they travel.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    wire_dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """On the wire."""
        return math.prod(self.shape) * self.wire_dtype.itemsize


def keys_of(model: nn.Module, wire_dtype: torch.dtype | None) -> list[Key]:
    """One for each parameter that requires grad, in the model's order.

    What is no wider than wire_dtype travels as it is.
    """
    keys = []
    for name, param in model.named_parameters():
        if param.requires_grad:
            is_narrowed = (
                wire_dtype is not None
                and param.is_floating_point()
                and wire_dtype.itemsize < param.dtype.itemsize
            )
            travels_as = wire_dtype if is_narrowed and wire_dtype is not None else param.dtype
            keys.append(Key(name, param.shape, param.dtype, travels_as))
    return keys


def assign(sizes: Sequence[int], num_bins: int) -> list[int]:
    """The bin of each size: the largest first, each to the bin that has least so far.

    Every rank finds the same. The fullest bin has at most 4/3 of the best possible (Graham 1969).
    """
    loads = [0] * num_bins
    bins = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        bins[index] = min(range(num_bins), key=loads.__getitem__)
        loads[bins[index]] += sizes[index]
    return bins


class Packing:
    """Tensors one behind the other in a buffer of bytes, without padding.

    Wide dtypes stand first, so that every one is aligned.
    """

    def __init__(self, shapes: Sequence[torch.Size], dtypes: Sequence[torch.dtype]) -> None:
        self._shapes, self._dtypes = list(shapes), list(dtypes)
        self._begins = [0] * len(self._shapes)
        self.num_bytes = 0
        for index in sorted(range(len(dtypes)), key=lambda index: -dtypes[index].itemsize):
            self._begins[index] = self.num_bytes
            self.num_bytes += math.prod(self._shapes[index]) * self._dtypes[index].itemsize

    @classmethod
    def of_keys(cls, keys: Iterable[Key]) -> Packing:
        """How gradients and values of the keys travel."""
        keys = list(keys)
        return cls([key.shape for key in keys], [key.wire_dtype for key in keys])

    def new_buffer(self) -> Tensor:
        """For one set of tensors: uint8 [num_bytes] on the CPU."""
        return torch.empty(self.num_bytes, dtype=torch.uint8)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The tensors in a buffer, in the order of their shapes; they share its memory."""
        found = []
        for begin, shape, dtype in zip(self._begins, self._shapes, self._dtypes, strict=True):
            num_bytes = math.prod(shape) * dtype.itemsize
            found.append(buffer[begin : begin + num_bytes].view(dtype).view(shape))
        return found

    def pack(self, tensors: Sequence[Tensor | None], buffer: Tensor | None = None) -> Tensor:
        """Copies tensors of any device into a buffer, cast; zeros for None."""
        buffer = self.new_buffer() if buffer is None else buffer
        with torch.no_grad():
            for view, tensor in zip(self.views(buffer), tensors, strict=True):
                if tensor is None:
                    view.zero_()
                else:
                    view.copy_(tensor)
        return buffer
