"""A few buffers of page-aligned memory, used again and again."""

from __future__ import annotations

import mmap
from collections import deque
from contextlib import suppress

import torch
from torch import Tensor

from ringcomm.parallel.offload.store_engine import Transfer

# What O_DIRECT asks of sizes, offsets and addresses on the file systems there are.
ALIGNMENT = 4096
# From here on huge pages: a block is one piece of memory for the disk, in place of 256.
HUGE_BYTES = 2 << 20


def aligned_size(num_bytes: int) -> int:
    """The bytes rounded up to whole blocks."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def empty_aligned(num_bytes: int) -> Tensor:
    """Memory of whole pages, outside of torch's allocator: uint8, at least so many bytes of zeros.

    It goes back to the system with the last tensor that refers to it.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = mmap.mmap(-1, max(ALIGNMENT, aligned_size(num_bytes)), flags=flags)
    if num_bytes >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def is_aligned(tensor: Tensor) -> bool:
    """Whether a contiguous tensor begins on a page, and has room to the end of its last block."""
    room = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    return tensor.data_ptr() % ALIGNMENT == 0 and room >= aligned_size(tensor.nbytes)


class BufferPool:
    """Buffers by size; those that are being written come back when that is done.

    Args:
        max_idle: how many of one size are kept, or may wait to be written: the next one waits for
            the oldest.
    """

    def __init__(self, max_idle: int = 2) -> None:
        self._max_idle = max_idle
        # By bytes, the first to be free first.
        self._idle: dict[int, deque[tuple[Transfer | None, Tensor]]] = {}

    def take(self, num_elems: int, dtype: torch.dtype) -> Tensor:
        """A buffer of one dimension; its values are anything.

        Raises:
            OSError: writing what was in it has failed.
        """
        num_bytes = num_elems * dtype.itemsize
        idle = self._idle.get(aligned_size(num_bytes))
        if not idle:
            return empty_aligned(num_bytes)[:num_bytes].view(dtype)
        is_free = idle[0][0] is None or idle[0][0].is_done()
        if not is_free and len(idle) < self._max_idle:
            return empty_aligned(num_bytes)[:num_bytes].view(dtype)
        return self._oldest(idle)[:num_bytes].view(dtype)

    def give(self, buffer: Tensor, transfer: Transfer | None) -> None:
        """Takes a buffer back, which is free when the transfer ends.

        Raises:
            OSError: see take().
        """
        whole = torch.empty(0, dtype=torch.uint8).set_(buffer.untyped_storage())
        idle = self._idle.setdefault(aligned_size(buffer.nbytes), deque())
        idle.append((transfer, whole))
        while len(idle) > self._max_idle:
            self._oldest(idle)

    def _oldest(self, idle: deque[tuple[Transfer | None, Tensor]]) -> Tensor:
        transfer, whole = idle.popleft()
        if transfer is not None:
            transfer.wait()
        return whole

    def clear(self) -> None:
        """Gives all memory back, once it is written.

        Raises:
            OSError: see take().
        """
        for idle in self._idle.values():
            while idle:
                self._oldest(idle)
        self._idle = {}

    @property
    def num_bytes(self) -> int:
        """Of the buffers that are here now."""
        return sum(whole.nbytes for idle in self._idle.values() for _, whole in idle)
