"""A rank's part of a whole tensor, as torch.distributed.checkpoint saves and loads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

__all__ = ["TensorPart", "cut_box"]

_aten = torch.ops.aten
# What copies a state dict to the host, or makes room for one: asynchronous saves do.
_BY_PART = {
    _aten.detach.default,
    _aten.clone.default,
    _aten._to_copy.default,
    _aten.empty_like.default,
    _aten.zeros_like.default,
}


class TensorPart(torch.Tensor):
    """A box of a whole tensor, of which other ranks have the rest.

    DTensor cannot say this of layers that are cut between heads, or unevenly. Its shape, dtype and
    device are those of the whole; it is for state dicts, and no operators take it.

    Args:
        local: this rank's elements; perhaps none.
        offsets: where they begin in each dimension of the whole.
        shape: of the whole.
    """

    _local: Tensor
    _offsets: torch.Size

    @staticmethod
    def __new__(cls, local: Tensor, offsets: Sequence[int], shape: Sequence[int]) -> TensorPart:
        """See the class."""
        made: TensorPart = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=local.dtype, device=local.device
        )
        made._local, made._offsets = local, torch.Size(offsets)
        return made

    def __init__(self, *_: Any) -> None:
        """See the class."""

    def to_local(self) -> Tensor:
        """This rank's elements; writing into them changes this."""
        return self._local

    @property
    def offsets(self) -> torch.Size:
        """Where they begin in each dimension of the whole."""
        return self._offsets

    def cut(self, whole: Tensor) -> Tensor:
        """A view of these elements of another tensor of the whole shape."""
        return cut_box(whole, self._offsets, self._local.shape)

    def is_box_of(self, other: TensorPart) -> bool:
        """Whether both are the same elements of a tensor of one shape."""
        mine, theirs = ((p.shape, p.offsets, p.to_local().shape) for p in (self, other))
        return mine == theirs

    def __repr__(self) -> str:  # type: ignore[override]
        ranges = (f"{b}:{b + n}" for b, n in zip(self._offsets, self._local.shape, strict=True))
        return f"TensorPart([{', '.join(ranges)}] of {tuple(self.shape)}, {self._local})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Copies, and nothing else."""
        first = args[0]
        if func in _BY_PART:
            made = func(first._local, *args[1:], **(kwargs or {}))
            return cls(made, first._offsets, first.shape)
        if func is _aten.new_empty.default and torch.Size(args[1]) == first.shape:
            made = first._local.new_empty(first._local.shape, **(kwargs or {}))
            return cls(made, first._offsets, first.shape)
        if func is _aten.copy_.default and all(isinstance(arg, cls) for arg in args[:2]):
            first._local.copy_(args[1]._local)
            return first
        raise NotImplementedError(f"{func} of a TensorPart: take to_local()")

    # ---- what torch.distributed.checkpoint calls

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=self._offsets, sizes=self._local.shape)

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        if not self._local.numel():
            return []
        data = TensorWriteData(
            chunk=self._chunk(),
            properties=TensorProperties.create_from_tensor(self._local),
            size=self.shape,
        )
        index = MetadataIndex(fqn, self._offsets)
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()] if self._local.numel() else []

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        if index.offset is not None and torch.Size(index.offset) != self._offsets:
            raise ValueError(
                f"this rank's part begins at {tuple(self._offsets)}, not {index.offset}"
            )
        return self._local


def cut_box(whole: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """A view of a box of a tensor."""
    for dim, (begin, length) in enumerate(zip(offsets, sizes, strict=True)):
        whole = whole.narrow(dim, begin, length)
    return whole
