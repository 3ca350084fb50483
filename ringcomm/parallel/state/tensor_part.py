"""Parts of full tensors, for torch.distributed.checkpoint, and their gather and scatter."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from ringcomm.parallel.flat_collectives import all_gathered, device_of, local_of
from ringcomm.parallel.model.cut import Box, cut_of, pieces_of
from ringcomm.torch_names import make_wrapper, to_copy

Path = tuple[str, ...]
Read = Callable[[], Tensor]

_aten = torch.ops.aten
# Operators that copy a state dict to the host or allocate one, as asynchronous saves do.
_BY_PART = {
    _aten.detach.default,
    _aten.clone.default,
    to_copy.default,
    _aten.empty_like.default,
    _aten.zeros_like.default,
}


class TensorPart(torch.Tensor):
    """Boxes of a full tensor whose other elements are on other ranks.

    DTensor cannot represent layers that are split between heads or unevenly, nor a piece of a flat
    weight. Its shape, dtype and device are those of the full tensor. It is for state dicts and does
    not support operators.

    Args:
        local: this rank's elements, box after box; a single box may have its own shape.
        boxes: the boxes, in row-major order of the full tensor.
        shape: the shape of the full tensor.
        read: returns a tensor like `local`, which is then not kept.
        is_copy: other ranks have these elements too, cut differently, and save them.
    """

    _local: Tensor
    boxes: tuple[Box, ...]
    _read: Read | None
    is_copy: bool

    @staticmethod
    def __new__(
        cls,
        local: Tensor,
        boxes: Iterable[Box],
        shape: Sequence[int],
        read: Read | None = None,
        is_copy: bool = False,
    ) -> "TensorPart":
        """See the class."""
        made = make_wrapper(cls, torch.Size(shape), dtype=local.dtype, device=local.device)
        made._local = local if read is None else local.new_empty(local.shape, device="meta")
        made.boxes = tuple(Box(*map(tuple, box)) for box in boxes if 0 not in box.sizes)
        made._read, made.is_copy = read, is_copy
        return made

    def to_local(self) -> Tensor:
        """This rank's elements; writes into them change this part, unless it is stored."""
        return self._local if self._read is None else self._read()

    def like(self, local: Tensor, read: Read | None = None) -> "TensorPart":
        """The same part of another tensor with the full shape; with `read` it is read on use."""
        return TensorPart(local, self.boxes, self.shape, read, self.is_copy)

    def pieces(self) -> list[Tensor]:
        """The elements of each box, in its shape: views of to_local()."""
        return pieces_of(self.to_local(), self.boxes)

    def cut(self, whole: Tensor) -> Tensor:
        """These elements of another tensor with the full shape; a view if there is one box."""
        if len(self.boxes) == 1:
            return self.boxes[0].of(whole).reshape(self._local.shape)
        pieces = [box.of(whole).reshape(-1) for box in self.boxes]
        return torch.cat([whole.new_empty(0), *pieces]).view(self._local.shape)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"TensorPart({self.boxes} of {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Supports copies only."""
        first = args[0]
        if func in _BY_PART:
            return first.like(func(first.to_local(), *args[1:], **(kwargs or {})))
        if func is _aten.new_empty.default and torch.Size(args[1]) == first.shape:
            local = first.to_local()
            return first.like(local.new_empty(local.shape, **(kwargs or {})))
        if func is _aten.copy_.default and all(isinstance(arg, cls) for arg in args[:2]):
            first._local.copy_(args[1].to_local())
            return first
        raise NotImplementedError(f"a TensorPart does not support {func}: use to_local()")

    # ---- what torch.distributed.checkpoint calls

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in ([] if self.is_copy else self.__create_chunk_list__())
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


# ---- tensors of any kind


def part_of(value: Tensor) -> TensorPart:
    """A tensor of any kind as a part of its full tensor; they share memory."""
    if isinstance(value, TensorPart):
        return value
    return TensorPart(local_of(value), cut_of(value).boxes, value.shape)


def own_elements(part: Tensor, value: Any) -> Tensor:
    """This rank's elements of a value, full or already a part; a view if possible."""
    if isinstance(value, TensorPart | DTensor):
        return local_of(value)
    return part_of(part).cut(torch.as_tensor(value))


def fill(part: Tensor, value: Any) -> None:
    """Writes a value, full or this rank's part, into a part."""
    local, mine = local_of(part), own_elements(part, value)
    if local.data_ptr() != mine.data_ptr():
        local.copy_(mine)


# ---- full tensors


