"""Keys of a parameter server, one for each trainable parameter, and the messages about them.

A message is a header of 32 bytes, optionally followed by packed tensors.
"""

import ctypes
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


def owned_keys(sizes: Mapping[str, int], servers: Sequence[int]) -> dict[int, list[str]]:
    """The keys of each server by name; assigns the largest first, to the server with least bytes.

    The result is the same on every rank. The maximum is at most 4/3 of the optimum (Graham 1969).
    """
    loads = dict.fromkeys(servers, 0)
    owner: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        owner[name] = min(servers, key=loads.__getitem__)
        loads[owner[name]] += sizes[name]
    used = sorted(set(owner.values()))
    return {server: [name for name in sizes if owner[name] == server] for server in used}


class Packing:
    """Tensors in a byte buffer without padding; wide dtypes first, so that all are aligned."""

    def __init__(self, kinds: Iterable[tuple[torch.Size, torch.dtype]]) -> None:
        self.kinds = list(kinds)
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in self.kinds]
        self._order = sorted(range(len(sizes)), key=lambda index: -self.kinds[index][1].itemsize)
        self._sizes = [sizes[index] for index in self._order]

    def of_gradients(self) -> "Packing":
        """For gradients of the same tensors, and a last tensor: 1 for each that is not missing."""
        return Packing([*self.kinds, (torch.Size([len(self.kinds)]), torch.uint8)])

    def new_buffer(self) -> Tensor:
        """For one set of tensors: uint8, one-dimensional, on the CPU."""
        return torch.empty(sum(self._sizes), dtype=torch.uint8, device="cpu")

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The tensors in a buffer, in the order of their shapes; they share its memory."""
        parts = dict(zip(self._order, buffer.split(self._sizes), strict=True))
        return [parts[i].view(dtype).view(shape) for i, (shape, dtype) in enumerate(self.kinds)]

    @torch.no_grad()
    def pack(self, tensors: Sequence[Tensor | None], buffer: Tensor | None = None) -> Tensor:
        """Copies tensors of any device into a buffer, cast; zeros for None."""
        buffer = self.new_buffer() if buffer is None else buffer
        for view, tensor in zip(self.views(buffer), tensors, strict=True):
            if tensor is None:
                view.zero_()
            else:
                view.copy_(tensor)
        return buffer


class Kind(IntEnum):
    """The request of a header."""

    PULL = 1  # answered with the weights, if the worker does not have them
    PUSH = 2  # a gradient follows; no answer
    STATE = 3  # answered with the server's optimizer state
    CLOSE = 4  # the worker's last message; no answer
    ANSWER = 5


class Tag(IntEnum):
    """Tags of sends and receives, which separate the two roles of a rank that works and serves."""

    TO_SERVER = 1
    TO_WORKER = 2


class Header(NamedTuple):
    """Four int64 numbers: 32 bytes.

    Attributes:
        version: of a worker's last pull; of an answer, the one that is sent.
        wanted: of a pull, the lowest acceptable version.
        num_bytes: the size of the message after an answer; 0 if there is none.
    """

    kind: Kind
    version: int = 0
    wanted: int = 0
    num_bytes: int = 0

    @staticmethod
    def new_words() -> Tensor:
        """An int64 [4] to receive a header in."""
        return torch.empty(4, dtype=torch.int64, device="cpu")


def send(group: dist.ProcessGroup, peer: int, tag: Tag, message: Tensor | Header) -> Any:
    """Returns a Work at once; sends the message, and keeps its tensor, even without wait().

    `peer` is a rank of the group. Any thread may call this.
    """
    if isinstance(message, Header):
        message = torch.tensor(message, dtype=torch.int64, device="cpu")
    return dist.isend(message, group=group, group_dst=peer, tag=tag)


def packed(state: Mapping[str, Any]) -> Tensor:
    """As bytes, uint8."""
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def unpacked(message: Tensor) -> dict[str, Any]:
    """The state of packed()."""
    content = ctypes.string_at(message.data_ptr(), message.numel())
    return torch.load(io.BytesIO(content), weights_only=True)
