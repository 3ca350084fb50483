"""A server, which updates its keys with the workers' gradients, and a worker's connection to it."""

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.errors import RingcommError
from ringcomm.parallel.parameter_server import messages
from ringcomm.parallel.parameter_server.messages import Header, Key, Kind, Packing, Tag

Groups = Sequence[Mapping[str, Any]]  # of all keys; "params" are names
# Sends a header, and a message unless None, to the worker of a request; does not wait.
Answer = Callable[[tuple[Header, Tensor | None]], None]


class ServerOptimizer:
    """torch's optimizer over a server's copies of its keys, on the CPU.

    `groups` are those of all keys, `values` the initial values of this server's keys. A group is
    kept even if none of its parameters is here. States contain "master" if workers have rounded
    values.
    """

    def __init__(
        self,
        make: messages.MakeOptimizer,
        groups: Groups,
        values: Mapping[str, Tensor],
        *,
        keeps_master: bool,
    ) -> None:
        self._keeps_master = keeps_master
        self.params = {
            name: nn.Parameter(value.detach().to("cpu", copy=True))
            for name, value in values.items()
        }
        # In the order of the optimizer's groups.
        self._names = [[name for name in group["params"] if name in values] for group in groups]
        here = [
            {**group, "params": [self.params[name] for name in names]}
            for group, names in zip(groups, self._names, strict=True)
        ]
        self._optimizer = make(here)
        taken = [[id(p) for p in group["params"]] for group in self._optimizer.param_groups]
        if taken != [[id(p) for p in group["params"]] for group in here]:
            raise ValueError(
                "make_optimizer returned an optimizer of other parameters, perhaps the model's:"
                " use the parameters that it gets as its argument"
            )

    def step(self, gradient: Sequence[Tensor | None]) -> None:
        """One update, with a gradient by key, cast to its parameter's dtype.

        A parameter with None is not updated, as in torch's optimizers.
        """
        for param, part in zip(self.params.values(), gradient, strict=True):
            param.grad = None if part is None else part.to(param.dtype)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """As torch's, but by names; groups have those of this server's parameters."""
        own = self._optimizer.state_dict()
        order = list(chain(*self._names))  # torch's numbers are places in it
        state = {order[number]: dict(values) for number, values in own["state"].items()}
        for name, param in self.params.items():
            if self._keeps_master:
                state.setdefault(name, {})["master"] = param.detach()
        for group, names in zip(own["param_groups"], self._names, strict=True):
            group["params"] = names
        used = {name: values for name, values in state.items() if values}
        return {"state": used, "param_groups": own["param_groups"]}

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Loads its keys from weights and, optionally, a whole state that misfit() has accepted.

        A state's "master" comes before a weight.
        """
        given = state.get("state", {})
        for name, param in self.params.items():
            param.copy_(given.get(name, {}).get("master", weights[name]))
        if not state.get("param_groups"):
            return
        numbers = {name: number for number, name in enumerate(chain(*self._names))}
        groups = [
            {**saved, "params": [numbers[name] for name in names]}
            for saved, names in zip(state["param_groups"], self._names, strict=True)
        ]
        used: dict[int, Any] = {}
        for name, number in numbers.items():
            values = {k: v for k, v in given.get(name, {}).items() if k != "master"}
            used |= {number: values} if values else {}
        self._optimizer.load_state_dict({"state": used, "param_groups": groups})


def misfit(state: Mapping[str, Any], groups: Groups, keys: Mapping[str, Key]) -> str | None:
    """Why a whole state by names does not fit the keys; None if it does."""
    sizes = [len(group["params"]) for group in state.get("param_groups", ())]
    ours = [len(group["params"]) for group in groups]
    if sizes != ours:
        return (
            f"the state has parameter groups of {sizes} parameters, but the parameter server has"
            f" {ours}"
        )
    of_names = state.get("state", {})
    strangers = sorted(of_names.keys() - keys.keys())
    if strangers:
        return f"the state has {strangers[:3]}, which the parameter server does not train"
    for name, values in of_names.items():
        for key, value in values.items():
            shape = keys[name].shape
            if isinstance(value, Tensor) and value.dim() and value.shape != shape:
                return (
                    f"{key} of {name} must have the shape of {name}, {tuple(shape)}, got"
                    f" {tuple(value.shape)}"
                )
    return None


class _Gradient(NamedTuple):
    version: int  # of the weights that it was computed with
    factor: float  # to multiply it by; 0 if it is not finite
    tensors: list[Tensor | None]  # by key of this server, in wire dtypes; None if missing


class Server:
    """The keys of one server, and the loop that serves one request after the other.

    A receive of a header is always pending from every other worker: its completion wakes the loop,
    and its failure reports the worker's death. Requests of the worker in this process come into the
    same inbox.

    With is_in_rounds update t is the mean of the t-th gradients of all workers that have not closed
    before; otherwise every gradient is an update.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        workers: Sequence[int],
        packing: Packing,
        optimizer: ServerOptimizer,
        *,
        is_in_rounds: bool,
    ) -> None:
        self.version = self.num_skipped = 0  # updates; without a finite gradient they are skipped
        self.staleness: Counter[int] = Counter()  # gradients by versions between pull and update
        self._group, self._packing, self._optimizer = group, packing, optimizer
        self._of_gradients = packing.of_gradients()
        self._is_in_rounds = is_in_rounds
        self._present = set(workers)
        self._queues: dict[int, deque[_Gradient]] = {worker: deque() for worker in sorted(workers)}
        self._held: list[tuple[Header, Answer]] = []  # pulls of versions that are not available yet
        self._packed: Tensor | None = None  # this version's weights, once a worker pulls them
        self._lock = threading.Lock()  # held while a request is served
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()  # for this process, or the loop's error
        self._error: BaseException | None = None
        self._has_told = threading.Event()  # the other ranks of the error
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Runs the loop in a thread."""
        self._thread = threading.Thread(target=self.run, name="ringcomm-ps", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Waits until all workers have closed; raises the error that has ended the loop."""
        if self._thread is not None:
            self._thread.join()
        self._raise_error()

    def raise_cause(self) -> None:
        """Raises the error that has ended the loop, unless it is a failure of the group."""
        if not isinstance(self._error, RingcommError):
            self._raise_error()

    def _raise_error(self) -> None:
        """Not before the others know: this rank may leave the group at once."""
        if self._error is not None:
            self._has_told.wait()
            raise self._error

    def run(self) -> None:
        """The loop, until all workers have closed. An error ends the group; join() raises it."""
        try:
            for worker in self._present - {self._group.rank()}:
                self._listen(worker)
            while self._present:
                task = self._inbox.get()
                with self._lock:
                    task()
        except BaseException as error:
            self._error = error
            if not isinstance(error, RingcommError):
                self._group.abort()
            self._has_told.set()
            self._answers.put(error)

    def load(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """See ServerOptimizer.load(); before the first update."""
        with self._lock:
            self._optimizer.load(weights, state)

    def submit(self, header: Header, gradient: Tensor | None = None) -> None:
        """Submits a request of the worker in this process; raises the error that ended the loop."""
        self._raise_error()
        request = self._group.rank(), header, gradient, self._answers.put
        self._inbox.put(partial(self._serve, *request))

    def next_answer(self) -> tuple[Header, Tensor | None]:
        """Waits for an answer to this process; raises the error that ended the loop."""
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            self._answers.put(answer)  # for the next call
            raise answer
        return answer

    def _listen(self, worker: int) -> None:
        words = torch.empty(4, dtype=torch.float64, device="cpu")
        work: Any = dist.irecv(words, group=self._group, group_src=worker, tag=Tag.REQUEST)
        take = partial(self._take, worker, words)
        work.get_future().then(lambda future: self._inbox.put(partial(take, future)))

    def _take(self, worker: int, words: Tensor, future: torch.futures.Future[Any]) -> None:
        future.value()  # raises if the receive has failed
        header = Header.decode(words)
        gradient = None
        if header.kind == Kind.PUSH:
            gradient = messages.receive(
                self._group, worker, Tag.GRADIENT, self._of_gradients.new_buffer()
            )
        if header.kind != Kind.CLOSE:
            self._listen(worker)

        def answer(parts: tuple[Header, Tensor | None]) -> None:
            for tag, part in zip((Tag.ANSWER, Tag.ANSWERED), parts, strict=True):
                if part is not None:
                    messages.send(self._group, worker, tag, part)

        self._serve(worker, header, gradient, answer)

    def _serve(self, worker: int, header: Header, gradient: Tensor | None, answer: Answer) -> None:
        """Serves a request, or keeps a pull until its version is available."""
        if header.kind == Kind.STATE:
            state = messages.packed(self._optimizer.state_dict())
            answer((Header(Kind.ANSWER, self.version, num_bytes=state.numel()), state))
            return
        if header.kind == Kind.PULL:
            self._held.append((header, answer))
        elif gradient is not None:
            *views, is_there = self._of_gradients.views(gradient)
            found = zip(views, is_there.tolist(), strict=True)
            tensors = [view if is_given else None for view, is_given in found]
            self._queues[worker].append(_Gradient(header.has_version, header.version, tensors))
        else:  # a worker closes
            self._present.discard(worker)
        while gradients := self._next_update():
            # All servers get the same factors, and skip the same updates.
            if all(gradient.factor for gradient in gradients):
                for each in gradients:
                    self.staleness[self.version - each.version] += 1
                self._optimizer.step(_mean_of(gradients))
            else:
                self.num_skipped += 1
            self.version += 1
            self._packed = None
        held, self._held = self._held, []
        for pull, answer_pull in held:
            if pull.version > self.version:
                self._held.append((pull, answer_pull))
            elif pull.has_version == self.version:
                answer_pull((Header(Kind.ANSWER, self.version), None))
            else:
                if self._packed is None:
                    self._packed = self._packing.pack([*self._optimizer.params.values()])
                num_bytes = self._packed.numel()
                answer_pull((Header(Kind.ANSWER, self.version, num_bytes=num_bytes), self._packed))

    def _next_update(self) -> list[_Gradient]:
        """The gradients of the next update in the order of workers; empty while one is missing."""
        if self._is_in_rounds and not all(self._queues[worker] for worker in self._present):
            return []
        return [queue.popleft() for queue in self._queues.values() if queue]


def _mean_of(gradients: Sequence[_Gradient]) -> list[Tensor | None]:
    """The mean gradient by key: summed in the given order, 16-bit ones in float32.

    Missing ones count as zeros, unless all are.
    """
    if len(gradients) == 1 and gradients[0].factor == 1:
        return gradients[0].tensors
    means: list[Tensor | None] = []
    for parts in zip(*(gradient.tensors for gradient in gradients), strict=True):
        total = None
        for part, gradient in zip(parts, gradients, strict=True):
            if part is None:
                continue
            if total is None:
                total = part.to(torch.promote_types(part.dtype, torch.float32), copy=True)
                total.mul_(gradient.factor)
            else:
                total.add_(part, alpha=gradient.factor)
        means.append(None if total is None else total.div_(len(gradients)))
    return means


@dataclass
class Port:
    """A worker's connection to one server, which has the keys of these names.

    Nothing is sent to a server in this process; values are rounded as if they were sent.
    """

    _group: dist.ProcessGroup
    _rank: int
    names: list[str]
    packing: Packing
    _own: Server | None  # the server if it is in this process
    version: int = 0  # of the last pull
    _pushed: Tensor | None = None
    _pushing: Any = None
    _received: Tensor = field(  # reused
        default_factory=lambda: torch.empty(0, dtype=torch.uint8, device="cpu")
    )

    def ask(self, header: Header) -> Any:
        """Sends a request without a gradient; does not wait."""
        if self._own is not None:
            return self._own.submit(header)
        return messages.send(self._group, self._rank, Tag.REQUEST, header)

    def push(self, header: Header, gradient: Sequence[Tensor | None]) -> None:
        """Sends a gradient by key, None for a missing one; it may be overwritten afterwards."""
        packing = self.packing.of_gradients()
        has = [grad is not None for grad in gradient]
        is_there = torch.tensor(has, dtype=torch.uint8, device="cpu")
        if self._own is not None:
            self._own.submit(header, packing.pack([*gradient, is_there]))
            return
        self._flush()
        self._pushed = packing.pack([*gradient, is_there], self._pushed)
        self.ask(header)
        self._pushing = messages.send(self._group, self._rank, Tag.GRADIENT, self._pushed)

    def _flush(self) -> None:
        pushing, self._pushing = self._pushing, None
        if pushing is not None:
            pushing.wait()

    def answer(self) -> tuple[int, Tensor | None]:
        """Waits for a version, and the message sent with it, if any; valid until the next call."""
        if self._own is not None:
            header, message = self._own.next_answer()
            return int(header.version), message
        words = torch.empty(4, dtype=torch.float64, device="cpu")
        header = Header.decode(messages.receive(self._group, self._rank, Tag.ANSWER, words))
        message = None
        if header.num_bytes:
            self._received = self._received.resize_(header.num_bytes)
            message = messages.receive(self._group, self._rank, Tag.ANSWERED, self._received)
        return int(header.version), message

    def close(self) -> None:
        """Sends the last request, and waits until everything has been sent."""
        self._flush()
        closing = self.ask(Header(Kind.CLOSE))
        if closing is not None:
            closing.wait()