class SameAs(NamedTuple):
    """Replaces a tensor that is also under another path: a tied weight."""

    path: Path


class _Entry(NamedTuple):
    """A rank's boxes of a tensor; for other values, the value."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    boxes: tuple[Box, ...]
    value: Any


def gather_whole(
    parts: Mapping[Path, Any], *, rank0_only: bool, group: dist.ProcessGroup | None
) -> dict[Path, Any]:
    """Full values of all paths that any rank of a group has, in CPU memory.

    With rank0_only other ranks get an empty dict, and need memory for one part at a time.
    Collective: sends one object, and each part once, from the first rank that has it.
    """
    mine = {path: _entry_of(value) for path, value in parts.items()}
    of_ranks = all_gathered(mine, group)
    is_kept = group is None or group.rank() == 0 or not rank0_only
    found: dict[Path, Any] = {}
    for path in dict.fromkeys(path for entries in of_ranks for path in entries):
        owners: dict[_Entry, int] = {}
        for owner, entries in enumerate(of_ranks):
            if path in entries and entries[path].dtype is not None:
                owners.setdefault(entries[path], owner)
        if not owners:
            value = next(entries[path].value for entries in of_ranks if path in entries)
            found[path] = found[value.path] if isinstance(value, SameAs) and is_kept else value
            continue
        first = next(iter(owners))
        if len({(entry.shape, entry.dtype) for entry in owners}) > 1:
            raise ValueError(
                f"{'.'.join(path)} must have the same shape and dtype on all ranks, got {owners}"
            )
        num_found = sum(math.prod(box.sizes) for entry in owners for box in entry.boxes)
        if num_found < math.prod(first.shape):
            raise ValueError(
                f"the ranks of the group have {num_found} of {math.prod(first.shape)} elements of"
                f" {'.'.join(path)}: pass the group of all ranks of the model"
            )
        whole = torch.empty(first.shape if is_kept else 0, dtype=first.dtype, device="cpu")
        for entry, owner in owners.items():
            if not entry.boxes:
                continue
            if group is not None and not (rank0_only and owner == 0):
                sent = _sent(parts.get(path), entry, owner, group)
            elif is_kept:
                sent = local_of(parts[path]).detach().reshape(-1)
            if is_kept:
                part = TensorPart(sent, entry.boxes, entry.shape)
                for box, piece in zip(part.boxes, part.pieces(), strict=True):
                    box.of(whole).copy_(piece)
        if is_kept:
            found[path] = whole
    return found if is_kept else {}


def _sent(part: Any, entry: _Entry, owner: int, group: dist.ProcessGroup) -> Tensor:
    """The flat elements of a rank's part, on all ranks."""
    device = device_of(group)
    if group.rank() == owner:
        flat = local_of(part).detach().to(device).reshape(-1).contiguous()
    else:
        num_elems = sum(math.prod(box.sizes) for box in entry.boxes)
        flat = torch.empty(num_elems, dtype=entry.dtype, device=device)
    # Not every backend sends every dtype.
    dist.broadcast(flat.view(torch.uint8), group=group, group_src=owner)
    return flat


def scatter_whole(
    given: Mapping[Path, Any], more: Any, wanted: Mapping[Path, Any], group: dist.ProcessGroup
) -> tuple[dict[Path, Any], Any]:
    """Scatters rank 0's full values: returns this rank's parts in new memory, and rank 0's `more`.

    `wanted` has the parts of this rank, which determine its elements; other paths get None.
    Collective: sends one object, and each full tensor once.
    """
    objects: list[Any] = [{path: _entry_of(value) for path, value in given.items()}, more]
    dist.broadcast_object_list(objects, group=group, group_src=0)
    entries, more = objects
    found: dict[Path, Any] = {}
    for path, entry in entries.items():
        if entry.dtype is None:
            found[path] = entry.value
            continue
        whole = torch.empty(entry.shape, dtype=entry.dtype, device=device_of(group))
        if group.rank() == 0:
            whole.copy_(local_of(given[path]))
        dist.broadcast(whole.view(-1).view(torch.uint8), group=group, group_src=0)
        part = wanted.get(path)
        if isinstance(part, Tensor) and part.shape == whole.shape:
            box = part_of(part)
            found[path] = box.like(box.cut(whole).clone())
        else:
            found[path] = None if part is None else whole
    return found, more


def _entry_of(value: Any) -> _Entry:
    if not isinstance(value, Tensor):
        return _Entry((), None, (), value)
    return _Entry(tuple(value.shape), value.dtype, part_of(value).boxes, None)
