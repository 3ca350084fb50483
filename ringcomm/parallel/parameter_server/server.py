"""A server, which updates its keys with the workers' gradients, and a worker's connection to it.

A key is a trainable parameter. A message is a header of three int64 numbers, with a row of bytes
after that of a push, and after an answer with a version that the worker does not have.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm.errors import RingcommError
from ringcomm.parallel.offload.transfers import edges_in_row, views_in_row
from ringcomm.parallel.optimizer_classes import params_in
from ringcomm.parallel.zero.owners import balanced

PULL, PUSH, CLOSE = range(3)  # pulls are answered
TO_SERVER, TO_WORKER = 1, 2  # tags, which separate the two roles of a rank that works and serves


class Header(NamedTuple):
    """What a request is, with versions of weights; of an answer the one that is sent."""

    kind: int
    version: int  # of the worker's last pull
    wanted: int = 0  # the lowest that a pull accepts


def owned_keys(sizes: Mapping[str, int], servers: Sequence[int]) -> dict[int, list[str]]:
    """The keys of each server by name, balanced by bytes: the same on every rank."""
    place = balanced(sizes, len(servers))
    found = {server: [k for k in sizes if place[k] == i] for i, server in enumerate(servers)}
    return {server: keys for server, keys in found.items() if keys}


def with_flags(likes: Sequence[Tensor]) -> list[Tensor]:
    """Of gradients: like these tensors, and a last one with 1 for each that is not missing."""
    return [*likes, torch.empty(len(likes), dtype=torch.uint8, device="meta")]


def new_row(likes: Sequence[Tensor], device: torch.device | str = "cpu") -> Tensor:
    """Bytes for tensors like these."""
    return torch.empty(edges_in_row(likes)[-1], dtype=torch.uint8, device=device)


@torch.no_grad()
def in_one_row(tensors: Sequence[Tensor | None], likes: Sequence[Tensor]) -> Tensor:
    """A row in host memory with copies of tensors; zeros for None.

    They are put together on the device of the first one, for one copy to the host.
    """
    device = next(tensor.device for tensor in tensors if tensor is not None)
    row = new_row(likes, device)
    for view, tensor in zip(views_in_row(row, likes), tensors, strict=True):
        if tensor is None:
            view.zero_()
        else:
            view.copy_(tensor, non_blocking=device.type != "cpu")
    return row.cpu()


def send(group: dist.ProcessGroup, peer: int, tag: int, header: Header, row: Tensor | None) -> Any:
    """Returns the Work of the last part at once. Any thread may call this."""
    parts = [torch.tensor(header, dtype=torch.int64, device="cpu"), *([] if row is None else [row])]
    return [dist.isend(part, group=group, group_dst=peer, tag=tag) for part in parts][-1]


class Server:
    """The keys of one server, and a thread that serves one request after the other.

    A receive of a header is always pending from every other worker: its completion wakes the loop,
    and its failure reports the worker's death. Requests of the worker in this process come into the
    same inbox. An error ends the loop and the group.

    `workers` are ranks of `group`. The keys are the optimizer's parameters, on the CPU. Update t is
    the mean of the t-th gradients of all workers that have not closed before; with a staleness of
    None every gradient is an update.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        workers: Sequence[int],
        optimizer: torch.optim.Optimizer,
        staleness: int | None,
    ) -> None:
        self.version = 0  # the number of updates
        self.staleness: Counter[int] = Counter()  # gradients by versions between pull and update
        self._group, self._optimizer = group, optimizer
        self._params = params_in(optimizer.param_groups)
        self._is_in_rounds = staleness is not None
        self._present = set(workers)
        # By worker its gradients, each with the version of the weights that it was computed with.
        self._queues = {worker: deque[tuple[int, Tensor]]() for worker in sorted(workers)}
        self._held: list[tuple[int, Header]] = []  # pulls of versions that are not available yet
        self._packed: Tensor | None = None  # this version's weights, once a worker pulls them
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()  # to this process; None after an error
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="ringcomm-ps", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Waits until all workers have closed; raises the error that has ended the loop."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def raise_error(self) -> None:
        """Raises the error that has ended the loop, if any, once the other ranks know of it."""
        if self._error is not None:
            self.join()  # this rank may leave the group at once

    def ask(self, header: Header, row: Tensor | None) -> None:
        """Takes a request of the worker in this process; raises the error that ended the loop."""
        self.raise_error()
        self._inbox.put(partial(self._serve, self._group.rank(), header, row))

    def answer(self) -> tuple[int, Tensor | None]:
        """Waits for an answer to this process; raises the error that ended the loop."""
        if (found := self._answers.get()) is None:
            self.join()
        answer: tuple[int, Tensor | None] = found
        return answer

    def _run(self) -> None:
        try:
            for worker in self._present - {self._group.rank()}:
                self._listen(worker)
            while self._present:
                self._inbox.get()()
        except BaseException as error:
            self._error = error
            if not isinstance(error, RingcommError):
                self._group.abort()
            self._answers.put(None)

    def _listen(self, worker: int) -> None:
        sender: Any = {"group": self._group, "group_src": worker, "tag": TO_SERVER}
        words = torch.empty(3, dtype=torch.int64, device="cpu")
        work: Any = dist.irecv(words, **sender)

        def take(future: torch.futures.Future[Any]) -> None:
            future.value()  # raises if the receive has failed
            header, row = Header(*words.tolist()), None
            if header.kind == PUSH:
                row = new_row(with_flags(self._params))
                dist.recv(row, **sender)
            if header.kind != CLOSE:
                self._listen(worker)
            self._serve(worker, header, row)

        work.get_future().then(lambda future: self._inbox.put(partial(take, future)))

    def _answer(self, worker: int, row: Tensor | None) -> None:
        """Sends this version, and its weights unless the worker has them; does not wait."""
        if worker == self._group.rank():
            self._answers.put((self.version, row))
        else:
            send(self._group, worker, TO_WORKER, Header(PULL, self.version), row)

    def _serve(self, worker: int, header: Header, row: Tensor | None) -> None:
        """Serves a request, or keeps a pull until its version is available."""
        if header.kind == PULL:
            self._held.append((worker, header))
        elif row is not None:
            self._queues[worker].append((header.version, row))
        else:  # a worker closes
            self._present.discard(worker)
        while gradients := self._next_update():
            self._update(gradients)
        held, self._held = self._held, []
        for puller, pull in held:
            if pull.wanted > self.version:
                self._held.append((puller, pull))
            elif pull.version == self.version:
                self._answer(puller, None)
            else:
                if self._packed is None:
                    self._packed = in_one_row(self._params, self._params)
                self._answer(puller, self._packed)

    def _next_update(self) -> list[tuple[int, Tensor]]:
        """The gradients of the next update in the order of workers; empty while one is missing."""
        if self._is_in_rounds and not all(self._queues[worker] for worker in self._present):
            return []
        return [queue.popleft() for queue in self._queues.values() if queue]

    def _update(self, gradients: Sequence[tuple[int, Tensor]]) -> None:
        """A parameter without any gradient is not updated, as in torch's optimizers."""
        by_worker: list[list[Tensor | None]] = []
        for version, row in gradients:
            self.staleness[self.version - version] += 1
            *views, is_there = views_in_row(row, with_flags(self._params))
            flags = zip(views, is_there.tolist(), strict=True)
            by_worker.append([view if is_given else None for view, is_given in flags])
        for param, parts in zip(self._params, zip(*by_worker, strict=True), strict=True):
            param.grad = _mean_of(parts, param.dtype)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.version += 1
        self._packed = None


