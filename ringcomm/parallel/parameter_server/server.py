"""A server, which updates its keys with the workers' gradients, and a worker's connection to it."""

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.errors import RingcommError
from ringcomm.parallel.parameter_server.messages import Header, Kind, Packing, Tag, packed, send

# Sends a header, and a message unless None, to the worker of a request; does not wait.
Answer = Callable[[tuple[Header, Tensor | None]], None]


# The version of the weights that it was computed with, and tensors by key of this server, in wire
# dtypes; None for a missing one.
Gradient = tuple[int, list[Tensor | None]]


class Server:
    """The keys of one server, and a thread that serves one request after the other.

    A receive of a header is always pending from every other worker: its completion wakes the loop,
    and its failure reports the worker's death. Requests of the worker in this process come into the
    same inbox. An error ends the loop and the group.

    `workers` are ranks of `group`. `params` are the keys, on the CPU, in the order of the
    optimizer's groups and of the packing. With is_in_rounds update t is the mean of the t-th
    gradients of all workers that have not closed before; otherwise every gradient is an update.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        workers: Sequence[int],
        packing: Packing,
        params: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        is_in_rounds: bool,
    ) -> None:
        self.version = 0  # the number of updates
        self.staleness: Counter[int] = Counter()  # gradients by versions between pull and update
        self._group, self._packing, self._gradients = group, packing, packing.of_gradients()
        self._params, self._optimizer = params, optimizer
        self._is_in_rounds = is_in_rounds
        self._present = set(workers)
        self._queues: dict[int, deque[Gradient]] = {worker: deque() for worker in sorted(workers)}
        self._held: list[tuple[Header, Answer]] = []  # pulls of versions that are not available yet
        self._packed: Tensor | None = None  # this version's weights, once a worker pulls them
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()  # for this process; None after an error
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
        request = self._group.rank(), header, gradient, self._answers.put
        self._inbox.put(partial(self._serve, *request))

    def next_answer(self) -> tuple[Header, Tensor | None]:
        """Waits for an answer to this process; raises the error that ended the loop."""
        answer = self._answers.get()
        if answer is None:
            self.raise_error()
        return answer

    def state(self) -> dict[str, Any]:
        """As torch's state_dict(), but by names; parameters of groups are this server's numbers.

        A weight that workers have rounded is its "master".
        """
        own = self._optimizer.state_dict()
        states = {}
        for number, (name, param) in enumerate(self._params.items()):
            is_rounded = param.dtype != self._packing.kinds[number][1]
            master = {"master": param.detach()} if is_rounded else {}
            if of_param := own["state"].get(number, {}) | master:
                states[name] = of_param
        return {"state": states, "param_groups": own["param_groups"]}

    @torch.no_grad()
    def load(self, weights: Mapping[str, nn.Parameter], whole: torch.optim.Optimizer) -> None:
        """Loads its keys from the model's weights, and states of an optimizer of these.

        A state's "master" comes before a weight. Before the first update: no request reads keys.
        """
        used = {}
        for number, (name, param) in enumerate(self._params.items()):
            values = dict(whole.state.get(weights[name], {}))
            param.copy_(values.pop("master", weights[name]))
            if values:
                used[number] = values
        groups = [
            {**theirs, "params": ours["params"]}
            for theirs, ours in zip(
                whole.param_groups, self._optimizer.state_dict()["param_groups"], strict=True
            )
        ]
        self._optimizer.load_state_dict({"state": used, "param_groups": groups})

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
        words = Header.new_words()
        work: Any = dist.irecv(words, group=self._group, group_src=worker, tag=Tag.TO_SERVER)
        take = partial(self._take, worker, words)
        work.get_future().then(lambda future: self._inbox.put(partial(take, future)))

    def _take(self, worker: int, words: Tensor, future: torch.futures.Future[Any]) -> None:
        future.value()  # raises if the receive has failed
        header = Header(*words.tolist())
        gradient = None
        if header.kind == Kind.PUSH:
            gradient = self._gradients.new_buffer()
            dist.recv(gradient, group=self._group, group_src=worker, tag=Tag.TO_SERVER)
        if header.kind != Kind.CLOSE:
            self._listen(worker)

        def answer(parts: tuple[Header, Tensor | None]) -> None:
            for part in parts:
                if part is not None:
                    send(self._group, worker, Tag.TO_WORKER, part)

        self._serve(worker, header, gradient, answer)

    def _serve(self, worker: int, header: Header, gradient: Tensor | None, answer: Answer) -> None:
        """Serves a request, or keeps a pull until its version is available."""
        if header.kind == Kind.STATE:
            state = packed(self.state())
            answer((Header(Kind.ANSWER, self.version, num_bytes=state.numel()), state))
            return
        if header.kind == Kind.PULL:
            self._held.append((header, answer))
        elif gradient is not None:
            *views, is_there = self._gradients.views(gradient)
            found = zip(views, is_there.tolist(), strict=True)
            tensors = [view if is_given else None for view, is_given in found]
            self._queues[worker].append((header.version, tensors))
        else:  # a worker closes
            self._present.discard(worker)
        while gradients := self._next_update():
            self._update(gradients)
        held, self._held = self._held, []
        for pull, answer_pull in held:
            if pull.wanted > self.version:
                self._held.append((pull, answer_pull))
            elif pull.version == self.version:
                answer_pull((Header(Kind.ANSWER, self.version), None))
            else:
                if self._packed is None:
                    self._packed = self._packing.pack([*self._params.values()])
                num_bytes = self._packed.numel()
                answer_pull((Header(Kind.ANSWER, self.version, num_bytes=num_bytes), self._packed))

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

    `own` is the server if it is in this process: nothing is sent to it, and values are rounded as
    if they were sent.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        names: list[str],
        packing: Packing,
        own: Server | None,
    ) -> None:
        self.names, self.packing = names, packing
        self.version = 0  # of the last pull
        self._group, self._rank, self._own = group, rank, own
        self._gradients = packing.of_gradients()
        self._pushed: Tensor | None = None  # reused, like _received
        self._pushing: Any = None
        self._received = torch.empty(0, dtype=torch.uint8, device="cpu")

    def ask(self, header: Header) -> Any:
        """Sends a request without a gradient; does not wait."""
        if self._own is not None:
            return self._own.submit(header)
        return send(self._group, self._rank, Tag.TO_SERVER, header)

    def push(self, header: Header, gradient: Sequence[Tensor | None]) -> None:
        """Sends a gradient by key, None for a missing one; it may be overwritten afterwards."""
        has = [grad is not None for grad in gradient]
        tensors = [*gradient, torch.tensor(has, dtype=torch.uint8, device="cpu")]
        if self._own is not None:
            self._own.submit(header, self._gradients.pack(tensors))
            return
        if self._pushing is not None:
            self._pushing.wait()
        self._pushed = self._gradients.pack(tensors, self._pushed)
        self.ask(header)
        self._pushing = send(self._group, self._rank, Tag.TO_SERVER, self._pushed)

    def answer(self) -> tuple[int, Tensor | None]:
        """Waits for a version, and the message sent with it, if any; valid until the next call."""
        if self._own is not None:
            header, message = self._own.next_answer()
            return header.version, message
        words, sender = Header.new_words(), {"group_src": self._rank, "tag": Tag.TO_WORKER}
        dist.recv(words, group=self._group, **sender)
        header = Header(*words.tolist())
        if not header.num_bytes:
            return header.version, None
        self._received.resize_(header.num_bytes)
        dist.recv(self._received, group=self._group, **sender)
        return header.version, self._received

    def close(self) -> None:
        """Sends the last request, and waits until everything has been sent."""
        for work in (self._pushing, self.ask(Header(Kind.CLOSE))):
            if work is not None:
                work.wait()
