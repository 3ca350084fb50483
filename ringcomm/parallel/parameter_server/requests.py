"""What a server is asked for, by a message or by the worker in its own process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ringcomm.parallel.parameter_server.messages import Header, Kind

__all__ = ["Request"]


@dataclass(frozen=True)
class Request:
    """One of a worker's.

    Attributes:
        payload: a push's gradient, packed.
        answer: sends a header and what follows it to the worker; it does not wait.
    """

    worker: int
    header: Header
    answer: Callable[[Header, Sequence[Tensor]], None]
    payload: Tensor | None = None

    @property
    def is_scheduled(self) -> bool:
        """Whether it has a turn in a schedule."""
        return self.header.kind in (Kind.PULL, Kind.PUSH)

    @property
    def is_last(self) -> bool:
        """Whether the worker says nothing after it."""
        return self.header.kind == Kind.CLOSE