def _mean_of(parts: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor | None:
    """The mean of a key's gradients: summed in the given order, 16-bit ones in float32.

    Missing ones count as zeros, unless all are.
    """
    given = [part for part in parts if part is not None]
    if not given:
        return None
    if len(parts) == 1:
        return given[0].to(dtype)
    total = given[0].to(torch.promote_types(given[0].dtype, torch.float32), copy=True)
    for part in given[1:]:
        total.add_(part)
    return total.div_(len(parts)).to(dtype)


class Port:
    """A worker's connection to one server, which has these of its model's parameters.

    `own` is the server if it is in this process: nothing is sent to it.
    """

    def __init__(
        self, group: dist.ProcessGroup, rank: int, params: Sequence[Tensor], own: Server | None
    ) -> None:
        self.params = params
        # As the server's: a program may change the dtypes of its model.
        self.likes = [torch.empty_like(param, device="meta") for param in params]
        self.version = 0  # of the last pull
        self._group, self._rank, self._own = group, rank, own
        self._sent: Any = None  # the Work of the last gradient

    def ask(self, kind: int, wanted: int = 0, row: Tensor | None = None) -> Any:
        """Sends a request; does not wait. Returns its Work if the server is elsewhere."""
        header = Header(kind, self.version, wanted)
        if self._own is not None:
            return self._own.ask(header, row)
        return send(self._group, self._rank, TO_SERVER, header, row)

    def answer(self) -> tuple[int, Tensor | None]:
        """Waits for a version, and its weights, unless they are those of the last pull."""
        if self._own is not None:
            return self._own.answer()
        sender: Any = {"group": self._group, "group_src": self._rank, "tag": TO_WORKER}
        words = torch.empty(3, dtype=torch.int64, device="cpu")
        dist.recv(words, **sender)
        version, row = Header(*words.tolist()).version, None
        if version != self.version:
            row = new_row(self.likes)
            dist.recv(row, **sender)
        return version, row

    def push(self) -> None:
        """Sends copies of the gradients, after those of before."""
        self._settle()
        gradients = [param.grad for param in self.params]
        has = [grad is not None for grad in gradients]
        tensors = [*gradients, torch.tensor(has, dtype=torch.uint8, device="cpu")]
        self._sent = self.ask(PUSH, row=in_one_row(tensors, with_flags(self.likes)))

    def close(self) -> None:
        """Sends the last request, and waits until everything has been sent."""
        self._settle()
        self._sent = self.ask(CLOSE)
        self._settle()

    def _settle(self) -> None:
        if self._sent is not None:
            self._sent.wait()
        self._sent = None  # its memory is free before more is taken
