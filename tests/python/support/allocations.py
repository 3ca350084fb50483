"""What code allocates on a CPU: the tensors that it makes, or all that torch's allocator gave.

Operators take memory of their own, and how much depends on the CPU: a product in bfloat16 copies
its matrix where oneDNN has instructions for that format. A claim about a program's tensors is
therefore tested by tensor_bytes(), and not by the allocator.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Storages(TorchDispatchMode):
    """Follows the storages that operators return, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._note((args, kwargs), are_new=False)  # a result may be a view of an argument
        result = func(*args, **(kwargs or {}))
        self._note(result, are_new=True)
        return result

    def _note(self, values: Any, are_new: bool) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._add(storage, storage.nbytes() if are_new else 0)

    def _add(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        key = storage._cdata

        def forget(_: object) -> None:
            del self._known[key]
            self.sizes.append(-num_bytes)

        self._known[key] = weakref.ref(storage, forget)
        self.sizes.append(num_bytes)


def tensor_bytes(body: Callable[[], object]) -> tuple[int, int]:
    """Bytes of the largest tensor that operators return to body(), and of all at the worst time.

    Tensors that exist before are not counted, and freeing them is not either. Nothing here depends
    on addresses, clocks or the CPU.
    """
    with _Storages() as storages:
        body()
    return max(storages.sizes, default=0), peak_bytes(storages.sizes)


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
