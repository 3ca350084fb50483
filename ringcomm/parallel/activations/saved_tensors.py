"""Saved-tensor hooks that keep a tensor otherwise: once, and under torch's own rules."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

Kept = TypeVar("Kept")


class Look(NamedTuple):
    """How a dense tensor looked, in any order of its dimensions."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def over(self, flat: Tensor) -> Tensor:
        """A view of one dimension with that look."""
        return flat.as_strided(self.shape, self.stride)


def flatten(tensor: Tensor) -> tuple[Tensor, Look]:
    """All elements in the order of memory, as a view where the tensor is dense, and its look."""
    tensor = tensor.resolve_conj().resolve_neg()
    # Torch keeps the strides of what is dense, in any order of dimensions.
    if torch.empty_like(tensor, device="meta").stride() != tensor.stride():
        tensor = tensor.contiguous()
    look = Look(tensor.shape, tensor.stride(), tensor.dtype)
    return tensor.as_strided([tensor.numel()], [1]), look


class SavedTensors(ABC, Generic[Kept]):
    """Keeps the tensors that it takes as keep() says; others stay as they are.

    What is saved twice is kept once. With hooks torch does not look whether a tensor was written
    since it was saved: here it is an error as without them.
    """

    def __init__(self) -> None:
        # Weakly, by what makes it the same tensor. A storage's place is not used again as long as
        # there is a weak reference to it.
        self._known: dict[Any, tuple[StorageWeakRef, weakref.ref[Any]]] = {}

    @abstractmethod
    def takes(self, tensor: Tensor) -> bool:
        """Whether keep() is for this one; see is_plain()."""

    @abstractmethod
    def keep(self, tensor: Tensor) -> Kept:
        """Keeps the elements of a tensor, which is detached, and not the tensor."""

    @abstractmethod
    def restore(self, kept: Kept) -> Tensor:
        """The tensor with the bits that were kept; a new one each time."""

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """The context in which tensors are kept so."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> tuple[Any, _Written]:
        if not self.takes(tensor):
            # An output that its own node holds would never be freed.
            whole = tensor if tensor.is_leaf else tensor.detach()
            return whole, _Written(whole)
        place = tensor.untyped_storage()._cdata, tensor.storage_offset()
        key = *place, tensor.shape, tensor.stride(), tensor.dtype, tensor._version
        entry = self._known.get(key)
        kept: Any = None if entry is None else entry[1]()
        if kept is None:
            kept = self.keep(tensor.detach())
            entry = StorageWeakRef(tensor.untyped_storage()), weakref.ref(kept)
            self._known[key] = entry
            weakref.finalize(kept, self._forget, key, entry).atexit = False
        return kept, _Written(_without_memory(tensor))

    def _unpack(self, packed: tuple[Any, _Written]) -> Tensor:
        kept, written = packed
        if isinstance(kept, Tensor):
            written.check(kept)
            return kept
        restored = self.restore(kept)
        written.check(restored)
        return restored

    def _forget(self, key: Any, entry: Any) -> None:
        if self._known.get(key) is entry:
            del self._known[key]


class _Written:
    """Tells whether a tensor has been written since."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, tensor._version

    def check(self, looks_like: Tensor) -> None:
        """Raises torch's error for a tensor that is needed and has been written."""
        version = self._tensor._version
        if version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an"
                f" inplace operation: [{looks_like.type()} {list(looks_like.shape)}] is at version"
                f" {version}; expected version {self._version} instead"
            )


def _without_memory(tensor: Tensor) -> Tensor:
    """An empty tensor that counts the same writes: `.data` changes all but the counter."""
    alias = tensor.detach()
    alias.data = tensor.new_empty(0)
    return alias


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has elements of its own in memory that end with the graph.

    Not so parameters and their views, which live on, subclasses, sparse or quantized tensors.
    """
    base = tensor._base if tensor._base is not None else tensor
    return (
        type(tensor) is Tensor
        and not isinstance(base, nn.Parameter)
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and tensor.numel() > 0
    )
