"""The messages between workers and servers: a header of 32 bytes, and packed tensors behind it."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Header", "Kind", "Tag", "receive", "send", "start_receive"]


class Kind(IntEnum):
    """The request of a header."""

    PULL = 1  # answered with the weights, if the worker does not have them
    PUSH = 2  # a gradient follows; no answer
    STATE = 3  # answered with the server's optimizer state
    CLOSE = 4  # the worker's last message; no answer
    ANSWER = 5


class Tag(IntEnum):
    """Of sends and receives: a rank that works and serves keeps its two roles apart by them."""

    REQUEST = 1
    GRADIENT = 2
    ANSWER = 3
    ANSWERED = 4


class Header(NamedTuple):
    """Four float64 numbers: 32 bytes.

    Attributes:
        version: of a pull, the lowest acceptable one; of an answer, the one that is sent.
            Of a push, what its gradient is to be multiplied by; 0 if that is not finite.
        has_version: the worker's last pulled version.
        num_bytes: of the message behind an answer; 0 if there is none.
    """

    kind: Kind
    version: float = 0
    has_version: int = 0
    num_bytes: int = 0

    def encode(self) -> Tensor:
        """float64 [4]."""
        return torch.tensor(self, dtype=torch.float64)

    @staticmethod
    def decode(words: Tensor) -> Header:
        """The header that encode() has made float64 [4] of."""
        kind, version, has_version, num_bytes = words.tolist()
        return Header(Kind(int(kind)), version, int(has_version), int(num_bytes))


# Peers are ranks of the group; any thread may call these.


def send(group: dist.ProcessGroup, peer: int, tag: Tag, message: Tensor | Header) -> Any:
    """Returns a Work at once; the message is sent, and its tensor kept, without a wait too."""
    tensor = message.encode() if isinstance(message, Header) else message
    return dist.isend(tensor, group=group, group_dst=peer, tag=tag)


def start_receive(group: dist.ProcessGroup, peer: int, tag: Tag, tensor: Tensor) -> Any:
    """Returns a Work; the tensor is filled when it is done."""
    return dist.irecv(tensor, group=group, group_src=peer, tag=tag)


def receive(group: dist.ProcessGroup, peer: int, tag: Tag, tensor: Tensor) -> Tensor:
    """Fills a tensor, waits, and returns it."""
    start_receive(group, peer, tag, tensor).wait()
    return tensor
