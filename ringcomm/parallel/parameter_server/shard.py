"""One server's part of the parameters: what it does with requests, one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ringcomm.parallel.parameter_server.keys import Packing
from ringcomm.parallel.parameter_server.messages import Header, Kind
from ringcomm.parallel.parameter_server.optimizer import ServerOptimizer
from ringcomm.parallel.parameter_server.options import Options
from ringcomm.parallel.parameter_server.requests import Request
from ringcomm.parallel.parameter_server.rounds import (
    Arrivals,
    Collected,
    Gradient,
    Rounds,
    Schedule,
)
from ringcomm.parallel.parameter_server.saved_state import packed
from ringcomm.parallel.parameter_server.updates import (
    SumsForWorkers,
    Updates,
    UpdatesForWorkers,
    Weights,
    mean_of,
)

__all__ = ["Shard"]


class Shard:
    """Serves the keys of one server; used by one thread at a time.

    Attributes:
        version: how many updates there have been.
        num_skipped: those that changed nothing, since a gradient was not finite.
        staleness: of each gradient applied the version then minus the one that it was computed at,
            counted.
    """

    def __init__(
        self,
        packing: Packing,
        workers: Sequence[int],
        options: Options,
        optimizer: ServerOptimizer | None,
    ) -> None:
        self.version = self.num_skipped = 0
        self.staleness: Counter[int] = Counter()
        self.optimizer = optimizer
        self._packing = packing
        self._is_lockstep = options.is_lockstep
        self._present = set(workers)
        self._held: list[Request] = []  # pulls of versions that are not there yet
        self._schedule = None if options.schedule is None else Schedule(options.schedule)
        is_in_rounds = options.staleness is not None
        self._collected: Collected = Rounds(workers) if is_in_rounds else Arrivals()
        self._updates: Updates
        if optimizer is not None:
            num_kept = (options.staleness or 0) if options.is_lockstep else 0
            self._updates = Weights(optimizer, packing, num_kept)
        elif is_in_rounds:
            self._updates = UpdatesForWorkers(packing, workers)
        else:
            self._updates = SumsForWorkers(packing, workers)

    @property
    def is_done(self) -> bool:
        """Whether all workers have closed."""
        return not self._present

    def take(self, request: Request) -> None:
        """Serves a request, or keeps it until its turn, and those whose turn it makes."""
        if self._schedule is None:
            self._serve(request)
            return
        self._schedule.arrive(request)
        while (due := self._schedule.next_due()) is not None:
            self._serve(due)

    def _serve(self, request: Request) -> None:
        kind = request.header.kind
        if kind == Kind.PULL:
            self._held.append(request)
            self._answer_held()
        elif kind == Kind.PUSH and request.payload is not None:
            tensors = self._packing.views(request.payload)
            header = request.header
            gradient = Gradient(request.worker, header.has_version, header.factor, tensors)
            self._collected.push(gradient)
            self._advance()
        elif kind == Kind.STATE:
            state = packed({} if self.optimizer is None else self.optimizer.state_dict())
            request.answer(Header(Kind.ANSWER, self.version, count=state.numel()), [state])
        elif kind == Kind.CLOSE:
            self._present.discard(request.worker)
            self._collected.leave(request.worker)
            self._updates.leave(request.worker)
            self._advance()

    def _advance(self) -> None:
        while (gradients := self._collected.next_update()) is not None:
            if all(gradient.factor for gradient in gradients):
                for gradient in gradients:
                    self.staleness[self.version - gradient.version] += 1
                self._updates.apply(mean_of(gradients))
            else:  # all servers have these headers, and do the same
                self.num_skipped += 1
                assert isinstance(self._updates, Weights)  # else there is no scale
                self._updates.skip()
            self.version += 1
        self._answer_held()

    def _answer_held(self) -> None:
        held, self._held = self._held, []
        for request in held:
            wanted, has = request.header.version, request.header.has_version
            if wanted > self.version:
                self._held.append(request)
                continue
            # A pull that was to be fresh may have had more than the schedule of lockstep gives.
            version = max(wanted, has) if self._is_lockstep else self.version
            news = self._updates.news(request.worker, has, version)
            request.answer(Header(Kind.ANSWER, version, count=len(news)), news)
