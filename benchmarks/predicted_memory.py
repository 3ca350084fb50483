"""What a program will take of torch's CUDA allocator, from a run of it on meta tensors.

The rules are those of torch's c10/cuda/CUDACachingAllocator.cpp where PYTORCH_CUDA_ALLOC_CONF is
not set: `round_size`, `get_allocation_size`, `get_free_block`, `should_split`, `try_merge_blocks`.
All tensors are of one stream, and nothing is returned to the GPU. What an operator takes until it
ends is not seen, as that of flash attention's backward.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

MIB = 1 << 20
MIN_BLOCK_BYTES = 512  # and the unit of blocks
MAX_SMALL_BYTES = MIB  # the largest block of the small pool
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
MIN_OWN_BYTES = 10 * MIB  # from here on a new block has a segment of its own size
SEGMENT_UNIT_BYTES = 2 * MIB
# Of each thread that calls cuBLAS, on sm_90 (torch's aten/src/ATen/cuda/CublasHandlePool.cpp).
CUBLAS_BYTES = 32 * MIB
_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "ringcomm::linear_sgd_update_"}


def rounded(num_bytes: int, unit: int) -> int:
    """Up to a multiple of the unit, at least one."""
    return max(1, -(-num_bytes // unit)) * unit


@dataclass(order=True)
class Block:
    """In the order in which free ones are searched: the smallest, then the lowest address."""

    num_bytes: int
    address: int = 0
    pool: list[Block] = field(default_factory=list, compare=False, repr=False)  # free ones
    is_free: bool = field(default=False, compare=False)
    before: Block | None = field(default=None, compare=False, repr=False)  # in its segment
    after: Block | None = field(default=None, compare=False, repr=False)


class CachingAllocator:
    """The statistics of torch's, without memory."""

    def __init__(self) -> None:
        self.allocated_bytes = 0  # of live blocks
        self.reserved_bytes = 0  # of segments
        self.peak_bytes = 0  # the most that were allocated
        self._small: list[Block] = []
        self._large: list[Block] = []

    def take(self, num_bytes: int, new_address: int | None = None) -> Block:
        """A block for a tensor.

        Args:
            num_bytes: as asked for.
            new_address: of the segment that this makes, if it does; by default above all others.
        """
        num_bytes = rounded(num_bytes, MIN_BLOCK_BYTES)
        is_small = num_bytes <= MAX_SMALL_BYTES
        pool = self._small if is_small else self._large
        place = bisect_left(pool, Block(num_bytes))
        if place < len(pool):
            block = pool.pop(place)
        else:
            block = self._make_segment(num_bytes, pool)
            block.address = block.address if new_address is None else new_address
        left_bytes = block.num_bytes - num_bytes
        if left_bytes >= MIN_BLOCK_BYTES if is_small else left_bytes > MAX_SMALL_BYTES:
            rest = Block(left_bytes, block.address + num_bytes, pool, True, block, block.after)
            block.num_bytes = num_bytes
            _join(rest, rest.after)
            _join(block, rest)
            insort(pool, rest)
        block.is_free = False
        self.allocated_bytes += block.num_bytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        return block

    def give_back(self, block: Block) -> None:
        """Its tensor is gone. Free neighbours become a part of it."""
        self.allocated_bytes -= block.num_bytes
        for other in (block.before, block.after):
            if other is None or not other.is_free:
                continue
            del block.pool[bisect_left(block.pool, other)]
            block.num_bytes += other.num_bytes
            if other is block.before:
                block.address = other.address
                _join(other.before, block)
            else:
                _join(block, other.after)
        block.is_free = True
        insort(block.pool, block)

    def _make_segment(self, num_bytes: int, pool: list[Block]) -> Block:
        if num_bytes <= MAX_SMALL_BYTES:
            num_bytes = SMALL_SEGMENT_BYTES
        elif num_bytes < MIN_OWN_BYTES:
            num_bytes = LARGE_SEGMENT_BYTES
        else:
            num_bytes = rounded(num_bytes, SEGMENT_UNIT_BYTES)
        address = self.reserved_bytes
        self.reserved_bytes += num_bytes
        return Block(num_bytes, address, pool)


def _join(block: Block | None, after: Block | None) -> None:
    """Makes them neighbours; None is the end of a segment."""
    if block is not None:
        block.after = after
    if after is not None:
        after.before = block


class MemoryTrace(TorchDispatchMode):
    """Meta tensors take blocks of `allocator` while it is on. A number that is read is 1."""

    def __init__(self, *, as_cuda: bool) -> None:
        super().__init__()
        self.allocator = CachingAllocator()
        self.num_workspaces = 0
        self._as_cuda = as_cuda
        self._storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1
        if self._as_cuda and func.name().partition(".")[0] in _PRODUCTS:
            self._use_cublas()
        found = func(*args, **(kwargs or {}))
        for tensor in tree_iter(found):
            if isinstance(tensor, Tensor) and tensor.device.type == "meta":
                self._note(tensor.untyped_storage())
        return found

    def _use_cublas(self) -> None:
        """The first product has a workspace, and that of the thread of backward passes."""
        is_backward = torch._C._current_graph_task_id() >= 0
        if self.num_workspaces <= is_backward:
            self.num_workspaces += 1
            self.allocator.take(CUBLAS_BYTES)

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._storages or storage.nbytes() == 0:
            return
        self._storages.add(key)
        block = self.allocator.take(storage.nbytes())

        def end() -> None:
            self._storages.remove(key)
            self.allocator.give_back(block)

        weakref.finalize(storage, end).atexit = False


@contextmanager
def traced(*, as_cuda: bool) -> Iterator[MemoryTrace]:
    """A context of a trace.

    Args:
        as_cuda: attention is flash attention, and cuBLAS has its workspaces. Otherwise operators
            take what those of meta tensors do, of which attention makes all scores.
    """
    flash = patch.object(functional, "scaled_dot_product_attention", _flash_attention)
    with flash if as_cuda else nullcontext(), MemoryTrace(as_cuda=as_cuda) as trace:
        yield trace


def _flash_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any
) -> Tensor:
    if attn_mask is not None:
        raise ValueError("flash attention takes no mask")
    options.pop("enable_gqa", None)  # which it always is
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, **options)[0]
