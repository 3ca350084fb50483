"""FileStore: tensors by name in files, read and written beside the program, with commits.

What ZeRO-Infinity (Rajbhandari et al. 2021, arXiv 2104.07857, section 5) keeps on NVMe.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ringcomm.parallel.offload.store_index import (
    Entry,
    Index,
    IndexFiles,
    lock_file,
    make_folder,
    open_file,
)
from ringcomm.parallel.offload.transfers import (
    Transfer,
    aligned_size,
    empty_aligned,
    find_engine,
    is_aligned,
)

_log = logging.getLogger("ringcomm")


class FileStore:
    """Tensors of the CPU by name, in one folder, for one process.

        store = FileStore("/mnt/nvme/run1")
        store.put("exp_avg", exp_avg).wait()
        store.commit({"step": 1})
        store.get("exp_avg", out=exp_avg).wait()

    put() and get() return before the bytes have moved; those of one name happen in order. Each
    tensor has two places in the data file, in turn: what was there at the last commit() stays until
    the next, so that a process that ends in between, or a machine, leaves the last commit whole.

    Args:
        path: a folder on the disk to use; made if it is not there. What an earlier store has
            committed there can be read at once.
        keep: whether tensors outlive the store. Otherwise each has one place, in a file without a
            name that goes with the process, and there is nothing to commit.
        engine: "io_uring", "threads" (pread and pwrite), or "auto": io_uring where the build and
            the kernel have it.
        direct: past the page cache (O_DIRECT). None: where the file system has it.
        queue_depth: blocks that are under way at once. Threads are 4 at most.
        block_bytes: a multiple of 4096.

    Attributes:
        engine: "io_uring" or "threads".
        is_direct: whether reads and writes go past the page cache.
        read_bytes, written_bytes: of tensors that were moved so far, in whole blocks.

    Raises:
        ValueError: an option is out of range; the folder's files are damaged or truncated.
        OSError: no folder can be made there; another store has it open, for 5 seconds
            too (EWOULDBLOCK); O_DIRECT is wanted and not to be had (EINVAL).
        RuntimeError: io_uring is wanted and not to be had.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep: bool = True,
        engine: Literal["auto", "io_uring", "threads"] = "auto",
        direct: bool | None = None,
        queue_depth: int = 16,
        block_bytes: int = 1 << 20,
    ) -> None:
        if queue_depth < 1 or block_bytes < 1 or block_bytes % 4096:
            raise ValueError(
                "queue_depth is positive, block_bytes a positive multiple of 4096, got"
                f" {queue_depth} and {block_bytes}"
            )
        self.path = Path(path)
        self.engine, self._engine = find_engine(engine, queue_depth, block_bytes)
        make_folder(self.path)
        self._keeps = keep
        self._fd, self.is_direct = open_file(
            self.path / "data" if keep else self.path, keep, direct
        )
        self._pending: dict[str, Transfer] = {}
        self._close = weakref.finalize(self, _finish, self._fd, self._pending)
        _stores.add(self)
        self.read_bytes = self.written_bytes = 0
        self._failed: dict[str, OSError] = {}  # writes, until the next of the same name
        self._dirty: dict[str, int] = {}  # the place of what was put since the last commit
        self._files = IndexFiles(self.path)
        try:
            lock_file(self._fd, self.path)
            self._load(self._files.recover() if keep else Index())
        except BaseException:
            self.close()
            raise

    def _load(self, index: Index) -> None:
        self._index = index
        self._failed, self._dirty = {}, {}
        ends = [
            offset + aligned_size(entry.num_bytes)
            for entry in index.entries.values()
            for offset in entry.offsets
        ]
        self._end = max(ends, default=0)
        found = os.fstat(self._fd).st_size
        if found < self._end:
            raise ValueError(
                f"{self.path / 'data'} has {found} bytes and its index {self._end}: it was"
                " truncated. Begin in an empty folder"
            )
        if found > self._end > 0:  # tensors that were never committed
            os.ftruncate(self._fd, self._end)

    # ---- tensors

    @property
    def info(self) -> dict[str, Any]:
        """What the last commit() was given; empty before any."""
        return dict(self._index.info)

    @property
    def generation(self) -> int:
        """How many commits there have been."""
        return self._index.generation

    def keys(self) -> list[str]:
        """The names there are."""
        return list(self._index.entries)

    def __contains__(self, key: str) -> bool:
        return key in self._index.entries

    def spec(self, key: str) -> tuple[torch.dtype, torch.Size]:
        """The dtype and shape of a tensor. Raises KeyError: the name is not known."""
        entry = self._index.entries[key]
        return entry.dtype, torch.Size(entry.shape)

    def put(self, key: str, tensor: Tensor) -> Transfer:
        """Starts writing a tensor of the CPU, which is not to change until the transfer ends.

        Raises:
            ValueError: the name is known with another dtype or shape, or it is on another device.
            OSError: there is no room (ENOSPC).
        """
        self._check_open()
        if tensor.device.type != "cpu":
            raise ValueError(f"a FileStore takes tensors of the CPU, got one of {tensor.device}")
        self._settle(key)
        self._failed.pop(key, None)
        entry = self._index.entries.get(key) or self._add(key, tensor)
        _check_same(key, entry, tensor)
        if self._keeps and key not in self._dirty:
            if not self._dirty:
                # Before anything is written over the commit before the last. Also where that is
                # gone already: an earlier sync may have failed.
                with self._naming("writing"):
                    self._files.forget(self.generation - 1)
            self._dirty[key] = 1 - entry.current if entry.current is not None else 0
        source = tensor.detach().contiguous()
        memory = source
        if self.is_direct and not is_aligned(source):
            memory = empty_aligned(source.nbytes)
            memory[: source.nbytes].copy_(source.view(-1).view(torch.uint8))
        offset = entry.offsets[self._dirty.get(key, 0)]
        return self._start(key, True, tensor, memory, offset)

    def get(self, key: str, out: Tensor) -> Transfer:
        """Starts reading a tensor, which has its values when the transfer has ended.

        Raises:
            KeyError: the name is not known.
            ValueError: `out` is not contiguous on the CPU, or of another dtype or shape.
            OSError: the last write of this name failed.
        """
        self._check_open()
        if key not in self._index.entries:
            raise KeyError(f"{self.path} has no tensor {key!r}")
        entry = self._index.entries[key]
        _check_same(key, entry, out)
        if out.device.type != "cpu" or not out.is_contiguous():
            raise ValueError(f"{key} is read into a contiguous tensor of the CPU")
        self._settle(key)
        if key in self._failed:
            raise self._failed[key]
        place = self._dirty.get(key, entry.current or 0)
        is_straight = not self.is_direct or is_aligned(out)
        memory = out if is_straight else empty_aligned(out.nbytes)
        return self._start(key, False, out, memory, entry.offsets[place])

    def _start(
        self, key: str, is_write: bool, tensor: Tensor, memory: Tensor, offset: int
    ) -> Transfer:
        num_bytes = aligned_size(tensor.nbytes) if self.is_direct else tensor.nbytes
        handle = self._engine.start(is_write, self._fd, memory.data_ptr(), num_bytes, offset)
        if is_write:
            self.written_bytes += num_bytes
        else:
            self.read_bytes += num_bytes
        what = f"{'writing' if is_write else 'reading'} {key} at {self.path}"
        for other in [k for k, transfer in self._pending.items() if transfer.is_done()]:
            self._settle(other)
        transfer = Transfer(what, tensor, memory, handle, is_read=not is_write)
        self._pending[key] = transfer
        return transfer

    def _settle(self, key: str) -> None:
        """Waits for what is under way of a name; a read that failed is its caller's to hear of."""
        if (pending := self._pending.pop(key, None)) is None:
            return
        try:
            pending.wait()
        except OSError as error:
            if not pending.is_read:
                self._failed[key] = error

    def _settle_all(self) -> None:
        for key in list(self._pending):
            self._settle(key)

    def _add(self, key: str, tensor: Tensor) -> Entry:
        size = aligned_size(tensor.nbytes)
        num_places = 2 if self._keeps else 1
        if size:
            with self._naming(f"no room for {key}, {size * num_places} bytes,"):
                os.posix_fallocate(self._fd, self._end, size * num_places)
        offsets = [self._end + place * size for place in range(num_places)]
        self._end += size * num_places
        entry = Entry(tensor.dtype, tuple(tensor.shape), offsets)
        self._index.entries[key] = entry
        return entry

    # ---- commits

    def commit(self, info: dict[str, Any] | None = None) -> None:
        """Makes what was put until now, and `info`, the state that is found after a crash.

        Raises:
            ValueError: the store was made with keep=False, or is closed.
            OSError: a write failed, and has not been made good by another put(); the index could
                not be written (ENOSPC: free space and commit again). The last commit stays.
        """
        self._check_open()
        if not self._keeps:
            raise ValueError("a FileStore with keep=False has nothing to commit")
        self._settle_all()
        if self._failed:
            raise next(iter(self._failed.values()))
        with self._naming(f"commit {self.generation + 1}"):
            try:
                os.fdatasync(self._fd)
            except OSError as error:
                # The kernel may drop what it could not write: the next fdatasync would succeed.
                text = f"{self.path} could not be synced: {os.strerror(error.errno or 0)}"
                self._failed = dict.fromkeys(self._dirty, OSError(error.errno, text))
                raise
            entries = {
                key: dataclasses.replace(entry, current=self._dirty.get(key, entry.current))
                for key, entry in self._index.entries.items()
            }
            index = Index(self.generation + 1, dict(info or {}), entries)
            self._files.write(index)
            # Before sync(), which may fail: a process that opens the folder finds this commit.
            self._index, self._dirty = index, {}
            self._files.sync()

    def roll_back(self) -> None:
        """Goes back to the commit before the last: for ranks of which one has crashed before its.

        Raises:
            ValueError: it is no more: tensors have been put since the last.
            OSError: the file system failed.
        """
        self._check_open()
        previous = self._files.read(self.generation - 1)
        if previous is None:
            raise ValueError(f"{self.path} has no commit before {self.generation} any more")
        self._settle_all()
        with self._naming("going back"):
            self._files.forget(self.generation)
            self._load(previous)

    def clear(self) -> None:
        """Removes all tensors and commits. Raises OSError: the file system failed."""
        self._check_open()
        self._settle_all()
        with self._naming("clearing"):
            self._files.forget(self.generation, self.generation - 1)
            self._load(Index())
            os.ftruncate(self._fd, 0)

    @contextlib.contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """Gives errors of the file system the path."""
        try:
            yield
        except OSError as error:
            code = error.errno or errno.EIO
            raise OSError(code, f"{what} at {self.path}: {os.strerror(code)}") from error

    def _check_open(self) -> None:
        if self._fd < 0:
            raise ValueError(
                f"the FileStore at {self.path} is closed, or was opened before a fork: each process"
                " opens its own"
            )

    def close(self) -> None:
        """Waits for what is under way, and lets the folder go; a second call does nothing."""
        if self._fd < 0:
            return
        self._settle_all()
        for error in self._failed.values():
            _log.warning("ringcomm: %s", error)
        self._failed = {}
        self._close()
        self._fd = -1  # the number may be another file's from now on

    def _leave_to_parent(self) -> None:
        """In a forked child: the folder is locked until the last copy of the file is closed."""
        if self._close.detach() is not None:
            os.close(self._fd)
        self._fd = -1


def _finish(fd: int, pending: dict[str, Transfer]) -> None:
    """Closes a file behind its last transfer: its number may be another file's then."""
    for transfer in pending.values():
        transfer.end()
    pending.clear()
    os.close(fd)


_stores: weakref.WeakSet[FileStore] = weakref.WeakSet()


os.register_at_fork(after_in_child=lambda: [*map(FileStore._leave_to_parent, _stores)])


def _check_same(key: str, entry: Entry, tensor: Tensor) -> None:
    if (entry.dtype, entry.shape) != (tensor.dtype, tuple(tensor.shape)):
        raise ValueError(
            f"{key} is {entry.dtype} of shape {entry.shape}, got {tensor.dtype} of"
            f" {tuple(tensor.shape)}"
        )
