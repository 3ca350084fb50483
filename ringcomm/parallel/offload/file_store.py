"""FileStore: named rows in a file without a name, with asynchronous reads and writes.

ZeRO-Infinity (Rajbhandari et al. 2021, arXiv 2104.07857, section 5) uses it for NVMe.
"""

import contextlib
import dataclasses
import errno
import logging
import os
import secrets
import threading
import weakref
from pathlib import Path

import torch
from torch import Tensor

from ringcomm.parallel.offload.transfers import (
    Transfer,
    aligned_size,
    in_file_thread,
    is_aligned,
)
from ringcomm.process import open_above

_log = logging.getLogger("ringcomm")


@dataclasses.dataclass
class _Entry:
    """A row in the file."""

    dtype: torch.dtype
    num_elems: int
    offset: int  # in bytes
    checksums: list[int] = dataclasses.field(default_factory=list)  # of its blocks


class FileStore:
    """Named rows from empty_row() in one folder, for one process, until it ends.

    put() and get() return before the transfer ends; transfers of one name are ordered. Each block
    has a checksum: reading bytes that were changed, or come from elsewhere, is an error.

    The file has no name (O_TMPFILE), so the kernel deletes it with the process, also after a kill.
    A file system without such files, as NFS or FUSE, gets a file with a random name that is removed
    as soon as it is open.

    The folder is created if it does not exist. `block_bytes`, of one read or write, is a multiple
    of 4096. Raises OSError if the folder or the file cannot be created, and RuntimeError if no
    thread can be started.

    Attributes:
        is_direct: whether reads and writes bypass the page cache (O_DIRECT), which they do if the
            file system supports it.
        read_bytes, written_bytes: bytes transferred so far, in whole blocks.
    """

    def __init__(self, path: str | os.PathLike[str], *, block_bytes: int = 1 << 20) -> None:
        self.path = Path(path)
        self._block_bytes = block_bytes
        self.path.mkdir(parents=True, exist_ok=True)
        self._fd, self.is_direct = open_scratch(self.path)
        self._pending: dict[str, Transfer] = {}
        self._close = weakref.finalize(self, _finish, self._fd, self._pending)
        _stores.add(self)
        self.read_bytes = self.written_bytes = 0
        self._failed: dict[str, OSError] = {}  # failed writes, until the next of the same name
        self._entries: dict[str, _Entry] = {}
        self._end = 0  # of the last tensor, in bytes

    def spec(self, key: str) -> tuple[int, torch.dtype]:
        """The elements of a row and their dtype. Raises KeyError for an unknown name."""
        return self._entries[key].num_elems, self._entries[key].dtype

    def put(self, key: str, row: Tensor) -> Transfer:
        """Starts writing a row, which must not change until the transfer ends.

        Raises ValueError for another dtype or size than before, OSError for a full disk.
        """
        self._check_open()
        self._settle(key)
        self._failed.pop(key, None)
        entry = self._entries.get(key)
        if entry is None:
            size = aligned_size(row.nbytes)
            try:
                if size:
                    os.posix_fallocate(self._fd, self._end, size)
            except OSError as error:
                code, what = error.errno or errno.EIO, f"no disk space for {key}, {size} bytes,"
                raise OSError(code, f"{what} at {self.path}: {os.strerror(code)}") from error
            entry = _Entry(row.dtype, row.numel(), self._end)
            self._end += size
            self._entries[key] = entry
        return self._start(key, True, row)

    def get(self, key: str, row: Tensor) -> Transfer:
        """Starts reading; the row, as spec() has it, has its values when the transfer has ended.

        Raises KeyError for an unknown name, OSError if the last write of this name failed.
        """
        self._check_open()
        self._settle(key)
        if key in self._failed:
            raise self._failed[key]
        return self._start(key, False, row)

    def _start(self, key: str, is_write: bool, row: Tensor) -> Transfer:
        entry = self._entries[key]
        if self.spec(key) != (row.numel(), row.dtype) or not is_aligned(row):
            raise ValueError(f"{key} must be a row of {entry.num_elems} {entry.dtype}, aligned")
        num_bytes = aligned_size(row.nbytes) if self.is_direct else row.nbytes
        what = f"{'writing' if is_write else 'reading'} {key} at {self.path}"
        place = self._fd, num_bytes, entry.offset, self._block_bytes
        transfer = Transfer(what, row, *place, None if is_write else entry.checksums)
        entry.checksums = transfer.checksums  # complete before anyone reads them
        self.written_bytes += num_bytes * is_write
        self.read_bytes += num_bytes * (not is_write)
        for other in [k for k, transfer in self._pending.items() if transfer.is_done()]:
            self._settle(other)
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

    def _check_open(self) -> None:
        if self._fd < 0:
            raise ValueError(
                f"the FileStore at {self.path} is closed, or was opened before a fork: open one"
                " in each process"
            )

    def close(self) -> None:
        """Waits for all transfers and deletes the file; a second call does nothing."""
        if self._fd < 0:
            return
        for key in list(self._pending):
            self._settle(key)
        for error in self._failed.values():
            _log.warning("ringcomm: %s", error)
        self._failed = {}
        self._close()
        self._fd = -1  # the file descriptor may be reused from now on

    def _leave_to_parent(self) -> None:
        """In a forked child: closes its copy; the file lasts until all copies are closed."""
        if self._close.detach() is not None:
            os.close(self._fd)
        self._fd = -1


def _finish(fd: int, pending: dict[str, Transfer]) -> None:
    """Closes a file after its last transfer: its descriptor may then be reused."""
    if in_file_thread():  # a garbage collection there; waiting would stop the transfers
        threading.Thread(target=_finish, args=(fd, pending)).start()
        return
    for transfer in pending.values():
        transfer.wait_for_end()
    pending.clear()
    os.close(fd)


_stores: weakref.WeakSet[FileStore] = weakref.WeakSet()


os.register_at_fork(after_in_child=lambda: [*map(FileStore._leave_to_parent, _stores)])


def open_scratch(folder: Path) -> tuple[int, bool]:
    """Opens a file without a name in a folder; returns whether it bypasses the page cache."""
    try:
        return _open_unnamed(folder, os.O_DIRECT), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return _open_unnamed(folder, 0), False


def _open_unnamed(folder: Path, more_flags: int) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | more_flags
    try:
        return open_above(folder, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
    # NFS and FUSE have no unnamed files. An open that is refused O_DIRECT may have made this one.
    name = folder / f"ringcomm-{secrets.token_hex(8)}"
    try:
        return open_above(name, flags | os.O_CREAT | os.O_EXCL, 0o600)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
