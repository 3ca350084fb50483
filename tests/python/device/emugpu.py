"""What is torch.emugpu once emulated_gpu.load() was called: the names that torch.cuda has.

torch.Stream and torch.Event are of this device when it is the only accelerator.
"""

from __future__ import annotations

import importlib
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


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: torch.device | str | int) -> None:
    torch.accelerator.set_device_index(device)


def device(index: int) -> Any:
    """A context in which this is the current device."""
    return torch.accelerator.device_index(index)


def synchronize(device: DeviceLike = None) -> None:
    torch.accelerator.synchronize(device)


def current_stream(device: DeviceLike = None) -> torch.Stream:
    return torch.accelerator.current_stream(device)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


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


def CUDAGraph() -> Any:  # noqa: N802
    """With replay(), once graph() has filled it."""
    return _extension().CapturedGraph()


@contextmanager
def graph(into: Any, *, stream: torch.Stream | None = None) -> Iterator[None]:
    """What runs in this context is captured instead of executed, by default on a new stream."""
    side = stream or torch.Stream(device="emugpu")
    synchronize()
    with side:
        into.begin()
        try:
            yield
        finally:
            into.end()


def memory_allocated(device: int | None = None) -> int:
    """Bytes of the tensors that live on a device, by default on the current one."""
    return int(_extension().memory_allocated(current_device() if device is None else device))


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
