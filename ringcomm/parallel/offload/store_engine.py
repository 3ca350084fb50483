"""Reads and writes of a FileStore that are under way, and what does them."""

from __future__ import annotations

import errno
import logging
import os
import weakref
from typing import Any, Literal

from torch import Tensor

from ringcomm import _C

_log = logging.getLogger("ringcomm")


class Transfer:
    """A read or write that may still be under way."""

    def __init__(
        self, what: str, tensor: Tensor, memory: Tensor, handle: _C.FileTransfer, *, is_read: bool
    ) -> None:
        self._what = what
        self._tensor, self._memory = tensor, memory  # kept until it ends
        self._handle = handle
        self.is_read = is_read
        self._is_copied = not is_read or memory.data_ptr() == tensor.data_ptr()

    def end(self) -> int:
        """Blocks until it ends; 0, or what went wrong: an errno, -1 at the end of the file."""
        return self._handle.wait()

    def is_done(self) -> bool:
        """Whether wait() would return, or raise, at once."""
        return self._handle.is_done()

    def wait(self) -> Tensor:
        """Blocks until it ends; returns the tensor that was read or written.

        Raises:
            OSError: the file system failed, with its errno; the file ends too early (EIO).
        """
        code = self.end()
        if code == -1:
            raise OSError(errno.EIO, f"{self._what}: the file ends before it; it was truncated")
        if code == errno.ENOSPC:
            raise OSError(code, f"{self._what}: the disk is full; free space or take another path")
        if code != 0:
            raise OSError(code, f"{self._what}: {os.strerror(code)}")
        if not self._is_copied:
            as_bytes = self._memory[: self._tensor.nbytes].view(self._tensor.dtype)
            self._tensor.copy_(as_bytes.view(self._tensor.shape))
            self._is_copied = True
        return self._tensor


# The stores of a process share their engines, whose threads have stacks. Weakly: the last ends it.
_engines: weakref.WeakValueDictionary[Any, _C.FileEngine] = weakref.WeakValueDictionary()


def shared_engine(kind: str, queue_depth: int, block_bytes: int) -> _C.FileEngine:
    """The engine of this process with these options.

    Raises:
        RuntimeError: the build or the kernel lacks it.
    """
    key = os.getpid(), kind, queue_depth, block_bytes
    found = _engines.get(key)
    if found is None:
        _engines[key] = found = _C.FileEngine(kind, queue_depth, block_bytes)
    return found


def find_engine(
    name: str, queue_depth: int, block_bytes: int
) -> tuple[Literal["io_uring", "threads"], _C.FileEngine]:
    """What FileStore's option of that name stands for.

    Raises:
        ValueError: it is none of the three.
        RuntimeError: io_uring is wanted and not to be had.
    """
    if name not in ("auto", "io_uring", "threads"):
        raise ValueError(f'engine is "auto", "io_uring" or "threads", got {name!r}')
    if name != "threads":
        try:
            return "io_uring", shared_engine("io_uring", queue_depth, block_bytes)
        except RuntimeError as error:
            if name == "io_uring":
                raise
            _log.info("ringcomm: files are read and written by threads: %s", error)
    return "threads", shared_engine("threads", queue_depth, block_bytes)
