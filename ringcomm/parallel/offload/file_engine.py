"""Asynchronous reads and writes of files by a few threads, in blocks."""

import ctypes
import errno
import os
import signal
import threading
import weakref
from queue import SimpleQueue
from typing import Any, NamedTuple

from torch import Tensor

# A thread handles one block at a time; more threads than this bring no gain.
_MAX_THREADS = 4
# The program's 8 MiB would count in full against RLIMIT_DATA.
_STACK_BYTES = 1 << 20

END_OF_FILE = -1  # in place of an errno


class FileTransfer:
    """A read or write in progress, which ends when all of its blocks have."""

    def __init__(self, num_blocks: int) -> None:
        self._num_left, self._error = num_blocks, 0
        self._lock, self._ended, self._pid = threading.Lock(), threading.Event(), os.getpid()
        if num_blocks == 0:
            self._ended.set()

    def finish_block(self, error: int) -> None:
        """Records that a block has ended, and keeps the first error."""
        with self._lock:
            self._error = self._error or error
            self._num_left -= 1
            if self._num_left == 0:
                self._ended.set()

    def is_done(self) -> bool:
        """Whether wait() would return at once."""
        return self._num_left == 0

    def wait(self) -> int:
        """Blocks until it ends; returns 0, the errno of the first error, or END_OF_FILE.

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

    def run(self) -> int:
        """Reads or writes all of it, also if the system transfers less than requested."""
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
        transfer, code = block.transfer, block.run()
        del block  # not kept while the thread waits for the next one
        transfer.finish_block(code)
        del transfer


class FileEngine:
    """Threads that read and write files in blocks; several blocks are in progress at once.

    For files opened with O_DIRECT, block_bytes and the addresses, offsets and sizes of transfers
    must be multiples of the file system's alignment; the engine does not check this.

    Raises RuntimeError if no thread can be started. Fewer threads than wanted are enough.
    """

    def __init__(self, queue_depth: int, block_bytes: int) -> None:
        if queue_depth < 1 or block_bytes < 1:
            raise ValueError("queue_depth and block_bytes must be positive")
        self._block_bytes, self._pid = block_bytes, os.getpid()
        self._queue: _Queue = SimpleQueue()
        threads: list[threading.Thread] = []
        old_bytes = threading.stack_size(_STACK_BYTES)
        try:
            while len(threads) < min(queue_depth, _MAX_THREADS):
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
        self, is_write: bool, fd: int, memory: Tensor, num_bytes: int, offset: int
    ) -> FileTransfer:
        """Starts a transfer from or to a tensor's first bytes.

        `num_bytes` may exceed the tensor, but not its storage.
        """
        if self._pid != os.getpid():
            raise RuntimeError(
                "ringcomm: this process was forked from the one that opened the file engine, and"
                " has none of its threads; open files after forking"
            )
        view = memoryview((ctypes.c_char * num_bytes).from_address(memory.data_ptr())).cast("B")
        begins = range(0, num_bytes, self._block_bytes)
        transfer = FileTransfer(len(begins))
        for begin in begins:
            part = view[begin : begin + self._block_bytes]
            self._queue.put(_Block(is_write, fd, part, offset + begin, memory, transfer))
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


def shared_engine(queue_depth: int, block_bytes: int) -> FileEngine:
    """The engine of this process with these options; raises as FileEngine."""
    key = os.getpid(), queue_depth, block_bytes
    if (found := _engines.get(key)) is None:
        _engines[key] = found = FileEngine(queue_depth, block_bytes)
    return found
