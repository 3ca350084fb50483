"""Transfers of tensors to and from files by a few threads, in blocks, and memory for them.

Each block has a checksum, which the thread that moves it computes.
"""

import ctypes
import errno
import functools
import mmap
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

# The alignment of sizes, offsets and addresses that O_DIRECT needs on common file systems.
_ALIGNMENT = 4096
# From this size on, huge pages: a block is one memory segment for the disk, instead of 256.
_HUGE_BYTES = 2 << 20
_MAX_IDLE = 2  # buffers of one size
# Of all sizes together, if they are many bytes: so many times the largest.
_MANY_BYTES, _MAX_LARGEST = 1 << 20, 4
# A thread handles one block at a time; more threads bring no gain.
_NUM_THREADS = 4
# The program's 8 MiB would count in full against RLIMIT_DATA.
_STACK_BYTES = 1 << 20

_END_OF_FILE, _DAMAGED = -1, -2  # in place of an errno
_WORD_BYTES = 8


def checksum(data: memoryview) -> int:
    """The sum of the words of 8 bytes, modulo 2**64; what is left at the end is one more.

    numpy's sum, because torch's would start threads in each of those that move blocks.
    """
    num_words = data.nbytes // _WORD_BYTES
    rest = int.from_bytes(data[num_words * _WORD_BYTES :], "little")
    return (int(np.frombuffer(data, np.uint64, num_words).sum()) + rest) % 2**64 if data else 0


