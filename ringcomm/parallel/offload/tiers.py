"""Where training state lives when it is not at work: memory of the host, or files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ringcomm.parallel.offload.buffer_pool import BufferPool, aligned_size, empty_aligned
from ringcomm.parallel.offload.file_store import FileStore
from ringcomm.parallel.offload.store_engine import Transfer


class Loan:
    """A row that is in memory for a while, or on its way there."""

    def __init__(self, key: str, row: Tensor, transfer: Transfer | None = None) -> None:
        self.key = key
        self._row = row
        self._transfer = transfer

    def wait(self) -> Tensor:
        """The row; blocks until it is there.

        Raises:
            OSError: the file system failed.
        """
        if self._transfer is not None:
            self._transfer.wait()
            self._transfer = None
        return self._row


class Tier(ABC):
    """Rows by name: tensors of one dimension, of the CPU.

    loan = tier.fetch("layer1")  # ahead of time
    row = loan.wait()
    ...                          # read it, write it
    tier.give_back(loan, is_written=True)
    """

    @abstractmethod
    def __contains__(self, key: str) -> bool:
        """Whether there is a row of this name."""

    @abstractmethod
    def new(self, key: str, num_elems: int, dtype: torch.dtype) -> Loan:
        """A row that is to be written whole, and replaces an old one: its values are anything."""

    @abstractmethod
    def fetch(self, key: str) -> Loan:
        """Starts bringing a row.

        Raises:
            KeyError: there is none.
            OSError: writing it has failed.
        """

    @abstractmethod
    def give_back(self, loan: Loan, *, is_written: bool) -> None:
        """Ends a loan; what was written moves back beside the program.

        Raises:
            OSError: there is no room.
        """

    @abstractmethod
    def commit(self, info: dict[str, Any]) -> None:
        """Makes the rows as they are what is found after a crash, where that is kept.

        Raises:
            OSError: a write has failed.
        """

    @abstractmethod
    def close(self) -> None:
        """Lets everything go."""

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Of the host's memory that it takes now, buffers included."""


class HostTier(Tier):
    """Rows in the host's memory, outside of torch's allocator for a device."""

    def __init__(self) -> None:
        self._rows: dict[str, Tensor] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def new(self, key: str, num_elems: int, dtype: torch.dtype) -> Loan:
        """See Tier."""
        num_bytes = num_elems * dtype.itemsize
        if key not in self._rows:
            self._rows[key] = empty_aligned(num_bytes)[:num_bytes].view(dtype)
        return self.fetch(key)

    def fetch(self, key: str) -> Loan:
        """See Tier; the row itself."""
        return Loan(key, self._rows[key])

    def give_back(self, loan: Loan, *, is_written: bool) -> None:
        """See Tier; nothing moves."""

    def commit(self, info: dict[str, Any]) -> None:
        """See Tier; memory is not there after a crash."""

    def close(self) -> None:
        """See Tier."""
        self._rows = {}

    @property
    def memory_bytes(self) -> int:
        """See Tier."""
        return sum(aligned_size(row.nbytes) for row in self._rows.values())


class FileTier(Tier):
    """Rows in a FileStore, which come and go through a few buffers.

    Args:
        store: whose tensors they are.
        pool: the buffers; one pool may serve several tiers.
    """

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

    def commit(self, info: dict[str, Any]) -> None:
        """See Tier."""
        self.store.commit(info)

    def close(self) -> None:
        """See Tier."""
        self.store.close()

    @property
    def memory_bytes(self) -> int:
        """See Tier; without what is lent."""
        return self._pool.num_bytes


def make_tier(to: Literal["cpu", "nvme"], path: Any, *, keep: bool, pool: BufferPool) -> Tier:
    """The tier of a name.

    Args:
        to: "cpu" or "nvme".
        path: of the folder, for "nvme".
        keep: see FileStore.
        pool: buffers for "nvme".

    Raises:
        ValueError: the name is another one, or "nvme" lacks a path, or "cpu" has one.
        OSError: see FileStore.
    """
    if to not in ("cpu", "nvme"):
        raise ValueError(f'state goes to "cpu" or "nvme", got {to!r}')
    if (to == "nvme") != (path is not None):
        raise ValueError('"nvme" takes the path of a folder on the disk to use, "cpu" none')
    return HostTier() if to == "cpu" else FileTier(FileStore(path, keep=keep), pool)


def split_row(row: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """A row of equal parts, by name."""
    if not names:
        return {}
    return dict(zip(names, row.view(len(names), -1), strict=True))
