"""Messages between workers and servers: headers of 32 bytes, and packed tensors behind them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Channel", "Header", "Kind", "Request", "Tag"]


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


@dataclass(frozen=True)
class Header:
    """Four 64-bit numbers: 32 bytes.

    Attributes:
        version: of a pull, the lowest acceptable one; of an answer, the one that is sent;
            of a push, its factor as bits.
        has_version: the worker's last pulled version.
        num_bytes: of the message behind an answer; 0 if there is none.
    """

    kind: Kind
    version: int = 0
    has_version: int = 0
    num_bytes: int = 0

    @staticmethod
    def push(has_version: int, factor: float) -> Header:
        """Of a gradient to be multiplied by a factor; 0.0 for a gradient that is not finite."""
        (bits,) = struct.unpack("<q", struct.pack("<d", factor))
        return Header(Kind.PUSH, bits, has_version)

    @property
    def factor(self) -> float:
        """The factor of push()."""
        (factor,) = struct.unpack("<d", struct.pack("<q", self.version))
        return float(factor)

    def encode(self) -> Tensor:
        """int64 [4]."""
        return torch.tensor([self.kind, self.version, self.has_version, self.num_bytes])

    @staticmethod
    def decode(words: Tensor) -> Header:
        """The header that encode() has made int64 [4] of."""
        kind, version, has_version, num_bytes = words.tolist()
        return Header(Kind(kind), version, has_version, num_bytes)


@dataclass(frozen=True)
class Request:
    """A worker's request to a server.

    Attributes:
        answer: sends a header, and a message unless None, to the worker; it does not wait.
        gradient: a push's, packed.
    """

    worker: int
    header: Header
    answer: Callable[[Header, Tensor | None], None]
    gradient: Tensor | None = None


class Channel:
    """Sends and receives of one group; peers are the group's ranks. Any thread may use it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def send(self, peer: int, tag: Tag, message: Tensor | Header) -> Any:
        """Returns a Work at once; the message is sent, and its tensor kept, without a wait too."""
        tensor = message.encode() if isinstance(message, Header) else message
        return dist.isend(tensor, group=self.group, group_dst=peer, tag=tag)

    def start_receive(self, peer: int, tag: Tag, tensor: Tensor) -> Any:
        """Returns a Work; the tensor is filled when it is done."""
        return dist.irecv(tensor, group=self.group, group_src=peer, tag=tag)

    def receive(self, peer: int, tag: Tag, tensor: Tensor) -> Tensor:
        """Fills a tensor, waits, and returns it."""
        self.start_receive(peer, tag, tensor).wait()
        return tensor

    def receive_header(self, peer: int, tag: Tag) -> Header:
        """Waits for one."""
        return Header.decode(self.receive(peer, tag, torch.empty(4, dtype=torch.int64)))

    def abort(self) -> None:
        """Ends the group: every wait of another rank in it raises."""
        self.group.abort()
