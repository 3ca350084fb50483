"""Saved-tensor hooks that move a tensor to other memory, once, and keep torch's version checks."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import Self

from ringcomm.torch_names import base_of, storage_id, version_of


class Kept:
    """A dense tensor with any strides, as its elements in memory order.

    Attributes:
        flat: the elements, of one dimension; a view of the tensor until they are kept elsewhere.
        shape, stride, device: the tensor's.
        is_shard: whether `flat` is this rank's shard.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.source = StorageWeakRef(tensor.untyped_storage())
        tensor = tensor.resolve_conj().resolve_neg()
        # Torch keeps the strides of a dense tensor, in any order of dimensions.
        if torch.empty_like(tensor, device="meta").stride() != tensor.stride():
            tensor = tensor.contiguous()
        self.shape, self.stride, self.device = tensor.shape, tensor.stride(), tensor.device
        self.flat = tensor.as_strided([tensor.numel()], [1])
        self.is_shard = False

    def viewed(self, flat: Tensor) -> Tensor:
        """Elements of one dimension with the tensor's shape and strides."""
        return flat.as_strided(self.shape, self.stride)


class SavedTensors(ABC):
    """A context that stores the tensors selected by _takes() with _keep(); others are unchanged.

    It may be entered repeatedly and recursively. A tensor that is saved twice is stored once. With
    hooks, torch does not check whether a saved tensor was modified in place; this class does.
    """

    def __init__(self) -> None:
        self._entered: list[AbstractContextManager[Any]] = []
        # Keyed by the identity of the tensor. A storage's address is not reused as long as
        # Kept.source refers to it.
        self._known: WeakValueDictionary[Any, Kept] = WeakValueDictionary()

    def __enter__(self) -> Self:
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._entered.append(hooks)
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)

    @abstractmethod
    def _takes(self, tensor: Tensor) -> bool:
        """Whether to store this tensor with _keep()."""

    @abstractmethod
    def _keep(self, kept: Kept) -> None:
        """Moves `kept.flat`, a view of the saved tensor, to its destination."""

    @abstractmethod
    def _restore(self, kept: Kept) -> Tensor:
        """Returns the tensor with the saved bits."""

    def _pack(self, tensor: Tensor) -> tuple[Kept | Tensor, Tensor, int]:
        """Returns the stored tensor, a tensor that counts writes, and their number so far."""
        if not self._takes(tensor):
            # An output referenced by its own node would never be freed.
            whole = tensor if tensor.is_leaf else tensor.detach()
            return whole, whole, version_of(whole)
        place = storage_id(tensor), tensor.storage_offset()
        key = *place, tensor.shape, tensor.stride(), tensor.dtype, version_of(tensor)
        kept = self._known.get(key)
        if kept is None:
            kept = Kept(tensor.detach())
            self._keep(kept)
            self._known[key] = kept
        # An empty tensor with the same version counter: `.data` replaces everything but the
        # counter.
        alias = tensor.detach()
        alias.data = tensor.new_empty(0)
        return kept, alias, version_of(alias)

    def _unpack(self, packed: tuple[Kept | Tensor, Tensor, int]) -> Tensor:
        kept, alias, version = packed
        found = self._restore(kept) if isinstance(kept, Kept) else kept
        if version_of(alias) != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an"
                f" inplace operation: [{found.type()} {list(found.shape)}] is at version"
                f" {version_of(alias)}; expected version {version} instead"
            )
        return found


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has its own elements, in memory that is freed with the graph.

    False for parameters and their views, subclasses, sparse and quantized tensors.
    """
    base = base_of(tensor)
    root = tensor if base is None else base
    return (
        type(tensor) is Tensor
        and not isinstance(root, nn.Parameter)
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and tensor.numel() > 0
    )
