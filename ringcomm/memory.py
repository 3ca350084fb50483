"""Tensors that other ranks of this host can read where they lie; docs/design/shared_buffers.md."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm import _C
from ringcomm.backend import resolve_group

__all__ = ["empty_shared", "is_shared"]


def empty_shared(
    *size: int | tuple[int, ...] | list[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    requires_grad: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """A tensor like torch.empty's, in memory that the other ranks of this host can map.

    Not collective. Collectives of a ringcomm group run directly on such tensors where every rank
    passes one (a contiguous view will do): nothing is staged, which makes an all_reduce of 256 KiB
    and more several times faster. In every other way it is a CPU tensor like any other; its memory
    is freed with the last tensor on its storage, whatever has become of the group.

    On a GPU it is collective: all ranks of the group call it, each for its own device, and
    all_reduces of that group of more than some ten KiB run directly on such tensors. A rank's
    memory is freed in one of the group's calls after the tensors of all ranks have gone; where
    memory is shared by IPC handles, in the next `empty_shared`. It must be in use by no streams but
    the one on which the tensor was made and the one that is current when it goes:
    `record_stream` has no effect on it. What a CUDA graph has captured stays as long as the group.

    A forked child shares the memory of the tensors that it inherits, unlike that of others: what
    one process writes the other sees.

    Args:
        size: of each dimension, as numbers or in one sequence.
        dtype: of the elements; None takes torch.get_default_dtype().
        device: "cpu", or a GPU, whose ranks reach each other by "cuda_ipc".
        requires_grad: whether autograd records operations on the tensor.
        group: of a tensor on a GPU: whose ranks share it; None is the default group.

    Returns:
        Of that shape, contiguous, with undefined elements.

    Raises:
        ValueError: a size is negative; the group of a GPU's tensor is another backend's, or there
            is none.
        TypeError: a size is missing or no whole number, or dtype no torch.dtype.
        NotImplementedError: the group's ranks cannot map each other's memory of that device.
        torch.OutOfMemoryError: the machine has not that much memory.
    """
    if not size:
        raise TypeError("ringcomm.empty_shared wants a size; () is that of a scalar")
    is_sequence = len(size) == 1 and isinstance(size[0], (tuple, list))
    sizes = [_whole(one) for one in (size[0] if is_sequence else size)]  # type: ignore[union-attr]
    if dtype is None:
        dtype = torch.get_default_dtype()
    place = torch.device(device)
    if place.type == "cpu":
        return _C.empty_shared(sizes, dtype).requires_grad_(requires_grad)
    index: int | None = place.index
    if index is None:
        place = torch.device(place.type, torch.accelerator.current_device_index())
    backend = _backend_of(group, place)
    return _C.empty_shared_on(backend, place, sizes, dtype).requires_grad_(requires_grad)


def is_shared(tensor: Tensor) -> bool:
    """Whether the tensor's elements lie in memory from `empty_shared` of this process.

    Not collective. Views of such tensors are shared; tensors inherited by a fork are the parent's,
    and empty ones have no memory.
    """
    return _C.is_shared(tensor)


def _backend_of(group: dist.ProcessGroup | None, device: torch.device) -> Any:
    """ringcomm's end of a group, for tensors on the device."""
    backend: Any = resolve_group(group)._get_backend(device)
    if not isinstance(backend, _C.ProcessGroupRingcomm):
        raise ValueError(
            f"ringcomm.empty_shared on {device} wants a group whose backend for {device.type}"
            f" tensors is ringcomm, got one with {backend.name()}"
        )
    return backend


def _whole(size: object) -> int:
    """The size of one dimension."""
    if not hasattr(size, "__index__"):
        raise TypeError(f"sizes of ringcomm.empty_shared are whole numbers, got {size!r}")
    number = int(size.__index__())
    if number < 0:
        raise ValueError(f"sizes of ringcomm.empty_shared are not negative, got {number}")
    return number
