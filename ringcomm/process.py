"""What ringcomm asks of its process: the interpreter, and descriptors for files that stay open.

Such files have descriptors from 3 on, as those of its C++ code (fd.h).
"""

import contextlib
import fcntl
import os
import re
import sys
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


def path_of(fd: int) -> str:
    """A path of an open file, for torch's FileStore.

    Raises OSError without /proc: the store would wait minutes for the path to appear.
    """
    path = f"/proc/self/fd/{fd}"
    try:
        os.stat(path)
    except FileNotFoundError as error:
        reason = "ringcomm needs /proc here (mount -t proc proc /proc): there is no"
        raise FileNotFoundError(error.errno, f"{reason} {path}") from None
    return path


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


def interpreter() -> str | None:
    """sys.executable; None where it is another program, which would be started once more.

    In a program of PyInstaller, cx_Freeze or Nuitka, or with an embedded interpreter, it is that
    program, empty or None.
    """
    path = sys.executable or ""
    is_named = re.fullmatch(r"python[\d.]*[a-z]{0,2}(-dbg)?", os.path.basename(path))
    main = sys.modules.get("__main__")
    is_frozen = getattr(sys, "frozen", False) or hasattr(main, "__compiled__")
    return path if is_named and not is_frozen and os.access(path, os.X_OK) else None
