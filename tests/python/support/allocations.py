"""Allocations of torch's allocator for CPUs, within operators too, as the profiler sees them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


@contextmanager
def record_allocations() -> Iterator[list[int]]:
    """Yields a list that is filled at the end: bytes allocated, negative where they are freed.

    A tensor that is freed inside but was allocated before is not counted.
    """
    sizes: list[int] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield sizes
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    waiting: list[Any] = list(profiler.profiler.kineto_results.experimental_event_tree())
    found: list[tuple[int, int, int]] = []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            fields = event.extra_fields
            if fields.device.type == "cpu":
                found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    living: set[int] = set()
    for _, address, num_bytes in sorted(found, key=lambda event: event[0]):
        if num_bytes > 0:
            living.add(address)
            sizes.append(num_bytes)
        elif address in living:
            living.remove(address)
            sizes.append(num_bytes)


def peak_bytes(sizes: list[int]) -> int:
    """The most that was allocated at a time."""
    return max(accumulate(sizes), default=0)
