"""Host memory that files can be read into and written from without a copy by the kernel."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

# What O_DIRECT asks of sizes, offsets and addresses on the file systems there are.
ALIGNMENT = 4096
# From here on huge pages: a block is one piece of memory for the disk, in place of 256.
HUGE_BYTES = 2 << 20


def aligned_size(num_bytes: int) -> int:
    """The bytes rounded up to whole blocks."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def empty_aligned(num_bytes: int) -> Tensor:
    """Memory of whole pages, outside of torch's allocator: uint8, at least so many bytes of zeros.

    It goes back to the system with the last tensor that refers to it.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = mmap.mmap(-1, max(ALIGNMENT, aligned_size(num_bytes)), flags=flags)
    if num_bytes >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def is_aligned(tensor: Tensor) -> bool:
    """Whether a contiguous tensor begins on a page, and has room to the end of its last block."""
    room = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    return tensor.data_ptr() % ALIGNMENT == 0 and room >= aligned_size(tensor.nbytes)
