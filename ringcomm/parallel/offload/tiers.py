"""Storage for training state that is not in use: host memory or files."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from ringcomm.parallel.offload.file_store import FileStore
from ringcomm.parallel.offload.transfers import BufferPool, Transfer, empty_row


@dataclasses.dataclass(eq=False)
class RowHandle:
    """A fetched row: in memory until it is released, or being read."""

    key: str
    _row: Tensor
    _transfer: Transfer | None = None

    def wait(self) -> Tensor:
        """The row; blocks until it is read. Raises OSError if the file system failed."""
        if self._transfer is not None:
            self._transfer.wait()
            self._transfer = None
        return self._row


class Tier:
    """Named rows: one-dimensional tensors, in this class in memory outside torch's allocator.

    fetch() begins to read a row, wait() of its handle returns it, and release() ends its use. row()
    and put() combine these calls.
    """

    keeps_memory = True  # a row is in the same memory every time

    def __init__(self, *, is_pinned: bool = False) -> None:
        self._rows: dict[str, Tensor] = {}
        self._is_pinned = is_pinned

    def pinned(self) -> "Tier":
        """Another tier in the same place, whose rows are in pinned memory while they are used."""
        return Tier(is_pinned=True)

    def new(self, key: str, num_elems: int, dtype: torch.dtype) -> RowHandle:
        """A row to be fully written, which replaces an old one: its values are undefined."""
        if key not in self._rows:
            self._rows[key] = empty_row(num_elems, dtype, is_pinned=self._is_pinned)
        return self.fetch(key)

    def fetch(self, key: str) -> RowHandle:
        """Starts reading a row. Raises KeyError for an unknown name, OSError if a write failed."""
        return RowHandle(key, self._rows[key])

    def release(self, handle: RowHandle, *, is_written: bool) -> None:
        """Ends the use of a row. Raises OSError: see FileStore."""

    @contextmanager
    def row(self, key: str, *, is_written: bool = False) -> Iterator[Tensor]:
        """A context with a row to read or write. Raises as fetch() and release() do."""
        handle = self.fetch(key)
        yield handle.wait()
        self.release(handle, is_written=is_written)

    def put(self, key: str, value: Tensor) -> None:
        """Adds or replaces a row. Raises as release() does."""
        handle = self.new(key, value.numel(), value.dtype)
        handle.wait().copy_(value)
        self.release(handle, is_written=True)

    def close(self) -> None:
        """Releases everything."""
        self._rows = {}


class FileTier(Tier):
    """Rows in a FileStore, transferred through a few buffers."""

    keeps_memory = False

    def __init__(self, store: FileStore, *, is_pinned: bool = False) -> None:
        self.store, self._pool = store, BufferPool(is_pinned=is_pinned)

    def pinned(self) -> "FileTier":
        """See Tier."""
        return FileTier(self.store, is_pinned=True)

    def new(self, key: str, num_elems: int, dtype: torch.dtype) -> RowHandle:
        """See Tier."""
        return RowHandle(key, self._pool.take(num_elems, dtype))

    def fetch(self, key: str) -> RowHandle:
        """See Tier."""
        row = self._pool.take(*self.store.spec(key))
        return RowHandle(key, row, self.store.get(key, row))

    def release(self, handle: RowHandle, *, is_written: bool) -> None:
        """See Tier."""
        row = handle.wait()
        self._pool.give(row, self.store.put(handle.key, row) if is_written else None)

    def close(self) -> None:
        """See Tier."""
        self.store.close()


def make_tier(to: Literal["cpu", "nvme"], path: Any) -> Tier:
    """Makes the tier "cpu", or "nvme" with a folder's path. Raises as FileStore."""
    if to not in ("cpu", "nvme"):
        raise ValueError(f'the state must be offloaded to "cpu" or "nvme", got {to!r}')
    if (to == "nvme") != (path is not None):
        raise ValueError('"nvme" needs path=, a folder on the disk; "cpu" must have no path')
    return Tier() if to == "cpu" else FileTier(FileStore(path))
