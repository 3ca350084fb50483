"""What a process holds: descriptors, threads and memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import sys
from collections import Counter
from pathlib import Path

# What shrink() keeps open (docs/design/shrink.md).
STORE = "/memfd:ringcomm-store (deleted)"


def open_files() -> Counter[str]:
    """What this process's descriptors are, without numbers."""
    found: Counter[str] = Counter()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # of the folder itself
            found[re.sub(r"\d+", "", os.readlink(link))] += 1
    return found


_libc = ctypes.CDLL(None)


class _Mallinfo2(ctypes.Structure):
    """Of glibc; `uordblks` and `hblkhd` are bytes in use, of heaps and of mappings."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def heap_bytes() -> int:
    """What is allocated of C's heap; 0 without glibc 2.33."""
    if not hasattr(_libc, "mallinfo2"):
        return 0
    _libc.mallinfo2.restype = _Mallinfo2
    found = _libc.mallinfo2()
    return found.uordblks + found.hblkhd


def memory() -> dict[str, int]:
    gc.collect()
    files = open_files()
    heap, blocks = heap_bytes(), sys.getallocatedblocks()
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    rollup = Path("/proc/self/smaps_rollup").read_text()
    pss = next(line for line in rollup.splitlines() if line.startswith("Pss:"))
    return {
        "descriptors": files.total() - files[STORE],
        "stores": files[STORE],
        "threads": len(os.listdir("/proc/self/task")),
        "bytes of C's heap": heap,
        "blocks of Python": blocks,
        "anonymous bytes": int(status["RssAnon"].split()[0]) << 10,
        "shared bytes": int(status["RssShmem"].split()[0]) << 10,
        "proportional bytes": int(pss.split()[1]) << 10,
    }
