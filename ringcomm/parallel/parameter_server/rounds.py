"""Which gradients become one update: one of every worker, or each as it comes; or by schedule."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from typing_extensions import override

from ringcomm.parallel.parameter_server.requests import Request

__all__ = ["Arrivals", "Collected", "Gradient", "Rounds", "Schedule"]


@dataclass(frozen=True)
class Gradient:
    """What a worker has pushed.

    Attributes:
        version: the one whose weights it was computed at.
        factor: it counts times this; 0 for one that is not finite.
        tensors: of this server's keys, as they travelled.
    """

    worker: int
    version: int
    factor: float
    tensors: list[Tensor]


class Collected(Protocol):
    """Gradients that wait for being applied."""

    def push(self, gradient: Gradient) -> None:
        """Adds one."""

    def leave(self, worker: int) -> None:
        """The worker pushes no more; what it has pushed counts."""

    def next_update(self) -> list[Gradient] | None:
        """Those of the next update, in the order of workers; None while some are missing."""


class Rounds(Collected):
    """Update t has the t-th gradient of every worker that has not left before."""

    def __init__(self, workers: Iterable[int]) -> None:
        self._queues: dict[int, deque[Gradient]] = {worker: deque() for worker in sorted(workers)}
        self._present = set(self._queues)

    @override
    def push(self, gradient: Gradient) -> None:
        self._queues[gradient.worker].append(gradient)

    @override
    def leave(self, worker: int) -> None:
        self._present.discard(worker)

    @override
    def next_update(self) -> list[Gradient] | None:
        if any(not self._queues[worker] for worker in self._present):
            return None
        return [queue.popleft() for queue in self._queues.values() if queue] or None


class Arrivals(Collected):
    """Every gradient is an update of its own."""

    def __init__(self) -> None:
        self._queue: deque[Gradient] = deque()

    @override
    def push(self, gradient: Gradient) -> None:
        self._queue.append(gradient)

    @override
    def leave(self, worker: int) -> None:
        """Nobody waits for it."""

    @override
    def next_update(self) -> list[Gradient] | None:
        return [self._queue.popleft()] if self._queue else None


class Schedule:
    """Lets pulls and pushes through in a given order, whenever they come.

    Args:
        events: ("pull" or "push", worker), in the order in which every server serves them.
    """

    def __init__(self, events: Sequence[tuple[str, int]]) -> None:
        self._workers = deque(worker for _, worker in events)
        self._requests: dict[int, deque[Request]] = {}

    def arrive(self, request: Request) -> None:
        """Keeps a request for its turn."""
        self._requests.setdefault(request.worker, deque()).append(request)

    def next_due(self) -> Request | None:
        """The next one to serve, None while it has not come.

        What is neither pull nor push has no turn: it is served behind the worker's own. Events of a
        worker that has closed are dropped.
        """
        for worker, requests in self._requests.items():
            if requests and not requests[0].is_scheduled:
                if requests[0].is_last:
                    self._workers = deque(other for other in self._workers if other != worker)
                return requests.popleft()
        if self._workers and self._requests.get(self._workers[0]):
            return self._requests[self._workers.popleft()].popleft()
        return None
