"""Memory of the host for what a device has no room for."""

from __future__ import annotations

import torch
from torch import Tensor

from ringcomm.parallel.offload.aligned_memory import empty_aligned


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
        self.tensor = empty_aligned(tensor.nbytes)[: tensor.nbytes].view(tensor.dtype)
        self.tensor.copy_(tensor)
