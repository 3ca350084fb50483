"""Collectives over lists of tensors through one buffer of a constant size, whatever the model.

Cb of ZeRO-R (Rajbhandari et al. 2020, 6.2): fused for speed, but not into one copy of everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm.backend import resolve_group
from ringcomm.parallel.flat_collectives import takes_uneven

__all__ = ["all_reduce_mean_", "broadcast_"]

DEFAULT_BUFFER_BYTES = 25 << 20


def all_reduce_mean_(
    tensors: Iterable[Tensor],
    group: dist.ProcessGroup | None = None,
    buffer_bytes: int = DEFAULT_BUFFER_BYTES,
) -> None:
    """Replaces tensors by their means over the ranks, elementwise.

    Small ones travel together, large ones in slices: a call for every buffer of one dtype and
    device. Slices of a contiguous tensor that fill a buffer travel from where they are.

    Args:
        tensors: floating point or complex, of any shapes and strides, parameters too; the same
            shapes and dtypes in the same order on all ranks.
        group: None for the default group.
        buffer_bytes: of all memory that is taken besides, whatever the model. Torch itself takes
            14 KB more to copy a transposed matrix on a CPU.

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
            raise TypeError(f"a mean is of floating point or complex numbers, got {tensor.dtype}")
    resolved = resolve_group(group)

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
    group_src: int = 0,
) -> None:
    """Replaces tensors by those of one rank.

    Args:
        tensors: of any dtypes, otherwise as all_reduce_mean_()'s.
        group: None for the default group.
        buffer_bytes: as all_reduce_mean_()'s.
        group_src: the rank in the group.

    Raises:
        ValueError: as all_reduce_mean_(), or there is no such rank; nothing was written.
        RingcommError: the ranks have other tensors.

    Collective, unless there is no element.
    """
    listed = _checked(tensors, buffer_bytes)
    resolved = resolve_group(group)
    if not 0 <= group_src < resolved.size():
        raise ValueError(f"group_src is a rank of {resolved.size()}, got {group_src}")

    def send(flat: Tensor) -> None:
        dist.broadcast(flat.view(torch.uint8), group=resolved, group_src=group_src)

    _through_buffer(listed, buffer_bytes, send, is_changed=resolved.rank() != group_src)


def _checked(tensors: Iterable[Tensor], buffer_bytes: int) -> list[Tensor]:
    """The tensors, detached."""
    listed = [tensor.detach() for tensor in tensors]
    for tensor in listed:
        if tensor.layout != torch.strided:
            raise ValueError(f"tensors in a buffer are strided, got {tensor.layout}")
        dims = zip(tensor.stride(), tensor.shape, strict=True)
        if any(stride == 0 and size > 1 for stride, size in dims):
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} has"
                " elements that share memory: give its contiguous() instead"
            )
        if tensor.element_size() > buffer_bytes:
            raise ValueError(
                f"buffer_bytes is {buffer_bytes}: an element of {tensor.dtype} has no room"
            )
    return listed


def _through_buffer(
    tensors: list[Tensor],
    buffer_bytes: int,
    collective: Callable[[Tensor], None],
    *,
    is_changed: bool,
) -> None:
    """Calls a collective for all elements, in parts of one dtype and one dimension.

    `is_changed` says whether it changes what this rank has.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() > 0:
            kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    largest = max((sum(t.nbytes for t in alike) for alike in kinds.values()), default=0)
    buffer_bytes = min(buffer_bytes, largest)
    buffer: Tensor | None = None
    for (device, dtype), alike in kinds.items():
        num_elems = buffer_bytes // dtype.itemsize
        for parts in _fill(alike, num_elems):
            if len(parts) == 1 and _is_in_order(parts[0]):
                collective(parts[0].view(-1))
                continue
            if buffer is None or buffer.device != device:
                buffer = None  # before the next one is there
                buffer = torch.empty(buffer_bytes, dtype=torch.uint8, device=device)
            sizes = [part.numel() for part in parts]
            flat = buffer[: dtype.itemsize * sum(sizes)].view(dtype)
            places = [
                place.view(part.shape) for place, part in zip(flat.split(sizes), parts, strict=True)
            ]
            _copy(places, parts)
            collective(flat)
            if is_changed:
                _copy(parts, places)


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if any(tensor.is_conj() or tensor.is_neg() for tensor in (*targets, *sources)):
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
    else:
        torch._foreach_copy_(targets, sources)


def _is_in_order(tensor: Tensor) -> bool:
    """Whether its elements stand in memory as they are, one behind the other."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _fill(tensors: Iterable[Tensor], num_elems: int) -> Iterator[list[Tensor]]:
    """Views of all elements in their order, in lists of `num_elems` each but for the last."""
    parts: list[Tensor] = []
    room = num_elems
    for tensor in tensors:
        begin = 0
        while begin < tensor.numel():
            end = min(tensor.numel(), begin + room)
            parts += _views(tensor, begin, end)
            room -= end - begin
            begin = end
            if room == 0:
                yield parts
                parts, room = [], num_elems
    if parts:
        yield parts


def _views(tensor: Tensor, begin: int, end: int) -> Iterator[Tensor]:
    """The elements [begin, end) in logical order: few views, whatever the strides."""
    if begin == end:
        return
    if end - begin == tensor.numel():
        yield tensor
    elif tensor.is_contiguous():
        yield tensor.view(-1)[begin:end]
    else:
        row_elems = tensor[0].numel()
        first, last = -(-begin // row_elems), end // row_elems  # whole rows
        if first > last:
            yield from _views(tensor[last], begin - last * row_elems, end - last * row_elems)
            return
        if begin < first * row_elems:
            yield from _views(tensor[first - 1], begin - (first - 1) * row_elems, row_elems)
        if first < last:
            yield tensor[first:last]
        if last * row_elems < end:
            yield from _views(tensor[last], 0, end - last * row_elems)
