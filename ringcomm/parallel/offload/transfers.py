"""Transfers of tensors to and from files, and memory for them."""

import errno
import mmap
import os
from collections import deque
from contextlib import suppress

import torch
from torch import Tensor

from ringcomm.parallel.offload.file_engine import END_OF_FILE, FileTransfer

# The alignment of sizes, offsets and addresses that O_DIRECT needs on common file systems.
_ALIGNMENT = 4096
# From this size on, huge pages: a block is one memory segment for the disk, instead of 256.
_HUGE_BYTES = 2 << 20
_MAX_IDLE = 2  # buffers of one size


def aligned_size(num_bytes: int) -> int:
    """The bytes rounded up to whole blocks."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def empty_aligned(num_bytes: int) -> Tensor:
    """Page-aligned memory outside torch's allocator: uint8 zeros, at least this many bytes.

    It is unmapped with the last tensor that refers to it.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = mmap.mmap(-1, max(_ALIGNMENT, aligned_size(num_bytes)), flags=flags)
    if num_bytes >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def empty_row(num_elems: int, dtype: torch.dtype) -> Tensor:
    """A one-dimensional tensor in such memory."""
    num_bytes = num_elems * dtype.itemsize
    return empty_aligned(num_bytes)[:num_bytes].view(dtype)


def is_aligned(tensor: Tensor) -> bool:
    """Whether a contiguous tensor begins on a page and its memory extends to a whole last block."""
    room = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    return tensor.data_ptr() % _ALIGNMENT == 0 and room >= aligned_size(tensor.nbytes)


class Transfer:
    """A read or write that may still be in progress."""

    def __init__(
        self, what: str, tensor: Tensor, memory: Tensor, handle: FileTransfer, *, is_read: bool
    ) -> None:
        self._what, self.handle, self.is_read = what, handle, is_read
        self._tensor, self._memory = tensor, memory  # kept until it ends
        self._is_copied = not is_read or memory.data_ptr() == tensor.data_ptr()

    def wait(self) -> Tensor:
        """Blocks until it ends; returns the tensor that was read or written.

        Raises OSError with the errno of the file system; EIO if the file is too short.
        """
        code = self.handle.wait()
        if code == END_OF_FILE:
            raise OSError(errno.EIO, f"{self._what}: the file is too short; it was truncated")
        if code == errno.ENOSPC:
            raise OSError(code, f"{self._what}: the disk is full; free space or use another path")
        if code != 0:
            raise OSError(code, f"{self._what}: {os.strerror(code)}")
        if not self._is_copied:
            as_bytes = self._memory[: self._tensor.nbytes].view(self._tensor.dtype)
            self._tensor.copy_(as_bytes.view(self._tensor.shape))
            self._is_copied = True
        return self._tensor


class BufferPool:
    """Buffers by size; a buffer that is being written is free again after the write.

    At most two buffers of a size are kept or being written: the next one waits for the oldest.
    """

    def __init__(self) -> None:
        # By bytes, the first to be free first.
        self._idle: dict[int, deque[tuple[Transfer | None, Tensor]]] = {}

    def take(self, num_elems: int, dtype: torch.dtype) -> Tensor:
        """A one-dimensional buffer with undefined values.

        Raises OSError if the write of its former contents failed.
        """
        num_bytes = num_elems * dtype.itemsize
        idle = self._idle.get(aligned_size(num_bytes), deque())
        is_free = bool(idle) and (idle[0][0] is None or idle[0][0].handle.is_done())
        if not is_free and len(idle) < _MAX_IDLE:
            return empty_row(num_elems, dtype)
        return _oldest(idle)[:num_bytes].view(dtype)

    def give(self, buffer: Tensor, transfer: Transfer | None) -> None:
        """Returns a buffer, which is free when the transfer ends. Raises OSError: see take()."""
        whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(buffer.untyped_storage())
        idle = self._idle.setdefault(aligned_size(buffer.nbytes), deque())
        idle.append((transfer, whole))
        while len(idle) > _MAX_IDLE:
            _oldest(idle)

    @property
    def num_bytes(self) -> int:
        """Bytes of the free buffers."""
        return sum(whole.nbytes for idle in self._idle.values() for _, whole in idle)


def _oldest(idle: deque[tuple[Transfer | None, Tensor]]) -> Tensor:
    transfer, whole = idle.popleft()
    if transfer is not None:
        transfer.wait()
    return whole
