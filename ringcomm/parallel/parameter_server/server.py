"""A server, which updates its keys with the workers' gradients, and a worker's connection to it.

A key is a trainable parameter. A message is a header of 32 bytes, perhaps with packed tensors after
it.
"""

import ctypes
import io
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.errors import RingcommError
from ringcomm.parallel.offload.transfers import edges_in_row, views_in_row

PULL, PUSH, STATE, CLOSE = range(4)  # pulls and requests for states are answered
TO_SERVER, TO_WORKER = 1, 2  # tags, which separate the two roles of a rank that works and serves

# The version of the weights that it was computed with, and tensors by key of a server, in wire
# dtypes; None for a missing one.
Gradient = tuple[int, list[Tensor | None]]


class Header(NamedTuple):
    """Four int64 numbers.

    Attributes:
        version: of a worker's last pull; of an answer, the one that is sent.
        wanted: of a pull, the lowest acceptable version.
        num_bytes: the size of the message after an answer; 0 if there is none.
    """

    kind: int
    version: int = 0
    wanted: int = 0
    num_bytes: int = 0


def owned_keys(sizes: Mapping[str, int], servers: Sequence[int]) -> dict[int, list[str]]:
    """The keys of each server by name; assigns the largest first, to the server with least bytes.

    The result is the same on every rank. The maximum is at most 4/3 of the optimum (Graham 1969).
    """
    loads = dict.fromkeys(servers, 0)
    owner: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        owner[name] = min(servers, key=loads.__getitem__)
        loads[owner[name]] += sizes[name]
    used = sorted(set(owner.values()))
    return {server: [name for name in sizes if owner[name] == server] for server in used}


def new_buffer(likes: Sequence[Tensor]) -> Tensor:
    """A row of bytes in host memory for tensors like these."""
    return torch.empty(edges_in_row(likes)[-1], dtype=torch.uint8, device="cpu")


def with_flags(likes: Sequence[Tensor]) -> list[Tensor]:
    """Of gradients: like these tensors, and a last one with 1 for each that is not missing."""
    return [*likes, torch.empty(len(likes), dtype=torch.uint8, device="meta")]


@torch.no_grad()
def in_one_row(tensors: Sequence[Tensor | None], likes: Sequence[Tensor]) -> Tensor:
    """A buffer with copies of tensors of any device, cast; zeros for None.

    Those of a device are put together there, for one copy to the host.
    """
    kinds = (tensor.device for tensor in tensors if tensor is not None)
    device = next((kind for kind in kinds if kind.type != "cpu"), None)
    buffer = new_buffer(likes)
    place = buffer if device is None else torch.empty_like(buffer, device=device)
    for view, tensor in zip(views_in_row(place, likes), tensors, strict=True):
        if tensor is None:
            view.zero_()
        else:
            view.copy_(tensor, non_blocking=device is not None)
    return buffer if device is None else buffer.copy_(place)


def _send(group: dist.ProcessGroup, peer: int, tag: int, message: Tensor | Header) -> Any:
    """Returns a Work at once, which keeps the message. Any thread may call this."""
    if isinstance(message, Header):
        message = torch.tensor(message, dtype=torch.int64, device="cpu")
    return dist.isend(message, group=group, group_dst=peer, tag=tag)


def _new_words() -> Tensor:
    """To receive a header in."""
    return torch.empty(4, dtype=torch.int64, device="cpu")


def packed(state: Mapping[str, Any]) -> Tensor:
    """As bytes, uint8."""
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def unpacked(message: Tensor) -> dict[str, Any]:
    """The state of packed()."""
    content = ctypes.string_at(message.data_ptr(), message.numel())
    return torch.load(io.BytesIO(content), weights_only=True)


