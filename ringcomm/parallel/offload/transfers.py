"""Transfers of tensors to and from files by a few threads, in blocks, and memory for them.

Each block has a checksum, which the thread that moves it computes.
"""

import ctypes
import errno
import mmap
import os
import signal
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NamedTuple

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

END_OF_FILE, DAMAGED = -1, -2  # in place of an errno
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


def empty_row(num_elems: int, dtype: torch.dtype, *, is_pinned: bool = False) -> Tensor:
    """A one-dimensional tensor in such memory; or in pinned memory, by torch's allocator for it."""
    num_bytes = num_elems * dtype.itemsize
    if is_pinned:
        with_edge = aligned_size(num_bytes) + _ALIGNMENT
        memory = torch.empty(with_edge, dtype=torch.uint8, device="cpu", pin_memory=True)
        memory = memory[-memory.data_ptr() % _ALIGNMENT :]
    else:
        memory = empty_aligned(num_bytes)
    return memory[:num_bytes].view(dtype)


def is_aligned(tensor: Tensor) -> bool:
    """Whether a contiguous tensor begins on a page and its memory extends to a whole last block."""
    room = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    return tensor.data_ptr() % _ALIGNMENT == 0 and room >= aligned_size(tensor.nbytes)


class FileTransfer:
    """A read or write in progress, which ends when all of its blocks have.

    Attributes:
        checksums: of the blocks that were written; known when it has ended.
        bad_offset: where the first block with an error begins in the file.
    """

    def __init__(self, num_blocks: int) -> None:
        self.checksums, self.bad_offset = [0] * num_blocks, -1
        self._num_left, self._error = num_blocks, 0
        self._lock, self._ended, self._pid = threading.Lock(), threading.Event(), os.getpid()
        if num_blocks == 0:
            self._ended.set()

    def finish_block(self, error: int, offset: int) -> None:
        """Records that a block has ended, and keeps the first error."""
        with self._lock:
            if error and not self._error:
                self._error, self.bad_offset = error, offset
            self._num_left -= 1
            if self._num_left == 0:
                self._ended.set()

    def is_done(self) -> bool:
        """Whether wait() would return at once."""
        return self._num_left == 0

    def wait(self) -> int:
        """Blocks until it ends; returns 0, the errno of the first error, END_OF_FILE or DAMAGED.

        Raises RuntimeError in a forked child if it was in progress at the fork.
        """
        if self._pid == os.getpid():
            self._ended.wait()
        elif not self.is_done():  # without a lock, which a thread may have held at the fork
            raise RuntimeError(
                "ringcomm: this file transfer was in progress when the process was forked, and"
                " completes in the parent only; wait for transfers before forking"
            )
        return self._error


class _Block(NamedTuple):
    is_write: bool
    fd: int
    view: memoryview
    offset: int
    memory: Tensor  # kept until the block ends
    transfer: FileTransfer
    number: int  # of the transfer's blocks
    num_used: int  # bytes of it that are not padding
    expected: int | None  # the checksum of what is read

    def run(self) -> int:
        """Reads or writes all of it, also if the system transfers less than requested."""
        if self.is_write:
            self.transfer.checksums[self.number] = checksum(self.view[: self.num_used])
        code = self._move()
        if code or self.is_write or self.expected is None:
            return code
        return 0 if checksum(self.view[: self.num_used]) == self.expected else DAMAGED

    def _move(self) -> int:
        move = os.pwritev if self.is_write else os.preadv
        view, offset = self.view, self.offset
        while view:
            try:
                num_bytes = move(self.fd, [view], offset)
            except OSError as error:
                return error.errno or errno.EIO
            if num_bytes == 0:
                return errno.ENOSPC if self.is_write else END_OF_FILE
            view, offset = view[num_bytes:], offset + num_bytes
        return 0


_Queue = SimpleQueue["_Block | None"]


def _work_on(queue: _Queue) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while (block := queue.get()) is not None:
        transfer, offset = block.transfer, block.offset
        try:
            code = block.run()
        except BaseException:  # out of memory; who waits must hear of it
            code = errno.ENOMEM
        del block  # not kept while the thread waits for the next one
        transfer.finish_block(code, offset)
        del transfer


