"""Checksums of the parameters after every optimizer step, for programs that do not return them."""

from __future__ import annotations

import atexit
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

# A thread of Gloo's may wait for Python's lock to release the last operation. If it still waits
# when Python finalizes, the process aborts: atexit's functions run before that.
atexit.register(time.sleep, 0.3)


def checksum(tensors: list[Tensor]) -> float:
    """The CRC-32 of the bytes that this rank has of the tensors."""
    crc = 0
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        crc = zlib.crc32(local.detach().reshape(-1).view(torch.uint8).numpy(), crc)
    return float(crc)


@contextmanager
def checksums() -> Iterator[list[float]]:
    """A list that gets the checksum of the parameters after each step of any torch optimizer."""
    found: list[float] = []

    def record(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        found.append(checksum([p for group in optimizer.param_groups for p in group["params"]]))

    handle = register_optimizer_step_post_hook(record)
    try:
        yield found
    finally:
        handle.remove()