class Server:
    """The keys of one server, and a thread that serves one request after the other.

    A receive of a header is always pending from every other worker: its completion wakes the loop,
    and its failure reports the worker's death. Requests of the worker in this process come into the
    same inbox. An error ends the loop and the group.

    `workers` are ranks of `group`. `params` are the keys, on the CPU, in the order of the
    optimizer's groups; messages have tensors like `likes`. With is_in_rounds update t is the mean
    of the t-th gradients of all workers that have not closed before; otherwise every gradient is an
    update.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        workers: Sequence[int],
        likes: Sequence[Tensor],
        params: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        is_in_rounds: bool,
    ) -> None:
        self.version = 0  # the number of updates
        self.staleness: Counter[int] = Counter()  # gradients by versions between pull and update
        self._group, self._likes, self._gradients = group, likes, with_flags(likes)
        self._params, self._optimizer = params, optimizer
        self._is_in_rounds = is_in_rounds
        self._present = set(workers)
        self._queues: dict[int, deque[Gradient]] = {worker: deque() for worker in sorted(workers)}
        self._held: list[tuple[int, Header]] = []  # pulls of versions that are not available yet
        self._packed: Tensor | None = None  # this version's weights, once a worker pulls them
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()  # to this process; None after an error
        self._error: BaseException | None = None
        self._has_told = threading.Event()  # the other ranks of the error
        self._thread = threading.Thread(target=self._run, name="ringcomm-ps", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Waits until all workers have closed; raises the error that has ended the loop."""
        self._thread.join()
        self.raise_error()

    def raise_error(self) -> None:
        """Raises the error that has ended the loop, if any.

        Not before the others know: this rank may leave the group at once.
        """
        if self._error is not None:
            self._has_told.wait()
            raise self._error

    def submit(self, header: Header, gradient: Tensor | None = None) -> None:
        """Submits a request of the worker in this process; raises the error that ended the loop."""
        self.raise_error()
        self._inbox.put(partial(self._serve, self._group.rank(), header, gradient))

    def next_answer(self) -> tuple[int, Tensor | None]:
        """Waits for an answer to this process; raises the error that ended the loop."""
        answer = self._answers.get()
        if answer is None:
            self.raise_error()
        found: tuple[int, Tensor | None] = answer
        return found

    def state(self) -> dict[str, Any]:
        """As torch's state_dict(), but by names; a weight that workers round is its "master"."""
        own = self._optimizer.state_dict()
        states = {name: own["state"].get(idx, {}) for idx, name in enumerate(self._params)}
        for (name, param), like in zip(self._params.items(), self._likes, strict=True):
            if param.dtype != like.dtype:
                states[name] = {**states[name], "master": param.detach()}
        return {**own, "state": states}

    @torch.no_grad()
    def load(self, weights: Mapping[str, nn.Parameter], whole: torch.optim.Optimizer) -> None:
        """Loads the model's weights, or their masters, and states, before the first update."""
        state = self._optimizer.state_dict()
        state["state"] = {}
        for number, (name, param) in enumerate(self._params.items()):
            values = dict(whole.state.get(weights[name], {}))
            param.copy_(values.pop("master", weights[name]))
            if values:
                state["state"][number] = values
        for ours, theirs in zip(state["param_groups"], whole.param_groups, strict=True):
            ours |= {**theirs, "params": ours["params"]}
        self._optimizer.load_state_dict(state)

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
            self._has_told.set()
            self._answers.put(None)

    def _listen(self, worker: int) -> None:
        words = _new_words()
        work: Any = dist.irecv(words, group=self._group, group_src=worker, tag=TO_SERVER)
        take = partial(self._take, worker, words)
        work.get_future().then(lambda future: self._inbox.put(partial(take, future)))

    def _take(self, worker: int, words: Tensor, future: torch.futures.Future[Any]) -> None:
        future.value()  # raises if the receive has failed
        header = Header(*words.tolist())
        gradient = None
        if header.kind == PUSH:
            gradient = new_buffer(self._gradients)
            dist.recv(gradient, group=self._group, group_src=worker, tag=TO_SERVER)
        if header.kind != CLOSE:
            self._listen(worker)
        self._serve(worker, header, gradient)

    def _answer(self, worker: int, kind: int, message: Tensor | None = None) -> None:
        """Sends this version, and a message; does not wait."""
        if worker == self._group.rank():
            self._answers.put((self.version, message))
            return
        num_bytes = 0 if message is None else message.numel()
        header = Header(kind, self.version, num_bytes=num_bytes)
        _send(self._group, worker, TO_WORKER, header)
        if message is not None and num_bytes:
            _send(self._group, worker, TO_WORKER, message)

    def _serve(self, worker: int, header: Header, gradient: Tensor | None) -> None:
        """Serves a request, or keeps a pull until its version is available."""
        if header.kind == STATE:
            self._answer(worker, STATE, packed(self.state()))
            return
        if header.kind == PULL:
            self._held.append((worker, header))
        elif gradient is not None:
            *views, is_there = views_in_row(gradient, self._gradients)
            found = zip(views, is_there.tolist(), strict=True)
            tensors = [view if is_given else None for view, is_given in found]
            self._queues[worker].append((header.version, tensors))
        else:  # a worker closes
            self._present.discard(worker)
        while gradients := self._next_update():
            self._update(gradients)
        held, self._held = self._held, []
        for puller, pull in held:
            if pull.wanted > self.version:
                self._held.append((puller, pull))
            elif pull.version == self.version:
                self._answer(puller, PULL)
            else:
                if self._packed is None:
                    self._packed = in_one_row([*self._params.values()], self._likes)
                self._answer(puller, PULL, self._packed)

    def _next_update(self) -> list[Gradient]:
        """The gradients of the next update in the order of workers; empty while one is missing."""
        if self._is_in_rounds and not all(self._queues[worker] for worker in self._present):
            return []
        return [queue.popleft() for queue in self._queues.values() if queue]

    def _update(self, gradients: Sequence[Gradient]) -> None:
        """A parameter without any gradient is not updated, as in torch's optimizers."""
        versions, tensors = zip(*gradients, strict=True)
        self.staleness.update(self.version - version for version in versions)
        for param, parts in zip(self._params.values(), zip(*tensors, strict=True), strict=True):
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
    """A worker's connection to one server, which has the keys of these names.

    `own` is the server if it is in this process. Nothing is sent to it, but values are rounded.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        names: list[str],
        likes: Sequence[Tensor],
        own: Server | None,
    ) -> None:
        self.names, self.likes = names, likes
        self.version = 0  # of the last pull
        self._group, self._rank, self._own = group, rank, own
        self._gradients = with_flags(likes)
        self._pushing: Any = None

    def ask(self, header: Header) -> Any:
        """Sends a request without a gradient; does not wait."""
        if self._own is not None:
            return self._own.submit(header)
        return _send(self._group, self._rank, TO_SERVER, header)

    def push(self, header: Header, gradient: Sequence[Tensor | None]) -> None:
        """Sends copies of gradients by key, None for a missing one, after those of before."""
        has = [grad is not None for grad in gradient]
        tensors = [*gradient, torch.tensor(has, dtype=torch.uint8, device="cpu")]
        if self._own is not None:
            self._own.submit(header, in_one_row(tensors, self._gradients))
            return
        if self._pushing is not None:
            self._pushing.wait()
        self._pushing = None  # its memory is free before more is taken
        pushed = in_one_row(tensors, self._gradients)
        self.ask(header)
        self._pushing = _send(self._group, self._rank, TO_SERVER, pushed)

    def answer(self) -> tuple[int, Tensor | None]:
        """Waits for a version, and the message sent with it, if any."""
        if self._own is not None:
            return self._own.next_answer()
        words, sender = _new_words(), {"group_src": self._rank, "tag": TO_WORKER}
        dist.recv(words, group=self._group, **sender)
        header = Header(*words.tolist())
        if not header.num_bytes:
            return header.version, None
        received = torch.empty(header.num_bytes, dtype=torch.uint8, device="cpu")
        dist.recv(received, group=self._group, **sender)
        return header.version, received

    def close(self) -> None:
        """Sends the last request, and waits until everything has been sent."""
        for work in (self._pushing, self.ask(Header(CLOSE))):
            if work is not None:
                work.wait()
