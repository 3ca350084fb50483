"""A worker's ends of its connections to servers: over messages, or in the same process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ringcomm.parallel.parameter_server.keys import Packing
from ringcomm.parallel.parameter_server.messages import Channel, Header, Kind, Tag
from ringcomm.parallel.parameter_server.requests import Request
from ringcomm.parallel.parameter_server.serving import Serving

__all__ = ["LocalPort", "Port", "RemotePort"]


class Port(Protocol):
    """To one server.

    Attributes:
        key_indices: its keys.
        version: the one pulled last.
    """

    key_indices: list[int]
    packing: Packing
    version: int

    def ask(self, header: Header) -> None:
        """Sends what has no payload; does not wait."""

    def push(self, header: Header, gradient: Sequence[Tensor | None]) -> None:
        """Sends a gradient by key, None for zeros; it may be overwritten afterwards."""

    def begin_answer(self) -> Header:
        """Waits for the answer to what was asked."""

    def end_answer(self) -> list[Tensor]:
        """Waits for what follows it; to be read before the next one."""

    def flush(self) -> None:
        """Waits until what was pushed has left."""


class RemotePort:
    """To a server in another process."""

    def __init__(
        self, channel: Channel, server: int, key_indices: list[int], packing: Packing
    ) -> None:
        self.key_indices, self.packing, self.version = key_indices, packing, 0
        self._channel, self._server = channel, server
        self._pushed: Tensor | None = None
        self._pushing: Any = None
        self._received: list[Tensor] = []  # kept for the next time
        self._receiving: list[tuple[Any, Tensor]] = []
        self._is_state = False

    def ask(self, header: Header) -> None:
        self._is_state = header.kind == Kind.STATE
        self._channel.send_header(self._server, Tag.REQUEST, header)

    def push(self, header: Header, gradient: Sequence[Tensor | None]) -> None:
        self.flush()
        self._pushed = self.packing.pack(gradient, self._pushed)
        self._channel.send_header(self._server, Tag.REQUEST, header)
        self._pushing = self._channel.send(self._server, Tag.GRADIENT, self._pushed)

    def flush(self) -> None:
        pushing, self._pushing = self._pushing, None
        if pushing is not None:
            pushing.wait()

    def begin_answer(self) -> Header:
        header = self._channel.receive_header(self._server, Tag.ANSWER)
        if self._is_state:
            buffers = [torch.empty(header.count, dtype=torch.uint8)]
        else:
            while len(self._received) < header.count:
                self._received.append(self.packing.new_buffer())
            buffers = self._received[: header.count]
        self._receiving = [
            (self._channel.start_receive(self._server, Tag.ANSWERED, buffer), buffer)
            for buffer in buffers
        ]
        return header

    def end_answer(self) -> list[Tensor]:
        receiving, self._receiving = self._receiving, []
        for work, _ in receiving:
            work.wait()
        return [buffer for _, buffer in receiving]


class LocalPort:
    """To the server in this process: nothing travels, and values are rounded as if it did."""

    def __init__(
        self, serving: Serving, worker: int, key_indices: list[int], packing: Packing
    ) -> None:
        self.key_indices, self.packing, self.version = key_indices, packing, 0
        self._serving, self._worker = serving, worker
        self._messages: list[Tensor] = []

    def ask(self, header: Header) -> None:
        self._serving.submit(Request(self._worker, header, self._serving.answer_here))

    def push(self, header: Header, gradient: Sequence[Tensor | None]) -> None:
        packed = self.packing.pack(gradient)
        self._serving.submit(Request(self._worker, header, self._serving.answer_here, packed))

    def flush(self) -> None:
        """Nothing is under way."""

    def begin_answer(self) -> Header:
        header, messages = self._serving.next_answer()
        self._messages = list(messages)
        assert isinstance(header, Header)
        return header

    def end_answer(self) -> list[Tensor]:
        messages, self._messages = self._messages, []
        return messages
