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
from ringcomm.parallel.tensor_part import TensorPart, cut_box

__all__ = ["box_of", "gather_whole", "local_of", "scatter_whole"]

Path = tuple[str, ...]


class _Entry(NamedTuple):
    """A rank's box of a tensor; of what is no tensor, the value."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    value: Any


def local_of(part: Tensor) -> Tensor:
    """This rank's elements."""
    return part.to_local() if isinstance(part, TensorPart | DTensor) else part


def box_of(part: Tensor) -> TensorPart:
    """A part of any kind as a box of its whole tensor; they share memory."""
    if isinstance(part, TensorPart):
        return part
    if isinstance(part, DTensor):
        found = compute_local_shape_and_global_offset(part.shape, part.device_mesh, part.placements)
        return TensorPart(part.to_local(), found[1], part.shape)
    return TensorPart(part, [0] * part.dim(), part.shape)


def gather_whole(parts: Mapping[Path, Any], *, rank0_only: bool) -> dict[Path, Any]:
    """Whole values of all paths that any rank has, in memory of the CPU.

    Args:
        parts: of this rank; a path's tensor has the same shape and dtype on all of them.
        rank0_only: whether ranks other than 0 get an empty dict, and hold one box at a time.

    Raises:
        ValueError: ranks have another shape of a tensor.

    Collective over the default group: one object, and each box once, from the first that has it.
    """
    if not dist.is_initialized():
        return {path: _copied(value) for path, value in parts.items()}
    mine = {path: _entry_of(value) for path, value in parts.items()}
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    rank, found = dist.get_rank(), {}
    for path in dict.fromkeys(path for entries in of_ranks for path in entries):
        owners: dict[Any, int] = {}
        for owner, entries in enumerate(of_ranks):
            if path in entries:
                owners.setdefault(entries[path], owner)
        first = next(iter(owners))
        if first.dtype is None:
            found[path] = first.value
            continue
        if len({(entry.shape, entry.dtype) for entry in owners}) > 1:
            raise ValueError(
                f"{'.'.join(path)} has other shapes or dtypes on other ranks: {owners}"
            )
        is_kept = rank == 0 or not rank0_only
        whole = torch.empty(first.shape if is_kept else 0, dtype=first.dtype)
        for entry, owner in owners.items():
            if 0 in entry.sizes:
                continue
            box = _sent(parts.get(path), entry, owner, rank0_only)
            if is_kept and box is not None:
                cut_box(whole, entry.offsets, entry.sizes).copy_(box)
        if is_kept:
            found[path] = whole
    return found if rank == 0 or not rank0_only else {}


def _sent(part: Any, entry: _Entry, owner: int, rank0_only: bool) -> Tensor | None:
    """A box of a rank, on all ranks, or on rank 0 alone."""
    device = device_of(dist.group.WORLD)  # type: ignore[arg-type]
    rank = dist.get_rank()
    if rank == owner:
        box = local_of(part).detach().to(device).contiguous()
    elif rank0_only and rank != 0:
        return None
    else:
        box = torch.empty(entry.sizes, dtype=entry.dtype, device=device)
    if not rank0_only:
        dist.broadcast(box, src=owner)
    elif owner != 0:
        dist.send(box, 0) if rank == owner else dist.recv(box, owner)
    return box


def scatter_whole(
    given: Mapping[Path, Any], more: Any, wanted: Mapping[Path, Any]
) -> tuple[dict[Path, Any], Any]:
    """This rank's parts of whole values that rank 0 has.

    Args:
        given: on rank 0: values by path. Other ranks' are not looked at.
        more: on rank 0: any object.
        wanted: parts of this rank, which say which elements it keeps.

    Returns:
        Parts in new memory, and rank 0's object. A path that is not wanted has None.

    Collective over the default group: one object, and each whole tensor once.
    """
    is_first = dist.get_rank() == 0
    mine = {path: _entry_of(value) for path, value in given.items()} if is_first else None
    told: list[Any] = [mine, more]
    dist.broadcast_object_list(told, src=0)
    entries, more = told
    device = device_of(dist.group.WORLD)  # type: ignore[arg-type]
    found: dict[Path, Any] = {}
    for path, entry in entries.items():
        if entry.dtype is None:
            found[path] = entry.value
            continue
        whole = torch.empty(entry.shape, dtype=entry.dtype, device=device)
        if is_first:
            whole.copy_(local_of(given[path]))
        dist.broadcast(whole, src=0)
        part = wanted.get(path)
        if isinstance(part, Tensor) and part.shape == whole.shape:
            box = box_of(part)
            found[path] = TensorPart(box.cut(whole).clone(), box.offsets, whole.shape)
        else:
            found[path] = None if part is None else whole
    return found, more


def _entry_of(value: Any) -> _Entry:
    if not isinstance(value, Tensor):
        return _Entry((), None, (), (), value)
    box = box_of(value)
    sizes = box.to_local().shape
    return _Entry(tuple(value.shape), value.dtype, tuple(box.offsets), tuple(sizes), None)


def _copied(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return local_of(value).detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
