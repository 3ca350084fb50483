"""The loop of a server: requests of all workers, wherever they come from, in one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from ringcomm.errors import RingcommError
from ringcomm.parallel.parameter_server.keys import Packing
from ringcomm.parallel.parameter_server.messages import Channel, Header, Kind, Tag
from ringcomm.parallel.parameter_server.requests import Request
from ringcomm.parallel.parameter_server.shard import Shard

__all__ = ["Serving"]


class Serving:
    """Runs a shard until all workers have closed.

    A receive of a header is pending from every worker all the time: its end wakes the loop, and it
    is how the death of a worker is noticed. What the worker of this process wants comes into the
    same inbox, so that the shard needs no lock.
    """

    def __init__(
        self, shard: Shard, channel: Channel, packing: Packing, remote_workers: Sequence[int]
    ) -> None:
        self.shard = shard
        self._channel = channel
        self._packing = packing
        self._remote_workers = remote_workers
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()  # for this process, or the loop's error
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Runs the loop beside the caller."""
        self._thread = threading.Thread(target=self._run_beside, name="ringcomm-ps", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Waits until all workers have closed; raises what ended the loop before."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def raise_cause(self) -> None:
        """Raises what has ended the loop, if that was no failure of the group."""
        if self._error is not None and not isinstance(self._error, RingcommError):
            raise self._error

    def run(self) -> None:
        """The loop. What ends it before its time ends the group, so that nobody waits for it."""
        if self.shard.is_done:
            return
        try:
            for worker in self._remote_workers:
                self._listen(worker)
            while not self.shard.is_done:
                self._inbox.get()()
        except BaseException as error:
            self._error = error
            if not isinstance(error, RingcommError):
                self._channel.abort()
            self._answers.put(error)
            raise

    def _run_beside(self) -> None:
        try:
            self.run()
        except BaseException:
            return  # join() and the worker of this process raise it

    # ---- the worker of this process

    def submit(self, request: Request) -> None:
        """Raises what has ended the loop."""
        if self._error is not None:
            raise self._error
        self._inbox.put(lambda: self.shard.take(request))

    def answer_here(self, header: Header, payload: Sequence[Tensor]) -> None:
        """The answer to a request of this process."""
        self._answers.put((header, payload))

    def next_answer(self) -> Any:
        """Waits for it; raises what has ended the loop."""
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            self._answers.put(answer)  # whoever asks next
            raise answer
        return answer

    def call(self, function: Callable[[], None]) -> None:
        """Calls a function of the shard between two requests, and waits for it."""
        if self._thread is None:
            function()
            return

        def run() -> None:
            function()
            self._answers.put(None)

        self._inbox.put(run)
        self.next_answer()

    # ---- the others

    def _listen(self, worker: int) -> None:
        words = torch.empty(4, dtype=torch.int64)
        work = self._channel.start_receive(worker, Tag.REQUEST, words)

        def arrived(future: torch.futures.Future[Any]) -> None:
            self._inbox.put(lambda: self._take(worker, words, future))

        work.get_future().then(arrived)

    def _take(self, worker: int, words: Tensor, future: torch.futures.Future[Any]) -> None:
        future.value()  # raises if the receive has failed
        header = Header.decode(words)
        payload = None
        if header.kind == Kind.PUSH:
            payload = self._channel.receive(worker, Tag.GRADIENT, self._packing.new_buffer())
        if header.kind != Kind.CLOSE:
            self._listen(worker)

        def answer(header: Header, messages: Sequence[Tensor]) -> None:
            self._channel.send_header(worker, Tag.ANSWER, header)
            for message in messages:
                self._channel.send(worker, Tag.ANSWERED, message)

        self.shard.take(Request(worker, header, answer, payload))
