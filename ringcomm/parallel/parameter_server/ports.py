"""A worker's ends of its connections to servers: over messages, or in the same process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

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

    def close(self) -> None:
        """Says that nothing more comes, and waits until all has left."""


class RemotePort(Port):
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

    @override
    def ask(self, header: Header) -> None:
        self._is_state = header.kind == Kind.STATE
        self._channel.send_header(self._server, Tag.REQUEST, header)

    @override
    def push(self, header: Header, gradient: Sequence[Tensor | None]) -> None:
        self._flush()
        self._pushed = self.packing.pack(gradient, self._pushed)
        self._channel.send_header(self._server, Tag.REQUEST, header)
        self._pushing = self._channel.send(self._server, Tag.GRADIENT, self._pushed)

    @override
    def close(self) -> None:
        self._flush()
        self._channel.send_header(self._server, Tag.REQUEST, Header(Kind.CLOSE)).wait()

    def _flush(self) -> None:
        """The buffer of the last push is free then."""
        pushing, self._pushing = self._pushing, None
        if pushing is not None:
            pushing.wait()

    @override
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

    @override
    def end_answer(self) -> list[Tensor]:
        receiving, self._receiving = self._receiving, []
        for work, _ in receiving:
            work.wait()
        return [buffer for _, buffer in receiving]


class LocalPort(Port):
    """To the server in this process: nothing travels, and values are rounded as if it did."""

    def __init__(
        self, serving: Serving, worker: int, key_indices: list[int], packing: Packing
    ) -> None:
        self.key_indices, self.packing, self.version = key_indices, packing, 0
        self._serving, self._worker = serving, worker
        self._messages: list[Tensor] = []

    @override
    def ask(self, header: Header) -> None:
        self._serving.submit(Request(self._worker, header, self._serving.answer_here))

    @override
    def push(self, header: Header, gradient: Sequence[Tensor | None]) -> None:
        packed = self.packing.pack(gradient)
        self._serving.submit(Request(self._worker, header, self._serving.answer_here, packed))

    @override
    def close(self) -> None:
        self.ask(Header(Kind.CLOSE))

    @override
    def begin_answer(self) -> Header:
        answer: tuple[Header, Sequence[Tensor]] = self._serving.next_answer()
        header, messages = answer
        self._messages = list(messages)
        return header

    @override
    def end_answer(self) -> list[Tensor]:
        messages, self._messages = self._messages, []
        return messages
