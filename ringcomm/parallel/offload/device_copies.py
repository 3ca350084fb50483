"""Copies between a device and the host on a stream of their own, beside the device's kernels."""

from functools import cache

import torch
from torch import Tensor

from ringcomm.parallel.flat_collectives import current_stream_of
from ringcomm.parallel.offload.transfers import empty_row


@cache
def _stream_of(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


def host_copy(tensor: Tensor) -> tuple[Tensor, torch.Event | None]:
    """A copy in host memory, outside torch's allocator for the tensor's device, and its event.

    For an accelerator it is pinned, after what the current stream has, and the event is its end.
    For a one-dimensional CPU tensor it is a separate memory mapping, which is unmapped with the
    last reference.
    """
    if tensor.device.type == "cpu":
        return empty_row(tensor.numel(), tensor.dtype).copy_(tensor), None
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
    stream = _stream_of(tensor.device)
    stream.wait_stream(torch.accelerator.current_stream(tensor.device))
    with current_stream_of(tensor.device, stream):
        copy.copy_(tensor, non_blocking=True)
    tensor.record_stream(stream)
    return copy, stream.record_event()


def copy_back(tensor: Tensor, copy: Tensor) -> None:
    """Writes a tensor of an accelerator, in the order of host_copy()'s copies; see settle()."""
    with current_stream_of(tensor.device, _stream_of(tensor.device)):
        tensor.copy_(copy, non_blocking=True)


def settle(device: torch.device) -> None:
    """The current stream waits for all copies."""
    torch.accelerator.current_stream(device).wait_stream(_stream_of(device))
