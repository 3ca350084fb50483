"""Tensors that other ranks of this host can read where they lie; docs/design/shared_buffers.md."""

import torch
from torch import Tensor

from ringcomm import _C

__all__ = ["empty_shared", "is_shared"]


def empty_shared(
    *size: int | tuple[int, ...] | list[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    requires_grad: bool = False,
) -> Tensor:
    """A tensor like torch.empty's, in memory that the other ranks of this host can map.

    Not collective. Collectives of a ringcomm group run directly on such tensors where every rank
    passes one (a contiguous view will do): nothing is staged, which makes an all_reduce of 256 KiB
    and more several times faster. In every other way it is a CPU tensor like any other; its memory
    is freed with the last tensor on its storage, whatever has become of the group.

    A forked child shares the memory of the tensors that it inherits, unlike that of others: what
    one process writes the other sees.

    Args:
        size: of each dimension, as numbers or in one sequence.
        dtype: of the elements; None takes torch.get_default_dtype().
        device: "cpu".
        requires_grad: whether autograd records operations on the tensor.

    Returns:
        Of that shape, contiguous, with undefined elements.

    Raises:
        ValueError: a size is negative.
        TypeError: a size is missing or no whole number, or dtype no torch.dtype.
        NotImplementedError: the device is another one.
        torch.OutOfMemoryError: the machine has not that much memory.
    """
    if torch.device(device).type != "cpu":
        raise NotImplementedError(
            f"ringcomm.empty_shared on {device} is not there yet; shared memory is the CPU's"
        )
    if not size:
        raise TypeError("ringcomm.empty_shared wants a size; () is that of a scalar")
    is_sequence = len(size) == 1 and isinstance(size[0], (tuple, list))
    sizes = [_whole(one) for one in (size[0] if is_sequence else size)]  # type: ignore[union-attr]
    if dtype is None:
        dtype = torch.get_default_dtype()
    return _C.empty_shared(sizes, dtype).requires_grad_(requires_grad)


def is_shared(tensor: Tensor) -> bool:
    """Whether the tensor's elements lie in memory from `empty_shared` of this process.

    Not collective. Views of such tensors are shared; tensors inherited by a fork are the parent's,
    and empty ones have no memory.
    """
    return _C.is_shared(tensor)


def _whole(size: object) -> int:
    """The size of one dimension."""
    if not hasattr(size, "__index__"):
        raise TypeError(f"sizes of ringcomm.empty_shared are whole numbers, got {size!r}")
    number = int(size.__index__())
    if number < 0:
        raise ValueError(f"sizes of ringcomm.empty_shared are not negative, got {number}")
    return number
