"""Tensors that other ranks of this host can read in place; docs/design/protocol.md."""

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm import _C
from ringcomm.backend import resolve_group
from ringcomm.torch_names import backend_of

_LONGEST_S = 86400.0


def empty_shared(
    *size: int | tuple[int, ...] | list[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    requires_grad: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """A tensor like torch.empty's, in memory that the other ranks of this host can map.

    Not collective. If every rank passes such a tensor, or a contiguous view of one, collectives of
    a ringcomm group run directly on it. Nothing is copied into the shared staging buffer, which
    makes an all_reduce of 256 KiB or more several times faster. Otherwise it is an ordinary CPU
    tensor. Its memory is freed with the last tensor on its storage, independently of the group.

    On a GPU it is torch.empty's tensor, and the call is collective: all ranks of the group call it,
    each for its own device, and map each other's at once. Collectives run directly on ordinary
    tensors of 64 KiB and more too, from their second or third call on; so use it there for the
    calls of a CUDA graph. Where some rank's cannot be mapped (memory that is not shared, or less
    than a sixteenth of the memory free), it warns, and collectives on the tensor are staged.

    Unlike ordinary tensors, such a tensor on the CPU stays shared with a forked child: each process
    sees the other's writes.

    Args:
        size: of each dimension, as numbers or in one sequence.
        dtype: of the elements; None takes torch.get_default_dtype().
        device: "cpu", or a GPU, whose ranks reach each other by "cuda_ipc".
        requires_grad: whether autograd records operations on the tensor.
        group: for a GPU only: the group whose ranks share the tensor; None is the default group.

    Returns:
        A contiguous tensor of that shape, with undefined elements.

    Raises:
        ValueError: a size is negative; or, on a GPU, the group has another backend or does not
            exist.
        TypeError: a size is missing or not a whole number, or dtype is not a torch.dtype.
        NotImplementedError: the group's ranks cannot map each other's memory of that device.
        torch.OutOfMemoryError: the machine does not have enough memory.
    """
    if not size:
        raise TypeError("ringcomm.empty_shared needs a size, got none; pass () for a scalar")
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
    backend: Any = backend_of(resolve_group(group), place)
    if not isinstance(backend, _C.ProcessGroupRingcomm):
        raise ValueError(
            f"ringcomm.empty_shared on {place} needs a group whose backend for {place.type}"
            f" tensors is ringcomm, got one with {backend.name()}"
        )
    tensor, is_mapped = _C.empty_shared_on(backend, place, sizes, dtype)
    if not is_mapped:
        warnings.warn(
            f"ringcomm.empty_shared: the ranks cannot all map each other's tensors on {place}"
            " (memory that no other process can map, or little of it, on one of them): collectives"
            " on this one are staged",
            stacklevel=2,
        )
    return tensor.requires_grad_(requires_grad)


def is_shared(tensor: Tensor) -> bool:
    """Whether the tensor's elements are in memory from `empty_shared` of this process.

    Not collective. True for views of such tensors. False for tensors inherited by a fork, which
    belong to the parent, and for empty tensors, which have no memory.
    """
    return _C.is_shared(tensor)


def release(timeout: float = 1.0) -> bool:
    """Gives freed GPU memory back that ranks of a ringcomm group had mapped; after `empty_cache()`.

    Collectives run directly on tensors in memory that the other ranks have mapped, and the driver
    keeps what a program frees, as by `torch.cuda.empty_cache()`, until they have unmapped it. They
    do so by themselves: in their next call of the group, or within a second while none of their
    collectives runs. This unmaps at once what other ranks have freed, in all groups of this
    process, tells them of what it has freed itself, and waits until they have unmapped that.

    Not collective: the other ranks need not call it. One with a kernel of ringcomm under way
    unmaps nothing until that has ended.

    Args:
        timeout: seconds to wait at most.

    Returns:
        Whether no rank has mapped what this process has freed, and the reverse, any longer.

    Raises:
        ValueError: the timeout is negative.
    """
    if not timeout >= 0:
        raise ValueError(f"the timeout of ringcomm.release must not be negative, got {timeout!r}")
    if "ringcomm._cuda" not in sys.modules:
        return True
    from ringcomm import _cuda

    return _cuda.release(min(float(timeout), _LONGEST_S))


def _whole(size: object) -> int:
    if not hasattr(size, "__index__"):
        raise TypeError(f"sizes of ringcomm.empty_shared must be whole numbers, got {size!r}")
    number = int(size.__index__())
    if number < 0:
        raise ValueError(f"sizes of ringcomm.empty_shared must not be negative, got {number}")
    return number
