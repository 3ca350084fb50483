"""What is torch.emugpu once emulated_gpu.load() was called: the names that torch.cuda has.

torch.Stream and torch.Event are of this device when it is the only accelerator.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

DeviceLike = torch.device | str | int | None


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return True


def _lazy_init() -> None:
    """Nothing is left to do; torch 2.11 synchronizes no device that has not had it."""


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return int(_extension().device_count())


current_device = torch.accelerator.current_device_index
set_device = torch.accelerator.set_device_index
device = torch.accelerator.device_index
synchronize = torch.accelerator.synchronize
current_stream = torch.accelerator.current_stream
set_stream = torch.accelerator.set_stream
empty_cache = torch.accelerator.empty_cache
memory_allocated = torch.accelerator.memory_allocated
max_memory_allocated = torch.accelerator.max_memory_allocated
memory_reserved = torch.accelerator.memory_reserved
max_memory_reserved = torch.accelerator.max_memory_reserved
memory_stats = torch.accelerator.memory_stats
reset_peak_memory_stats = torch.accelerator.reset_peak_memory_stats
mem_get_info = torch.accelerator.get_memory_info


def stream(stream: torch.Stream) -> Any:
    """A context in which this is the current stream."""
    return stream


def Stream(  # noqa: N802 (as in torch.cuda)
    device: DeviceLike = "emugpu", priority: int = 0
) -> torch.Stream:
    return torch.Stream(device=device, priority=priority)


def Event(enable_timing: bool = False, blocking: bool = False) -> torch.Event:  # noqa: N802
    return torch.Event(device="emugpu", enable_timing=enable_timing, blocking=blocking)


def hold(stream: torch.Stream) -> Any:
    """Stops a stream behind what it was given so far, until release() of what this returns.

    After 30 s it goes on by itself: a test that fails leaves no stream held.
    """
    return _extension().Hold(stream)


class CUDAGraph:
    """Work that a stream was given once, in graph(), and that runs again with each replay().

    On the same memory: what was allocated meanwhile is never used for anything else.
    """

    def __init__(self) -> None:
        self._exec = ctypes.c_void_p()

    def begin(self) -> None:
        _call_driver("StreamBeginCapture_v2", _current_handle(), 0)

    def end(self) -> None:
        """Raises RuntimeError where the capture was spoilt."""
        made = ctypes.c_void_p()
        _call_driver("StreamEndCapture", _current_handle(), ctypes.byref(made))
        _call_driver("GraphInstantiateWithFlags", ctypes.byref(self._exec), made, None)
        _call_driver("GraphDestroy", made)

    def replay(self) -> None:
        _call_driver("GraphLaunch", self._exec, _current_handle())

    def __del__(self) -> None:
        if self._exec:
            _call_driver("GraphExecDestroy", self._exec)


def _current_handle() -> ctypes.c_void_p:
    return ctypes.c_void_p(_extension().current_stream_handle())


def _call_driver(name: str, *arguments: Any) -> None:
    library = ctypes.CDLL(os.environ["RINGCOMM_CUDA_DRIVER"])
    result, error = getattr(library, f"cu{name}")(*arguments), ctypes.c_char_p()
    if result != 0:
        library.cuGetErrorName(result, ctypes.byref(error))
        raise RuntimeError(f"cu{name}: {(error.value or b'').decode()}")


@contextmanager
def graph(
    into: CUDAGraph, *, stream: torch.Stream | None = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    """What runs in this context is captured instead of executed, by default on a new stream.

    The mode of errors is not looked at.
    """
    side = stream or torch.Stream(device="emugpu")
    synchronize()
    with side:
        into.begin()
        try:
            yield
        finally:
            into.end()


def _extension() -> Any:
    return importlib.import_module("ringcomm_emulated_gpu")


def manual_seed_all(seed: int) -> None:
    """Random numbers are the CPU's, which torch.manual_seed() has seeded."""


def get_rng_state(device: DeviceLike = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: DeviceLike = None) -> None:
    torch.set_rng_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]
