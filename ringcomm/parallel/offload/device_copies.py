"""Copies between a device and the host on streams of their own, beside the device's kernels."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ringcomm.parallel.flat_collectives import current_stream_of, side_stream
from ringcomm.parallel.offload.transfers import edges_in_row, empty_row, views_in_row

_copies = partial(side_stream, use="copies")  # down, and up again
_ALIGNMENT = 512  # as of torch's allocators


def host_copy(tensor: Tensor) -> tuple[Tensor, torch.Event | None]:
    """A copy in host memory, outside torch's allocator for the tensor's device, and its event.

    For an accelerator it is pinned, after what the current stream has, and the event is its end.
    For a one-dimensional CPU tensor it is a separate memory mapping, which is unmapped with the
    last reference.
    """
    if tensor.device.type == "cpu":
        return empty_row(tensor.numel(), tensor.dtype).copy_(tensor), None
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return copy, copy_down(tensor, copy)


def copy_down(tensor: Tensor, target: Tensor) -> torch.Event:
    """Copies from an accelerator to pinned memory, after what the current stream has."""
    stream = _copies(tensor.device)
    stream.wait_stream(torch.accelerator.current_stream(tensor.device))
    with current_stream_of(tensor.device, stream):
        target.copy_(tensor, non_blocking=True)
    tensor.record_stream(stream)
    return stream.record_event()


def copy_back(tensor: Tensor, copy: Tensor) -> None:
    """Writes a tensor of an accelerator, in the order of host_copy()'s copies; see settle()."""
    with current_stream_of(tensor.device, _copies(tensor.device)):
        tensor.copy_(copy, non_blocking=True)


def settle(device: torch.device) -> None:
    """The current stream waits for all copies."""
    torch.accelerator.current_stream(device).wait_stream(_copies(device))


class Upload:
    """Memory of an accelerator for copies of tensors in pinned memory."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._device, self._stream = device, side_stream(device, "uploads")
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        # Kernels that use the memory's former contents may be waiting.
        self._stream.wait_stream(torch.accelerator.current_stream(device))
        self._used: torch.Event | None = None
        self._copied: torch.Event | None = None

    def start(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Starts copies, which are made after the last use of the former ones."""
        if self._used is not None:
            self._stream.wait_event(self._used)
        found = views_in_row(self._memory, tensors, _ALIGNMENT)
        with current_stream_of(self._device, self._stream):
            for copy, tensor in zip(found, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
        self._memory.record_stream(self._stream)
        self._copied = self._stream.record_event()
        return found

    def begin_use(self) -> None:
        """The current stream waits for the copies."""
        if self._copied is not None:
            current = torch.accelerator.current_stream(self._device)
            current.wait_event(self._copied)
            self._memory.record_stream(current)

    def end_use(self) -> None:
        """What the current stream has is the last use of the copies."""
        self._used = torch.accelerator.current_stream(self._device).record_event()

    def wait(self) -> None:
        """The host waits for the copies: their sources may be written again."""
        if self._copied is not None:
            self._copied.synchronize()


def bytes_for(tensors: Sequence[Tensor]) -> int:
    """What an Upload of these tensors needs."""
    return edges_in_row(tensors, _ALIGNMENT)[-1]
