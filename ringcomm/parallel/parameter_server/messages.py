"""Messages between workers and servers: headers of 32 bytes, and packed tensors behind them."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Channel", "Header", "Kind", "Tag"]


class Kind(IntEnum):
    """What a header asks for."""

    PULL = 1  # answered with what the worker has not yet
    PUSH = 2  # a gradient follows; no answer
    STATE = 3  # answered with the server's state of its optimizer
    CLOSE = 4  # the worker's last words; no answer
    ANSWER = 5


class Tag(IntEnum):
    """Of sends and receives, so that a rank that works and serves confuses nothing."""

    REQUEST = 1
    GRADIENT = 2
    ANSWER = 3
    ANSWERED = 4


@dataclass(frozen=True)
class Header:
    """Four numbers of 64 bits: 32 bytes, which the formulas count.

    Attributes:
        version: of a pull, the lowest that will do; of an answer, the one that the worker then has;
            of a push, its factor as bits.
        has_version: what the worker has pulled last.
        count: of an answer, how many messages follow; of a state, its bytes.
    """

    kind: Kind
    version: int = 0
    has_version: int = 0
    count: int = 0

    @staticmethod
    def push(has_version: int, factor: float) -> Header:
        """Of a gradient that counts times a factor, 0.0 for one that is not finite."""
        (bits,) = struct.unpack("<q", struct.pack("<d", factor))
        return Header(Kind.PUSH, bits, has_version)

    @property
    def factor(self) -> float:
        """What push() was given."""
        (factor,) = struct.unpack("<d", struct.pack("<q", self.version))
        return float(factor)

    def encode(self) -> Tensor:
        """int64 [4]."""
        return torch.tensor([self.kind, self.version, self.has_version, self.count])

    @staticmethod
    def decode(words: Tensor) -> Header:
        """What encode() has made."""
        kind, version, has_version, count = words.tolist()
        return Header(Kind(kind), version, has_version, count)


class Channel:
    """Sends and receives of one group; peers are the group's ranks. Any thread may use it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def send(self, peer: int, tag: Tag, tensor: Tensor) -> Any:
        """Returns a Work at once; the message leaves, and keeps its tensor, without a wait too."""
        return dist.isend(tensor, group=self.group, group_dst=peer, tag=tag)

    def send_header(self, peer: int, tag: Tag, header: Header) -> Any:
        """As send()."""
        return self.send(peer, tag, header.encode())

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
        """Ends the group: whatever other ranks wait for in it raises."""
        self.group.abort()
