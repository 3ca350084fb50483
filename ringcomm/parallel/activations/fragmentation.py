"""How a step's allocations break memory to pieces: recorded, and replayed in simulated heaps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from ringcomm.parallel.activations.free_space import FreeSpace, Policy

ALIGNMENT_BYTES = 64


class Allocation(NamedTuple):
    """An event of an allocator.

    Attributes:
        key: of the allocation, the same when it is freed.
        num_bytes: that are allocated; negative where they are freed.
    """

    key: int
    num_bytes: int


class Replay(NamedTuple):
    """What became of a trace in a heap; bytes in whole lines of 64.

    Attributes:
        failed_at: the index of the first event that found no room; None if all did.
        wanted_bytes: of that event.
        free_bytes: that were free then, in all parts together; without a failure at the end.
        largest_bytes: of the largest free part then.
        peak_bytes: most that was allocated at a time.
        extent_bytes: below the end of the highest allocation.
    """

    failed_at: int | None
    wanted_bytes: int
    free_bytes: int
    largest_bytes: int
    peak_bytes: int
    extent_bytes: int

    @property
    def fragmentation(self) -> float:
        """1 - the largest free part / all free bytes; 0 where none is free."""
        return 1 - self.largest_bytes / self.free_bytes if self.free_bytes else 0.0

    @property
    def lost_share(self) -> float:
        """Of the memory up to the highest allocation, what was never in use at the peak."""
        return 1 - self.peak_bytes / self.extent_bytes if self.extent_bytes else 0.0


class DeviceFragmentation(NamedTuple):
    """What torch's allocator for a GPU says of itself since its peaks were reset; bytes.

    Attributes:
        num_alloc_retries: allocations that had to give cached blocks back first.
        reserved_bytes: most that it had from the driver.
        allocated_bytes: most that tensors had of it.
        split_bytes: most that lay free in blocks that are also in use.
    """

    num_alloc_retries: int
    reserved_bytes: int
    allocated_bytes: int
    split_bytes: int


@contextmanager
def record_allocations(device: torch.device | str = "cpu") -> Iterator[list[Allocation]]:
    """Records what torch's allocator for a device does inside of it, within operators too.

    Yields:
        A list, which is filled at the end. What is freed was allocated inside.
    """
    kind = torch.device(device).type
    events: list[Allocation] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield events
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    waiting: list[Any] = list(profiler.profiler.kineto_results.experimental_event_tree())
    found: list[tuple[int, int, int]] = []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            fields = event.extra_fields
            if fields.device.type == kind:
                found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    living: dict[int, int] = {}
    for _, address, num_bytes in sorted(found, key=lambda event: event[0]):
        if num_bytes > 0:
            living[address] = len(events)
            events.append(Allocation(living[address], num_bytes))
        elif address in living:
            events.append(Allocation(living.pop(address), num_bytes))


def replay(
    trace: Sequence[Allocation], heap_bytes: int | None = None, policy: Policy = "first_fit"
) -> Replay:
    """Plays a trace in an empty heap, until there is no room.

    Args:
        trace: of record_allocations(), or made up.
        heap_bytes: None for a heap without end. With "first_fit" `extent_bytes` is then the
            smallest heap that the trace fits in.
        policy: how the allocator chooses: the first free part that is large enough, or the
            smallest.

    Raises:
        ValueError: what is freed was not allocated.
    """
    sizes = [max(1, -(-abs(size) // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES for _, size in trace]
    limit = sum(sizes) if heap_bytes is None else heap_bytes
    space = FreeSpace(limit, policy)
    living: dict[int, tuple[int, int]] = {}
    extent = peak = 0
    failed_at, wanted = None, 0
    for idx, (event, size) in enumerate(zip(trace, sizes, strict=True)):
        if event.num_bytes < 0:
            if event.key not in living:
                raise ValueError(f"event {idx} frees {event.key}, which was not allocated")
            space.give_back(*living.pop(event.key))
        else:
            begin = space.take(size)
            if begin is None:
                failed_at, wanted = idx, size
                break
            living[event.key] = begin, size
            extent = max(extent, begin + size)
        peak = max(peak, limit - space.free_bytes)
    return Replay(failed_at, wanted, space.free_bytes, space.largest_bytes, peak, extent)


def device_fragmentation(device: torch.device | str | None = None) -> DeviceFragmentation:
    """Of a CUDA device, None for the current one. torch.cuda.reset_peak_memory_stats() starts anew.

    Raises:
        RuntimeError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise RuntimeError(
            "there is no CUDA device: replay() what record_allocations() has seen instead"
        )
    stats = torch.cuda.memory_stats(device)
    return DeviceFragmentation(
        stats["num_alloc_retries"],
        stats["reserved_bytes.all.peak"],
        stats["allocated_bytes.all.peak"],
        stats["inactive_split_bytes.all.peak"],
    )
