"""Saved-tensor hooks that keep a tensor otherwise: once, and under torch's own rules."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import Self


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


class SavedTensors(ABC):
    """A context that keeps the tensors that it takes as _keep() says; others stay as they are.

    It may be entered again, also in itself. What is saved twice is kept once. With hooks torch does
    not look whether a tensor was written since it was saved: here it is an error as without them.
    """

    def __init__(self) -> None:
        self._entered: list[AbstractContextManager[Any]] = []
        # Weakly, by what makes it the same tensor. A storage's place is not used again as long as
        # there is a weak reference to it.
        self._known: dict[Any, tuple[StorageWeakRef, weakref.ref[Any]]] = {}

    def __enter__(self) -> Self:
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._entered.append(hooks)
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)

    @abstractmethod
    def _takes(self, tensor: Tensor) -> bool:
        """Whether _keep() is for this one."""

    @abstractmethod
    def _keep(self, tensor: Tensor) -> Any:
        """Keeps the elements of a tensor, which is detached; an object with weak references."""

    @abstractmethod
    def _restore(self, kept: Any) -> Tensor:
        """The tensor with the bits that were kept."""

    def _pack(self, tensor: Tensor) -> tuple[Any, _Written]:
        if not self._takes(tensor):
            # An output that its own node holds would never be freed.
            whole = tensor if tensor.is_leaf else tensor.detach()
            return whole, _Written(whole)
        place = tensor.untyped_storage()._cdata, tensor.storage_offset()
        key = *place, tensor.shape, tensor.stride(), tensor.dtype, tensor._version
        entry = self._known.get(key)
        kept: Any = None if entry is None else entry[1]()
        if kept is None:
            kept = self._keep(tensor.detach())
            entry = StorageWeakRef(tensor.untyped_storage()), weakref.ref(kept)
            self._known[key] = entry
            weakref.finalize(kept, self._forget, key, entry).atexit = False
        # An empty tensor that counts the same writes: `.data` changes all but the counter.
        alias = tensor.detach()
        alias.data = tensor.new_empty(0)
        return kept, _Written(alias)

    def _unpack(self, packed: tuple[Any, _Written]) -> Tensor:
        kept, written = packed
        found = kept if isinstance(kept, Tensor) else self._restore(kept)
        written.check(found)
        return found

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
