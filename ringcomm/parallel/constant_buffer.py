"""Collectives over lists of tensors through one buffer of constant size.

Cb of ZeRO-R (Rajbhandari et al. 2020, 6.2): calls are fused, without a copy of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringcomm.backend import resolve_group
from ringcomm.parallel.flat_collectives import takes_uneven

__all__ = ["all_reduce_mean_", "broadcast_"]

DEFAULT_BUFFER_BYTES = 25 << 20


def all_reduce_mean_(
    tensors: Iterable[Tensor],
    group: dist.ProcessGroup | None = None,
    buffer_bytes: int = DEFAULT_BUFFER_BYTES,
    *,
    mesh: DeviceMesh | None = None,
) -> None:
    """Replaces tensors by their means over the ranks, elementwise.

    Small tensors are packed together and large ones are split by rows, with one call per buffer of
    one dtype and device. Rows of a contiguous tensor that fill a buffer are sent in place.

    Args:
        tensors: floating point or complex, of any shapes and strides, parameters too; the same
            shapes and dtypes in the same order on all ranks.
        group: None for the default group.
        buffer_bytes: the total additional memory. Torch itself needs 14 KB more to copy a
            transposed matrix on a CPU.
        mesh: a one-dimensional DeviceMesh, instead of a group.

    Raises:
        TypeError: a tensor is not floating point or complex; nothing was written.
        ValueError: one is not strided, or has elements that share memory, or is larger by itself
            than the buffer in a single element; nothing was written.
        RingcommError: the ranks have other tensors.

    Collective, unless there is no element.
    """
    listed = _checked(tensors, buffer_bytes)
    for tensor in listed:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise TypeError(f"a mean needs a floating-point or complex dtype, got {tensor.dtype}")
    resolved = resolve_group(group, mesh)

    def reduce(flat: Tensor) -> None:
        flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        if takes_uneven(resolved, flat.device):
            dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=resolved)
        else:
            dist.all_reduce(flat, group=resolved)
            flat.div_(resolved.size())

    _through_buffer(listed, buffer_bytes, reduce, is_changed=True)


def broadcast_(
    tensors: Iterable[Tensor],
    group: dist.ProcessGroup | None = None,
    buffer_bytes: int = DEFAULT_BUFFER_BYTES,
    *,
    mesh: DeviceMesh | None = None,
    group_src: int = 0,
) -> None:
    """Replaces tensors with those of one rank.

    Args:
        tensors: of any dtypes, otherwise as all_reduce_mean_()'s.
        group: None for the default group.
        buffer_bytes: as all_reduce_mean_()'s.
        mesh: as all_reduce_mean_()'s.
        group_src: the rank in the group.

    Raises:
        ValueError: as all_reduce_mean_(), or there is no such rank; nothing was written.
        RingcommError: the ranks have other tensors.

    Collective, unless there is no element.
    """
    listed = _checked(tensors, buffer_bytes)
    resolved = resolve_group(group, mesh)
    if not 0 <= group_src < resolved.size():
        raise ValueError(
            f"group_src must be a rank of the group of {resolved.size()}, got {group_src}"
        )

    def send(flat: Tensor) -> None:
        dist.broadcast(flat.view(torch.uint8), group=resolved, group_src=group_src)

    _through_buffer(listed, buffer_bytes, send, is_changed=resolved.rank() != group_src)


def _checked(tensors: Iterable[Tensor], buffer_bytes: int) -> list[Tensor]:
    """The tensors, detached."""
    listed = [tensor.detach() for tensor in tensors]
    for tensor in listed:
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            raise ValueError(
                f"tensors in a buffer must be strided and have values, got {tensor.layout}"
            )
        dims = zip(tensor.stride(), tensor.shape, strict=True)
        if any(stride == 0 and size > 1 for stride, size in dims):
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} has"
                " elements that share memory: pass its contiguous() instead"
            )
        if tensor.element_size() > buffer_bytes:
            raise ValueError(
                f"buffer_bytes must hold at least one element of {tensor.dtype}, got {buffer_bytes}"
            )
    return listed


def _through_buffer(
    tensors: list[Tensor],
    buffer_bytes: int,
    collective: Callable[[Tensor], None],
    *,
    is_changed: bool,
) -> None:
    """Calls a collective for parts of one dtype; copies results back if it changes them."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() > 0:
            kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    largest = max((sum(t.nbytes for t in alike) for alike in kinds.values()), default=0)
    buffer_bytes = min(buffer_bytes, largest)
    buffer: Tensor | None = None
    for (device, dtype), alike in kinds.items():
        for parts in _fill(alike, buffer_bytes // dtype.itemsize):
            if len(parts) == 1 and parts[0].is_contiguous():
                # A view(-1) of a single element may keep an unusual stride.
                collective(parts[0].as_strided([parts[0].numel()], [1]))
                continue
            if buffer is None or buffer.device != device:
                buffer = None  # before the next one is allocated
                buffer = torch.empty(buffer_bytes, dtype=torch.uint8, device=device)
            sizes = [part.numel() for part in parts]
            flat = buffer[: dtype.itemsize * sum(sizes)].view(dtype)
            places = [
                place.view_as(part) for place, part in zip(flat.split(sizes), parts, strict=True)
            ]
            torch._foreach_copy_(places, parts)
            collective(flat)
            if is_changed:
                torch._foreach_copy_(parts, places)


def _fill(tensors: Iterable[Tensor], num_elems: int) -> Iterator[list[Tensor]]:
    """Views of all elements in their order, in lists of `num_elems` at most.

    The cuts do not depend on strides, which may differ between ranks.
    """
    parts: list[Tensor] = []
    room = num_elems
    for piece in (piece for tensor in tensors for piece in _pieces(tensor, num_elems)):
        if piece.numel() > room:
            yield parts
            parts, room = [], num_elems
        parts.append(piece)
        room -= piece.numel()
    if parts:
        yield parts


def _pieces(tensor: Tensor, num_elems: int) -> Iterator[Tensor]:
    """Splits a tensor into groups of rows that fit, or into parts of each row."""
    if tensor.numel() <= num_elems:
        yield tensor
        return
    num_rows = num_elems // tensor[0].numel()
    if num_rows > 0:
        yield from tensor.split(num_rows)
        return
    for row in tensor:
        yield from _pieces(row, num_elems)
