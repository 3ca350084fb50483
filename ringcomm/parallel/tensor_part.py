"""A rank's part of a whole tensor, as torch.distributed.checkpoint saves and loads it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

__all__ = ["Box", "TensorPart", "range_boxes"]

_aten = torch.ops.aten
# What copies a state dict to the host, or makes room for one: asynchronous saves do.
_BY_PART = {
    _aten.detach.default,
    _aten.clone.default,
    _aten._to_copy.default,
    _aten.empty_like.default,
    _aten.zeros_like.default,
}


class Box(NamedTuple):
    """Where a rectangle of a tensor begins in each dimension, and its size."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, whole: Tensor) -> Tensor:
        """A view of these elements of a tensor."""
        for dim, (begin, length) in enumerate(zip(*self, strict=True)):
            whole = whole.narrow(dim, begin, length)
        return whole


class TensorPart(torch.Tensor):
    """Boxes of a whole tensor, of which other ranks have the rest.

    DTensor cannot say this of layers that are cut between heads, or unevenly, nor of a piece of a
    flat weight. Its shape, dtype and device are those of the whole; it is for state dicts, and no
    operators take it.

    Args:
        local: this rank's elements, box after box; of one box also in its shape.
        boxes: which they are, in row-major order of the whole. None or more.
        shape: of the whole.
        read: where the elements are stored elsewhere: returns a tensor like `local`, which is not
            kept.
    """

    _local: Tensor
    boxes: tuple[Box, ...]
    _read: Callable[[], Tensor] | None

    @staticmethod
    def __new__(
        cls,
        local: Tensor,
        boxes: Iterable[Box],
        shape: Sequence[int],
        read: Callable[[], Tensor] | None = None,
    ) -> TensorPart:
        """See the class."""
        made: TensorPart = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=local.dtype, device=local.device
        )
        made._local = local if read is None else local.new_empty(local.shape, device="meta")
        made.boxes = tuple(Box(*map(tuple, box)) for box in boxes if 0 not in box.sizes)
        made._read = read
        return made

    def __init__(self, *_: Any) -> None:
        """See the class."""

    def to_local(self) -> Tensor:
        """This rank's elements; writing into them changes this, unless they are stored."""
        return self._local if self._read is None else self._read()

    def like(self, local: Tensor) -> TensorPart:
        """The same part of another tensor of the whole shape."""
        return TensorPart(local, self.boxes, self.shape)

    def pieces(self) -> list[Tensor]:
        """The elements of each box, in its shape: views of to_local()."""
        local = self.to_local()
        if len(self.boxes) == 1:
            return [local.reshape(self.boxes[0].sizes)]
        parts = local.reshape(-1).split([math.prod(box.sizes) for box in self.boxes])
        return [part.view(box.sizes) for part, box in zip(parts, self.boxes, strict=True)]

    def cut(self, whole: Tensor) -> Tensor:
        """These elements of another tensor of the whole shape, in the shape of to_local().

        A view where the tensor is contiguous and so are they, or where they are one box.
        """
        size = self._local.shape
        if not self.boxes:
            return whole.new_empty(size)
        if len(self.boxes) == 1:
            return self.boxes[0].of(whole).reshape(size)
        first, last = self.boxes[0], self.boxes[-1]
        ends = [begin + length - 1 for begin, length in zip(*last, strict=True)]
        begin, end = _flat_index(first.offsets, whole.shape), _flat_index(ends, whole.shape) + 1
        if whole.is_contiguous() and end - begin == size.numel():
            return whole.view(-1)[begin:end].view(size)
        return torch.cat([box.of(whole).reshape(-1) for box in self.boxes]).view(size)

    def is_part_of(self, other: TensorPart) -> bool:
        """Whether both are the same elements of a tensor of one shape."""
        return (self.shape, self.boxes) == (other.shape, other.boxes)

    def __repr__(self) -> str:  # type: ignore[override]
        ranges = (
            ", ".join(f"{begin}:{begin + length}" for begin, length in zip(*box, strict=True))
            for box in self.boxes
        )
        return f"TensorPart([{'], ['.join(ranges)}] of {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Copies, and nothing else."""
        first = args[0]
        if func in _BY_PART:
            return first.like(func(first.to_local(), *args[1:], **(kwargs or {})))
        if func is _aten.new_empty.default and torch.Size(args[1]) == first.shape:
            local = first.to_local()
            return first.like(local.new_empty(local.shape, **(kwargs or {})))
        if func is _aten.copy_.default and all(isinstance(arg, cls) for arg in args[:2]):
            first._local.copy_(args[1].to_local())
            return first
        raise NotImplementedError(f"{func} of a TensorPart: take to_local()")

    # ---- what torch.distributed.checkpoint calls

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
            for box in self.boxes
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for box, piece in zip(self.boxes, self.pieces(), strict=True):
            if index.offset is None or tuple(index.offset) == box.offsets:
                return piece
        raise ValueError(f"this rank has no part that begins at {index.offset}: {self}")


def range_boxes(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """The boxes that make up elements [begin, end) of a flat tensor; at most 2 * dim - 1."""
    if begin >= end:
        return []
    if not shape:
        return [Box((), ())]
    row_elems = math.prod(shape[1:])
    boxes: list[Box] = []
    while begin < end:
        row, column = divmod(begin, row_elems)
        num_rows = (end - begin) // row_elems
        if column == 0 and num_rows:
            boxes.append(Box((row, *(0 for _ in shape[1:])), (num_rows, *shape[1:])))
            begin += num_rows * row_elems
            continue
        stop = min(end, (row + 1) * row_elems)
        for offsets, sizes in range_boxes(shape[1:], column, stop - row * row_elems):
            boxes.append(Box((row, *offsets), (1, *sizes)))
        begin = stop
    return boxes


def _flat_index(index: Sequence[int], shape: Sequence[int]) -> int:
    found = 0
    for at, size in zip(index, shape, strict=True):
        found = found * size + at
    return found