class FileEngine:
    """Threads that read and write files in blocks; several blocks are in progress at once.

    For files opened with O_DIRECT, block_bytes and the addresses, offsets and sizes of transfers
    must be multiples of the file system's alignment; the engine does not check this.

    Raises RuntimeError if no thread can be started. Fewer threads than wanted are enough.
    """

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes, self._pid = block_bytes, os.getpid()
        self._queue: _Queue = SimpleQueue()
        threads: list[threading.Thread] = []
        old_bytes = threading.stack_size(_STACK_BYTES)
        try:
            while len(threads) < _NUM_THREADS:
                thread = threading.Thread(
                    target=_work_on, args=(self._queue,), name="ringcomm-file", daemon=True
                )
                thread.start()
                threads.append(thread)
        except RuntimeError as error:
            if not threads:
                raise RuntimeError(
                    f"ringcomm: the thread ringcomm-file could not be started: {error}"
                ) from error
        finally:
            threading.stack_size(old_bytes)
        # Not at exit: stores then wait for their transfers, and the threads go with the process.
        weakref.finalize(self, _end, self._queue, threads, self._pid).atexit = False

    def start(
        self,
        is_write: bool,
        fd: int,
        memory: Tensor,
        num_bytes: int,
        offset: int,
        *,
        num_used: int | None = None,
        expected: Sequence[int] | None = None,
    ) -> FileTransfer:
        """Starts a transfer from or to a tensor's first bytes.

        `num_bytes` may exceed the tensor, but not its storage. Checksums are of the first
        `num_used` bytes, by default all, and of each block. `expected` are those of what is read.
        """
        if self._pid != os.getpid():
            raise RuntimeError(
                "ringcomm: this process was forked from the one that opened the file engine, and"
                " has none of its threads; open files after forking"
            )
        view = memoryview((ctypes.c_char * num_bytes).from_address(memory.data_ptr())).cast("B")
        step = self._block_bytes
        num_used = num_bytes if num_used is None else num_used
        begins = range(0, num_bytes, step)
        transfer = FileTransfer(len(begins))
        for number, begin in enumerate(begins):
            part, place = view[begin : begin + step], offset + begin
            used = max(0, min(step, num_used - begin))
            wanted = None if expected is None else expected[number]
            self._queue.put(
                _Block(is_write, fd, part, place, memory, transfer, number, used, wanted)
            )
        return transfer


def _end(queue: _Queue, threads: list[threading.Thread], pid: int) -> None:
    """Ends an engine's threads after their last block; a forked child has none of them."""
    if pid != os.getpid():
        return
    for _ in threads:
        queue.put(None)
    for thread in threads:
        if thread is not threading.current_thread():  # a garbage collection may happen there
            thread.join()


def in_engine_thread() -> bool:
    """Whether this thread runs transfers, and therefore must not wait for them."""
    return threading.current_thread().name == "ringcomm-file"


# Stores of a process share engines, to save threads. Weak references: the last store ends it.
_engines: weakref.WeakValueDictionary[Any, FileEngine] = weakref.WeakValueDictionary()


def shared_engine(block_bytes: int) -> FileEngine:
    """The engine of this process for such blocks; raises as FileEngine."""
    key = os.getpid(), block_bytes
    if (found := _engines.get(key)) is None:
        _engines[key] = found = FileEngine(block_bytes)
    return found


class Transfer:
    """A read or write that may still be in progress."""

    def __init__(self, what: str, row: Tensor, handle: FileTransfer, *, is_read: bool) -> None:
        self._what, self._row, self.handle, self.is_read = what, row, handle, is_read

    def wait(self) -> Tensor:
        """Blocks until it ends; returns the row that was read or written.

        Raises OSError with the errno of the file system; EIO if the file is too short, or has other
        bytes than were written.
        """
        code = self.handle.wait()
        if code == DAMAGED:
            raise OSError(
                errno.EIO,
                f"{self._what}: the block at byte {self.handle.bad_offset} of its file is not what"
                " was written there: the disk, or another program, has changed it. Continue from a"
                " checkpoint",
            )
        if code == END_OF_FILE:
            raise OSError(errno.EIO, f"{self._what}: the file is too short; it was truncated")
        if code == errno.ENOSPC:
            raise OSError(code, f"{self._what}: the disk is full; free space or use another path")
        if code != 0:
            raise OSError(code, f"{self._what}: {os.strerror(code)}")
        return self._row


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
        is_free = bool(idle) and (idle[0][0] is None or idle[0][0].handle.is_done())
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
