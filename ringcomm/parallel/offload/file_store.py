"""FileStore: named tensors in files, with asynchronous reads and writes, and commits.

ZeRO-Infinity (Rajbhandari et al. 2021, arXiv 2104.07857, section 5) uses it for NVMe.
"""

import contextlib
import dataclasses
import errno
import logging
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringcomm.parallel.offload import store_index, transfers
from ringcomm.parallel.offload.store_index import Entry, Index, IndexFiles, Place
from ringcomm.parallel.offload.transfers import Transfer, aligned_size, empty_aligned, is_aligned

_log = logging.getLogger("ringcomm")


class FileStore:
    """Named CPU tensors in one folder, for one process.

        store = FileStore("/mnt/nvme/run1")
        store.put("exp_avg", exp_avg).wait()
        store.commit({"step": 1})
        store.get("exp_avg", out=exp_avg).wait()

    put() and get() return before the transfer ends; transfers of one name are ordered. Each tensor
    has two places in the data file, used alternately. The values of the last commit() stay until
    the next one, so the last commit survives a crash of the process or the machine. Each block has
    a checksum: bytes that were changed, or come from elsewhere, are an error when they are read.

    Args:
        path: a folder on the disk to use; created if it does not exist. The last commit of an
            earlier store in this folder can be read at once.
        keep: whether tensors outlive the store. Otherwise each tensor has one place, in an unnamed
            file that is deleted with the process, and commit() is not supported.
        direct: bypass the page cache (O_DIRECT). None: if the file system supports it.
        queue_depth: blocks in flight at once; at most 4, one for each thread.
        block_bytes: bytes of one read or write, a multiple of 4096.

    Attributes:
        is_direct: whether reads and writes bypass the page cache.
        read_bytes, written_bytes: bytes transferred so far, in whole blocks.

    Raises ValueError for an option out of range and for damaged or truncated files, OSError if the
    folder cannot be created, another store has it open for 5 seconds (EWOULDBLOCK), or direct=True
    is not supported (EINVAL), and RuntimeError if no thread can be started.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep: bool = True,
        direct: bool | None = None,
        queue_depth: int = 16,
        block_bytes: int = 1 << 20,
    ) -> None:
        if queue_depth < 1 or block_bytes < 1 or block_bytes % 4096:
            raise ValueError(
                "queue_depth must be positive and block_bytes a positive multiple of 4096, got"
                f" {queue_depth} and {block_bytes}"
            )
        self.path = Path(path)
        self._block_bytes = block_bytes
        self._engine = transfers.shared_engine(queue_depth, block_bytes)
        store_index.make_folder(self.path)
        self._keeps = keep
        self._fd, self.is_direct = store_index.open_file(
            self.path / "data" if keep else self.path, keep, direct
        )
        self._pending: dict[str, Transfer] = {}
        self._close = weakref.finalize(self, _finish, self._fd, self._pending)
        _stores.add(self)
        self.read_bytes = self.written_bytes = 0
        self._failed: dict[str, OSError] = {}  # failed writes, until the next of the same name
        self._dirty: dict[str, int] = {}  # the places of tensors put since the last commit
        self._files = IndexFiles(self.path)
        try:
            store_index.lock_file(self._fd, self.path)
            self._load(self._files.recover() if keep else Index())
        except BaseException:
            self.close()
            raise

    def _load(self, index: Index) -> None:
        self._index = index
        self._failed, self._dirty = {}, {}
        entries = index.entries.values()
        ends = (entry.places[-1].offset + aligned_size(entry.num_bytes) for entry in entries)
        self._end = max(ends, default=0)
        found = os.fstat(self._fd).st_size
        if found < self._end:
            raise ValueError(
                f"{self.path / 'data'} has {found} bytes, but its index expects {self._end}: it"
                " was truncated. Use an empty folder"
            )
        if found > self._end > 0:  # tensors that were never committed
            os.ftruncate(self._fd, self._end)

    @property
    def info(self) -> dict[str, Any]:
        """The `info` of the last commit(); empty before the first."""
        return dict(self._index.info)

    @property
    def generation(self) -> int:
        """The number of commits so far."""
        return self._index.generation

    def keys(self) -> list[str]:
        """The names of all tensors."""
        return list(self._index.entries)

    def __contains__(self, key: str) -> bool:
        return key in self._index.entries

    def spec(self, key: str) -> tuple[torch.dtype, torch.Size]:
        """The dtype and shape of a tensor. Raises KeyError for an unknown name."""
        entry = self._index.entries[key]
        return entry.dtype, torch.Size(entry.shape)

    def put(self, key: str, tensor: Tensor) -> Transfer:
        """Starts writing a CPU tensor, which must not change until the transfer ends.

        Raises ValueError for another dtype, shape or device than before, OSError for a full disk.
        """
        self._check_open()
        if tensor.device.type != "cpu":
            raise ValueError(f"a FileStore needs CPU tensors, got one on {tensor.device}")
        self._settle(key)
        self._failed.pop(key, None)
        entry = self._index.entries.get(key)
        if entry is None:
            size, num_places = aligned_size(tensor.nbytes), 2 if self._keeps else 1
            if size:
                with self._naming(f"no disk space for {key}, {size * num_places} bytes,"):
                    os.posix_fallocate(self._fd, self._end, size * num_places)
            places = [Place(self._end + number * size) for number in range(num_places)]
            self._end += size * num_places
            entry = Entry(tensor.dtype, tuple(tensor.shape), places)
            self._index.entries[key] = entry
        _check_same(key, entry, tensor)
        if self._keeps and key not in self._dirty:
            if not self._dirty:
                # Removes the commit before the last, before its tensors are overwritten. Repeated
                # after a failed sync.
                with self._naming("writing"):
                    self._files.forget(self.generation - 1)
            self._dirty[key] = 1 - entry.current if entry.current is not None else 0
        memory = source = tensor.detach().contiguous()
        if self.is_direct and not is_aligned(source):
            memory = empty_aligned(source.nbytes)
            memory[: source.nbytes].copy_(source.view(-1).view(torch.uint8))
        return self._start(key, True, tensor, memory, entry.places[self._dirty.get(key, 0)])

    def get(self, key: str, out: Tensor) -> Transfer:
        """Starts reading a tensor; `out` has its values when the transfer has ended.

        Raises KeyError for an unknown name, ValueError if `out` is not contiguous on the CPU or has
        another dtype or shape, OSError if the last write of this name failed.
        """
        self._check_open()
        if key not in self._index.entries:
            raise KeyError(f"{self.path} has no tensor {key!r}")
        entry = self._index.entries[key]
        _check_same(key, entry, out)
        if out.device.type != "cpu" or not out.is_contiguous():
            raise ValueError(f"{key} must be read into a contiguous CPU tensor")
        self._settle(key)
        if key in self._failed:
            raise self._failed[key]
        place = entry.places[self._dirty.get(key, entry.current or 0)]
        is_straight = not self.is_direct or is_aligned(out)
        memory = out if is_straight else empty_aligned(out.nbytes)
        return self._start(key, False, out, memory, place)

    def _start(
        self, key: str, is_write: bool, tensor: Tensor, memory: Tensor, place: Place
    ) -> Transfer:
        num_bytes = aligned_size(tensor.nbytes) if self.is_direct else tensor.nbytes
        if is_write:
            place.block_bytes = self._block_bytes
        handle = self._engine.start(
            is_write,
            self._fd,
            memory,
            num_bytes,
            place.offset,
            num_used=tensor.nbytes,
            block_bytes=place.block_bytes,
            expected=None if is_write else place.checksums,
        )
        if is_write:
            place.checksums = handle.checksums  # complete before anyone reads them
        self.written_bytes += num_bytes * is_write
        self.read_bytes += num_bytes * (not is_write)
        what = f"{'writing' if is_write else 'reading'} {key} at {self.path}"
        for other in [k for k, transfer in self._pending.items() if transfer.handle.is_done()]:
            self._settle(other)
        transfer = Transfer(what, tensor, memory, handle, is_read=not is_write)
        self._pending[key] = transfer
        return transfer

    def _settle(self, key: str) -> None:
        """Waits for transfers of a name; the error of a failed read is raised to its caller."""
        if (pending := self._pending.get(key)) is None:
            return
        try:
            pending.wait()  # Ctrl-C ends it early; then the transfer is still pending
        except OSError as error:
            if not pending.is_read:
                self._failed[key] = error
        del self._pending[key]

    def _settle_all(self) -> None:
        for key in list(self._pending):
            self._settle(key)

    def commit(self, info: dict[str, Any] | None = None) -> None:
        """Commits all put() tensors and `info`: after a crash the store has this state.

        Raises ValueError with keep=False, OSError if a write failed and was not repeated by another
        put(), or the index could not be written (ENOSPC: free space and commit again). The last
        commit is kept.
        """
        self._check_open()
        if not self._keeps:
            raise ValueError("a FileStore with keep=False does not support commit()")
        self._settle_all()
        if self._failed:
            raise next(iter(self._failed.values()))
        with self._naming(f"commit {self.generation + 1}"):
            try:
                os.fdatasync(self._fd)
            except OSError as error:
                # The kernel may drop pages that it could not write; the next fdatasync would
                # succeed.
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
        """Returns to the commit before the last, if another rank crashed before its last commit.

        Raises ValueError if tensors have been put since the last commit: that one was overwritten.
        """
        self._check_open()
        previous = self._files.read(self.generation - 1)
        if previous is None:
            raise ValueError(f"{self.path} no longer has the commit before {self.generation}")
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
        """Adds the path to errors of the file system."""
        try:
            yield
        except OSError as error:
            code = error.errno or errno.EIO
            raise OSError(code, f"{what} at {self.path}: {os.strerror(code)}") from error

    def _check_open(self) -> None:
        if self._fd < 0:
            raise ValueError(
                f"the FileStore at {self.path} is closed, or was opened before a fork: open one"
                " in each process"
            )

    def close(self) -> None:
        """Waits for all transfers and releases the folder; a second call does nothing."""
        if self._fd < 0:
            return
        self._settle_all()
        for error in self._failed.values():
            _log.warning("ringcomm: %s", error)
        self._failed = {}
        self._close()
        self._fd = -1  # the file descriptor may be reused from now on

    def _leave_to_parent(self) -> None:
        """In a forked child: closes its copies of files; the lock lasts until all are closed."""
        if self._close.detach() is not None:
            os.close(self._fd)
        self._fd = -1


def _finish(fd: int, pending: dict[str, Transfer]) -> None:
    """Closes a file after its last transfer: its descriptor may then be reused."""
    if transfers.in_engine_thread():  # a garbage collection there; waiting would stop the transfers
        threading.Thread(target=_finish, args=(fd, pending)).start()
        return
    for transfer in pending.values():
        transfer.handle.wait()
    pending.clear()
    os.close(fd)


_stores: weakref.WeakSet[FileStore] = weakref.WeakSet()


os.register_at_fork(after_in_child=lambda: [*map(FileStore._leave_to_parent, _stores)])


def _check_same(key: str, entry: Entry, tensor: Tensor) -> None:
    if (entry.dtype, entry.shape) != (tensor.dtype, tuple(tensor.shape)):
        raise ValueError(
            f"{key} is {entry.dtype} of shape {entry.shape} in the file, got {tensor.dtype} of"
            f" shape {tuple(tensor.shape)}"
        )
