"""The memory of a training step as the allocator saw it."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from ringcomm.optim.memory_parts import Ledger, Mark, Parts
from ringcomm.optim.memory_step import Step, Variant, run_steps

_PREFIX = "ringcomm.memory:"


def measure(model: nn.Module, step: Step, variant: Variant) -> tuple[Parts, int]:
    """The parts of a real step with a copy of a model, and by how much RSS was larger.

    Every allocation and release of torch's allocator for the model's device is taken from the
    profiler, also those inside operators. On CUDA the peak is the allocator's own.
    """
    device = next(model.parameters()).device
    _make_workspaces(device)
    recorder = _Recorder(device)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run_steps(copy.deepcopy(model), step, variant, recorder)
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    ledger = Ledger()
    for key, action, num_bytes in _events(
        profiler.profiler.kineto_results.experimental_event_tree(), device
    ):
        if action == "mark":
            mark, _, address = key.partition("@")
            if address:
                ledger.set_gradient(int(address))
            else:
                ledger.mark(mark)
        elif num_bytes < 0:
            ledger.free(key)
        else:
            ledger.allocate(key, num_bytes, in_update=action == "update")
    return recorder.with_peak(ledger.parts()), recorder.rss_bytes


def _make_workspaces(device: torch.device) -> None:
    """Those of cuBLAS come with the first product and stay: they are not the step's."""
    if device.type == "cuda":
        one = torch.ones([1, 1], device=device)
        torch.addmm(one[0], one, one)
        torch.mm(one, one)


class _Recorder:
    """Writes what it is told into the profiler's record."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rss_at_start = _rss_bytes()
        self._allocated_at_start = self._allocated()
        self.rss_bytes = 0

    def mark(self, mark: Mark) -> None:
        """See Observer."""
        if mark == "step" and self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._write(mark)
        self.rss_bytes = max(self.rss_bytes, _rss_bytes() - self._rss_at_start)

    def gradient(self, grad: Tensor) -> None:
        """See Observer."""
        self._write(f"gradient@{grad.untyped_storage().data_ptr()}")

    def with_peak(self, parts: Parts) -> Parts:
        """The parts, with the allocator's peak where it has one."""
        if self._device.type != "cuda":
            return parts
        peak = torch.cuda.max_memory_allocated(self._device) - self._allocated_at_start
        return Parts(**{**vars(parts), "peak": peak})

    def _allocated(self) -> int:
        if self._device.type != "cuda":
            return 0
        return torch.cuda.memory_allocated(self._device)

    def _write(self, text: str) -> None:
        with record_function(_PREFIX + text):
            pass


def _events(roots: list[Any], device: torch.device) -> Iterator[tuple[Any, str, int]]:
    """(address, "update" or "", bytes) and (text, "mark", 0), in the order of their time."""
    found = []
    waiting = [(root, "") for root in roots]
    while waiting:
        event, inside = waiting.pop()
        name = event.name
        if name.startswith(_PREFIX):
            found.append((event.start_time_ns, name.removeprefix(_PREFIX), "mark", 0))
        elif event.tag == torch._C._profiler._EventType.Allocation:
            fields = event.extra_fields
            if fields.device.type == device.type:
                found.append((event.start_time_ns, fields.ptr, inside, fields.alloc_size))
        if name.startswith("ringcomm::"):
            inside = "update"
        waiting += [(child, inside) for child in event.children]
    found.sort(key=lambda event: event[0])
    return (event[1:] for event in found)


def _rss_bytes() -> int:
    """The process's resident memory; 0 where the system does not tell."""
    path = Path("/proc/self/statm")
    if not path.exists():
        return 0
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
