"""Memory of the host for what a device has no room for."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor


class HostMemory:
    """A copy of a tensor in host memory, outside of torch's allocator for the tensor's device.

    Pinned where the device is a GPU, so that copies may run beside its work. For tensors of the CPU
    it is memory mapped for them alone, which is given back to the system with the last reference.

    Attributes:
        tensor: the copy, of one dimension.
    """

    def __init__(self, tensor: Tensor) -> None:
        """Copies a tensor of one dimension."""
        if tensor.is_cuda:
            self.tensor = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self.tensor.copy_(tensor, non_blocking=True)
            torch.cuda.current_stream(tensor.device).synchronize()
            return
        self._map = mmap.mmap(-1, max(1, tensor.nbytes))
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self.tensor = whole[: tensor.nbytes].view(tensor.dtype)
        self.tensor.copy_(tensor)
