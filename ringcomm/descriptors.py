"""Files of ringcomm that stay open have descriptors from 3 on, as those of its C++ code (fd.h)."""

import fcntl
import os

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
