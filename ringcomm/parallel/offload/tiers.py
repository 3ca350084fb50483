"""Where training state lives when it is not at work: memory of the host, or files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from ringcomm.parallel.offload.file_store import FileStore
from ringcomm.parallel.offload.transfers import BufferPool, Transfer, aligned_size, empty_row


@dataclasses.dataclass(eq=False)
class Loan:
    """A row that is in memory for a while, or on its way there."""

    key: str
    _row: Tensor
    _transfer: Transfer | None = None

    def wait(self) -> Tensor:
        """The row; blocks until it is there. Raises OSError: the file system failed."""
        if self._transfer is not None:
            self._transfer.wait()
            self._transfer = None
        return self._row


class Tier:
    """Rows by name, tensors of one dimension, here in memory outside of torch's allocator.

    loan = tier.fetch("layer1")  # ahead of time
    row = loan.wait()
    ...                          # read it, write it
    tier.give_back(loan, is_written=True)

    row() and put() do so at once.
    """

    def __init__(self) -> None:
        self._rows: dict[str, Tensor] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def new(self, key: str, num_elems: int, dtype: torch.dtype) -> Loan:
        """A row that is to be written whole, and replaces an old one: its values are anything."""
        if key not in self._rows:
            self._rows[key] = empty_row(num_elems, dtype)
        return self.fetch(key)

    def fetch(self, key: str) -> Loan:
        """Starts bringing a row. Raises KeyError: none is there; OSError: writing it failed."""
        return Loan(key, self._rows[key])

    def give_back(self, loan: Loan, *, is_written: bool) -> None:
        """Ends a loan, whose row is not to be touched any more. Raises OSError: see FileStore."""

    @contextmanager
    def row(self, key: str, *, is_written: bool = False) -> Iterator[Tensor]:
        """A row to be read or written inside. Raises as fetch() and give_back() do."""
        loan = self.fetch(key)
        yield loan.wait()
        self.give_back(loan, is_written=is_written)

    def put(self, key: str, value: Tensor) -> None:
        """Makes or replaces a row. Raises as give_back() does."""
        loan = self.new(key, value.numel(), value.dtype)
        loan.wait().copy_(value)
        self.give_back(loan, is_written=True)

    def close(self) -> None:
        """Lets everything go."""
        self._rows = {}

    @property
    def memory_bytes(self) -> int:
        """Of the host's memory that it takes now, with the buffers that are not lent."""
        return sum(aligned_size(row.nbytes) for row in self._rows.values())


class FileTier(Tier):
    """Rows in a FileStore, which come and go through a few buffers; one pool may serve several."""

    def __init__(self, store: FileStore, pool: BufferPool) -> None:
        self.store, self._pool = store, pool

    def __contains__(self, key: str) -> bool:
        return key in self.store

    def new(self, key: str, num_elems: int, dtype: torch.dtype) -> Loan:
        """See Tier."""
        return Loan(key, self._pool.take(num_elems, dtype))

    def fetch(self, key: str) -> Loan:
        """See Tier."""
        dtype, shape = self.store.spec(key)
        row = self._pool.take(shape.numel(), dtype)
        return Loan(key, row, self.store.get(key, row))

    def give_back(self, loan: Loan, *, is_written: bool) -> None:
        """See Tier."""
        row = loan.wait()
        self._pool.give(row, self.store.put(loan.key, row) if is_written else None)

    def close(self) -> None:
        """See Tier."""
        self.store.close()

    @property
    def memory_bytes(self) -> int:
        """See Tier."""
        return self._pool.num_bytes


def make_tier(to: Literal["cpu", "nvme"], path: Any, *, keep: bool, pool: BufferPool) -> Tier:
    """The tier of a name, "cpu" or "nvme", which takes a folder's path. Raises as FileStore."""
    if to not in ("cpu", "nvme"):
        raise ValueError(f'state goes to "cpu" or "nvme", got {to!r}')
    if (to == "nvme") != (path is not None):
        raise ValueError('"nvme" takes the path of a folder on the disk to use, "cpu" none')
    return Tier() if to == "cpu" else FileTier(FileStore(path, keep=keep), pool)


def split_row(row: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """A row of equal parts, by name."""
    if not names:
        return {}
    return dict(zip(names, row.view(len(names), -1), strict=True))