def aligned_size(num_bytes: int) -> int:
    """The bytes rounded up to whole blocks."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def empty_row(num_elems: int, dtype: torch.dtype, *, is_pinned: bool = False) -> Tensor:
    """A one-dimensional, page-aligned tensor in whole pages, outside torch's allocator.

    It is unmapped with the last tensor that refers to it. Pinned memory is of torch's allocator.
    """
    num_bytes = num_elems * dtype.itemsize
    if is_pinned:
        with_edge = aligned_size(num_bytes) + _ALIGNMENT
        memory = torch.empty(with_edge, dtype=torch.uint8, device="cpu", pin_memory=True)
        memory = memory[-memory.data_ptr() % _ALIGNMENT :]
    else:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        pages = mmap.mmap(-1, max(_ALIGNMENT, aligned_size(num_bytes)), flags=flags)
        if num_bytes >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                pages.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
    return memory[:num_bytes].view(dtype)


def edges_in_row(tensors: Sequence[Tensor], alignment: int = 1) -> list[int]:
    """Where tensors begin in a row of bytes, and where the last one ends."""
    edges, end = list[int](), 0
    for tensor in tensors:
        step = max(alignment, tensor.itemsize)
        edges.append(-(-end // step) * step)
        end = edges[-1] + tensor.nbytes
    return [*edges, end]


def views_in_row(row: Tensor, tensors: Sequence[Tensor], alignment: int = 1) -> list[Tensor]:
    """Tensors like these in a row of bytes."""
    return [
        row[begin : begin + like.nbytes].view(like.dtype).view(like.shape)
        for begin, like in zip(edges_in_row(tensors, alignment), tensors, strict=False)
    ]


def is_aligned(tensor: Tensor) -> bool:
    """Whether a contiguous tensor begins on a page and its memory extends to a whole last block."""
    room = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    return tensor.data_ptr() % _ALIGNMENT == 0 and room >= aligned_size(tensor.nbytes)


# ---- threads

_Queue = SimpleQueue[Callable[[], object]]


def _work_on(queue: _Queue) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        move = queue.get()
        move()
        del move  # whose memory is not kept while the thread waits for the next one


@functools.cache
def _queue_of(pid: int) -> _Queue:
    """What the threads of this process work on; they start with its first transfer.

    Raises RuntimeError if none can be started. Fewer threads than wanted are enough.
    """
    queue: _Queue = SimpleQueue()
    old_bytes = threading.stack_size(_STACK_BYTES)
    try:
        for number in range(_NUM_THREADS):
            # At exit stores wait for their transfers, and the threads go with the process.
            thread = threading.Thread(
                target=_work_on, args=(queue,), name="ringcomm-file", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:
                if number > 0:
                    break
                raise RuntimeError(
                    f"ringcomm: the thread ringcomm-file could not be started: {error}"
                ) from error
    finally:
        threading.stack_size(old_bytes)
    return queue


def in_file_thread() -> bool:
    """Whether this thread moves blocks, and therefore must not wait for them."""
    return threading.current_thread().name == "ringcomm-file"


class Transfer:
    """A read or write of a row that may still be in progress; it ends when all its blocks have.

    For a file opened with O_DIRECT the row's address, block_bytes, num_bytes and the offset are
    multiples of the file system's alignment.

    Args:
        what: for messages, such as "writing weight.0 at /mnt/nvme".
        row: kept until the end. `num_bytes` may exceed it, but not its storage.
        offset: of the row in the file.
        block_bytes: of a block.
        expected: the checksums of what is read; None to write.

    Attributes:
        is_read: whether it reads.
        checksums: of the blocks; of those that are written known when it has ended.
    """

    def __init__(
        self,
        what: str,
        row: Tensor,
        fd: int,
        num_bytes: int,
        offset: int,
        block_bytes: int,
        expected: list[int] | None = None,
    ) -> None:
        begins = range(0, num_bytes, block_bytes)
        self._what, self._row, self._fd, self.is_read = what, row, fd, expected is not None
        self.checksums = [0] * len(begins) if expected is None else expected
        self._num_left, self._error, self._bad_offset = len(begins), 0, -1
        self._lock, self._ended, self._pid = threading.Lock(), threading.Event(), os.getpid()
        if not begins:
            self._ended.set()
        memory = (ctypes.c_char * num_bytes).from_address(row.data_ptr())
        view, queue = memoryview(memory).cast("B"), _queue_of(self._pid)
        for number, begin in enumerate(begins):
            used = max(0, min(block_bytes, row.nbytes - begin))  # of it; the rest is padding
            part = view[begin : begin + block_bytes]
            queue.put(partial(self._run, number, part, used, offset + begin))

    def _run(self, number: int, view: memoryview, used: int, offset: int) -> None:
        """Moves a block, and keeps the first error."""
        try:
            if not self.is_read:
                self.checksums[number] = checksum(view[:used])
            error = _move(self.is_read, self._fd, view, offset)
            if self.is_read and not error and checksum(view[:used]) != self.checksums[number]:
                error = _DAMAGED
        except BaseException:  # out of memory; who waits must hear of it
            error = errno.ENOMEM
        with self._lock:
            if error and not self._error:
                self._error, self._bad_offset = error, offset
            self._num_left -= 1
            if self._num_left == 0:
                self._ended.set()

    def is_done(self) -> bool:
        """Whether wait() would return at once."""
        return self._num_left == 0

    def wait_for_end(self) -> None:
        """Blocks until it ends, with an error or without.

        Raises RuntimeError in a forked child if it was in progress at the fork.
        """
        if self._pid == os.getpid():
            self._ended.wait()
        elif not self.is_done():  # without a lock, which a thread may have held at the fork
            raise RuntimeError(
                "ringcomm: this file transfer was in progress when the process was forked, and"
                " completes in the parent only; wait for transfers before forking"
            )

    def wait(self) -> Tensor:
        """Blocks until it ends; returns the row that was read or written.

        Raises OSError with the errno of the file system; EIO if the file is too short, or has other
        bytes than were written. In a forked child as wait_for_end().
        """
        self.wait_for_end()
        code = self._error
        if code == _DAMAGED:
            raise OSError(
                errno.EIO,
                f"{self._what}: the block at byte {self._bad_offset} of its file is not what was"
                " written there: the disk, or another program, has changed it. Continue from a"
                " checkpoint",
            )
        if code == _END_OF_FILE:
            raise OSError(errno.EIO, f"{self._what}: the file is too short; it was truncated")
        if code == errno.ENOSPC:
            raise OSError(code, f"{self._what}: the disk is full; free space or use another path")
        if code != 0:
            raise OSError(code, f"{self._what}: {os.strerror(code)}")
        return self._row


def _move(is_read: bool, fd: int, view: memoryview, offset: int) -> int:
    """Reads or writes all of a block, also if the system transfers less than requested."""
    move = os.preadv if is_read else os.pwritev
    while view:
        try:
            num_bytes = move(fd, [view], offset)
        except OSError as error:
            return error.errno or errno.EIO
        if num_bytes == 0:
            return _END_OF_FILE if is_read else errno.ENOSPC
        view, offset = view[num_bytes:], offset + num_bytes
    return 0


class BufferPool:
    """Buffers by size; a buffer that is being written is free again after the write.

    At most two buffers of a size are kept or being written: the next one waits for the oldest. All
    together have at most four times the bytes of the largest, or 1 MiB.
    """

    def __init__(self, *, is_pinned: bool = False) -> None:
        self._is_pinned = is_pinned
        # By bytes, the size that was used last at the end; of a size the first to be free first.
        self._idle: dict[int, deque[tuple[Transfer | None, Tensor]]] = {}

    def take(self, num_elems: int, dtype: torch.dtype) -> Tensor:
        """A one-dimensional buffer with undefined values.

        Raises OSError if the write of its former contents failed.
        """
        num_bytes = num_elems * dtype.itemsize
        idle = self._idle.get(aligned_size(num_bytes), deque())
        is_free = bool(idle) and (idle[0][0] is None or idle[0][0].is_done())
        if not is_free and len(idle) < _MAX_IDLE:
            return empty_row(num_elems, dtype, is_pinned=self._is_pinned)
        return _oldest(idle)[:num_bytes].view(dtype)

    def give(self, buffer: Tensor, transfer: Transfer | None) -> None:
        """Returns a buffer, which is free when the transfer ends. Raises OSError: see take()."""
        size, begin = aligned_size(buffer.nbytes), buffer.storage_offset() * buffer.element_size()
        whole = torch.empty(0, dtype=torch.uint8, device="cpu")
        whole.set_(buffer.untyped_storage(), begin, (size,), (1,))
        idle = self._idle[size] = self._idle.pop(size, deque())
        idle.append((transfer, whole))
        while len(idle) > _MAX_IDLE:
            _oldest(idle)
        while self.num_bytes > max(_MANY_BYTES, _MAX_LARGEST * max(self._idle)):
            _oldest(next(filter(None, self._idle.values())))

    @property
    def num_bytes(self) -> int:
        """Bytes of the free buffers."""
        return sum(whole.nbytes for idle in self._idle.values() for _, whole in idle)


def _oldest(idle: deque[tuple[Transfer | None, Tensor]]) -> Tensor:
    transfer, whole = idle.popleft()
    if transfer is not None:
        transfer.wait()
    return whole
