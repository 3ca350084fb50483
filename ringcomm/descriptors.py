"""Files of ringcomm that stay open have descriptors from 3 on, as those of its C++ code (fd.h)."""

import contextlib
import fcntl
import os
from collections.abc import Iterator

_FIRST = 3  # below are the standard ones


def above_standard(fd: int) -> int:
    """The same file at a descriptor from 3 on, and `fd` closed if it was another.

    Where a program was started without error output, the first file that it opens has descriptor 2,
    and lines of text would be written into it.
    """
    if fd >= _FIRST:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST)
    finally:
        os.close(fd)


def open_above(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """os.open(), also as the `opener` of open()."""
    return above_standard(os.open(path, flags, mode))


@contextlib.contextmanager
def standard_taken() -> Iterator[None]:
    """Meanwhile, no standard descriptor is free: what duplicates a file gets one from 3 on."""
    taken = [os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)]
    while taken[-1] < _FIRST:
        taken.append(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
    try:
        yield
    finally:
        for fd in taken:
            os.close(fd)
