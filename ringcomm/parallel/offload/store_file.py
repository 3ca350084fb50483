"""The folder of a FileStore, and the file in it that has the tensors."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

_LOCK_WAIT_S = 5.0


def make_folder(path: Path) -> None:
    """Makes a folder and its parents, if they are not there, so that they outlast a power cut."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder outlast a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_file(path: Path, keep: bool, direct: bool | None) -> tuple[int, bool]:
    """A file to keep, or one without a name in a folder; and whether it goes past the page cache.

    Raises:
        OSError: what open(2) says; EINVAL where direct=True and the file system has no O_DIRECT.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if keep else os.O_TMPFILE)
    if direct is not False:
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            if direct:
                raise OSError(
                    errno.EINVAL, f"the file system of {path} has no O_DIRECT: direct=False"
                ) from error
    return os.open(path, flags, 0o600), False


def lock_file(fd: int) -> None:
    """Takes a file for one store, which has it until the file is closed.

    Raises:
        BlockingIOError: another has it, for 5 seconds too.
    """
    # The kernel holds the file of a killed process until the writes it had under way have ended,
    # which may be after its parent has waited for it; before that the file is not to be read.
    ends = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= ends:
                raise
            time.sleep(0.01)
