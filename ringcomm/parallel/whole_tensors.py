"""Whole tensors from the parts of all ranks, and back, one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ringcomm.parallel.flat_collectives import device_of
from ringcomm.parallel.tensor_part import Box, TensorPart

__all__ = ["SameAs", "gather_whole", "local_of", "part_of", "scatter_whole"]

Path = tuple[str, ...]


class SameAs(NamedTuple):
    """In place of a tensor that is another path's as well: a tied weight."""

    path: Path


class _Entry(NamedTuple):
    """A rank's boxes of a tensor; of what is no tensor, the value."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    boxes: tuple[Box, ...]
    value: Any


def local_of(part: Tensor) -> Tensor:
    """This rank's elements."""
    return part.to_local() if isinstance(part, TensorPart | DTensor) else part


def part_of(value: Tensor) -> TensorPart:
    """A tensor of any kind as a part of its whole one; they share memory."""
    if isinstance(value, TensorPart):
        return value
    if isinstance(value, DTensor):
        sizes, offsets = compute_local_shape_and_global_offset(
            value.shape, value.device_mesh, value.placements
        )
        return TensorPart(value.to_local(), [Box(tuple(offsets), tuple(sizes))], value.shape)
    return TensorPart(value, [Box((0,) * value.dim(), tuple(value.shape))], value.shape)


def gather_whole(
    parts: Mapping[Path, Any], *, rank0_only: bool, group: dist.ProcessGroup | None
) -> dict[Path, Any]:
    """Whole values of all paths that any rank has, in memory of the CPU.

    Args:
        parts: of this rank; a path's tensor has the same shape and dtype on all of them.
        rank0_only: whether ranks other than 0 get an empty dict, and hold one part at a time.
        group: the ranks; None for this one alone.

    Raises:
        ValueError: ranks have another shape of a tensor.

    Collective: one object, and each part once, from the first rank that has it.
    """
    mine = {path: _entry_of(value) for path, value in parts.items()}
    of_ranks: list[Any] = [mine]
    if group is not None:
        of_ranks = [None] * group.size()
        dist.all_gather_object(of_ranks, mine, group=group)
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
                f"{'.'.join(path)} has other shapes or dtypes on other ranks: {owners}"
            )
        whole = torch.empty(first.shape if is_kept else 0, dtype=first.dtype)
        for entry, owner in owners.items():
            if not entry.boxes:
                continue
            sent = _sent(parts.get(path), entry, owner, rank0_only, group)
            if is_kept and sent is not None:
                part = TensorPart(sent, entry.boxes, entry.shape)
                for box, piece in zip(part.boxes, part.pieces(), strict=True):
                    box.of(whole).copy_(piece)
        if is_kept:
            found[path] = whole
    return found if is_kept else {}


def _sent(
    part: Any, entry: _Entry, owner: int, rank0_only: bool, group: dist.ProcessGroup | None
) -> Tensor | None:
    """The elements of a rank's part in one dimension, on all ranks, or on rank 0 alone."""
    if group is None:
        return local_of(part).detach().reshape(-1)
    rank, device = group.rank(), device_of(group)
    if rank == owner:
        flat = local_of(part).detach().to(device).reshape(-1).contiguous()
    elif rank0_only and rank != 0:
        return None
    else:
        num_elems = sum(torch.Size(box.sizes).numel() for box in entry.boxes)
        flat = torch.empty(num_elems, dtype=entry.dtype, device=device)
    raw = flat.view(torch.uint8)  # not every backend sends every dtype
    if not rank0_only:
        dist.broadcast(raw, group=group, group_src=owner)
    elif owner != 0 and rank == owner:
        dist.send(raw, group=group, group_dst=0)
    elif owner != 0:
        dist.recv(raw, group=group, group_src=owner)
    return flat


def scatter_whole(
    given: Mapping[Path, Any], more: Any, wanted: Mapping[Path, Any], group: dist.ProcessGroup
) -> tuple[dict[Path, Any], Any]:
    """This rank's parts of whole values that rank 0 has.

    Args:
        given: on rank 0: values by path. Other ranks' are not looked at.
        more: on rank 0: any object.
        wanted: parts of this rank, which say which elements it keeps.
        group: the ranks.

    Returns:
        Parts in new memory, and rank 0's object. A path that is not wanted has None.

    Collective: one object, and each whole tensor once.
    """
    is_first = group.rank() == 0
    mine = {path: _entry_of(value) for path, value in given.items()} if is_first else None
    told: list[Any] = [mine, more]
    dist.broadcast_object_list(told, group=group, group_src=0)
    entries, more = told
    found: dict[Path, Any] = {}
    for path, entry in entries.items():
        if entry.dtype is None:
            found[path] = entry.value
            continue
        whole = torch.empty(entry.shape, dtype=entry.dtype, device=device_of(group))
        if is_first:
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
