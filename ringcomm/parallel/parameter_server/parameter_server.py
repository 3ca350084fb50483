"""ParameterServer: the interface of a rank that is a worker, a server, or both."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Self

from ringcomm.backend import resolve_group
from ringcomm.errors import RingcommError
from ringcomm.parallel.flat_collectives import check_agreement
from ringcomm.parallel.model.cut import note_trainer
from ringcomm.parallel.model.describe import describe, start_equal
from ringcomm.parallel.model.refuse import Asked, refuse
from ringcomm.parallel.offload.transfers import views_in_row
from ringcomm.parallel.optimizer_classes import of_parts, params_in, take_options
from ringcomm.parallel.optimizer_kinds import needs_whole
from ringcomm.parallel.parameter_server.server import (
    PULL,
    PUSH,
    STATE,
    Header,
    Port,
    Server,
    owned_keys,
    unpacked,
)
from ringcomm.torch_names import backend_of, timeout_of


class ParameterServer:
    """Trains a model through servers, each with some of its parameters (Li et al. 2014).

    A worker pulls new weights, computes gradients, and pushes them:

        with ParameterServer(model, lambda params: torch.optim.SGD(params, lr=0.1)) as server:
            for batch in batches:
                server.pull()
                loss_of(model, batch).backward()
                server.push()
            server.pull()

    A parameter that requires grad is a key. Every key has one server; the servers have about
    equally many bytes. With Phi bytes of keys, a worker sends Phi and receives Phi in a step, less
    the keys of a server in its own process. Each server adds per push a header of 32 bytes and a
    byte per key, and a header in each direction per pull.

    With `staleness` s, update t is the mean of the t-th gradients of all workers, and step t of a
    worker waits for update t-1-s: 0 is synchronous training. With None no worker waits, and every
    gradient is a separate update. After a worker has closed, means are over the other workers.

    Args:
        model: a module with the same parameter names, shapes and dtypes on all ranks. Parameters
            and buffers start from rank 0's.
        make_optimizer: called with parameter groups (a list of dicts, as torch's optimizers take);
            returns a torch optimizer. All ranks call it first with the model's own parameters, to
            learn its class; then servers do with theirs, which are on the CPU.
        group: None for the default group; any backend, because messages use ringcomm. Ranks here
            are in the group's numbering.
        mesh: a one-dimensional DeviceMesh, instead of a group.
        servers: "all", or the ranks that serve.
        dedicated: servers only serve: they call serve(), and the other ranks are the workers.
        staleness: the bound s, or None.
        param_groups: as torch's optimizers take them, of the model's own parameters. Default: one
            of all that require grad.
        wire_dtype: such as torch.bfloat16: wider parameters and gradients are sent in it. Sums and
            servers' weights keep their own dtype.
        elementwise, whole: see zero.shard().

    Attributes:
        group: a separate group for its messages.
        servers: ranks that have keys.
        keys: by server the names of its parameters.

    Raises:
        TypeError: the model is not a module; make_optimizer does not return an optimizer; or the
            optimizer updates several weights together, or is of a class that is neither known nor
            in `elementwise` or `whole`.
        ValueError: an argument is out of range, or ranks disagree. Nothing has been changed.
        PeerDiedError: a worker or a server has died; `rank` is its rank. Raised by every method.
        CollectiveTimeoutError: a worker sent nothing for the group's timeout; likewise.

    Collective: makes a group, and one broadcast.
    """

    @torch.inference_mode(False)  # updates must be able to write states
    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        *,
        group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        servers: Literal["all"] | Sequence[int] = "all",
        dedicated: bool = False,
        staleness: int | None = 0,
        param_groups: Iterable[Any] | None = None,
        wire_dtype: torch.dtype | None = None,
        elementwise: Collection[type] = (),
        whole: Collection[type] = (),
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"expected a model, got {type(model).__name__}")
        if not callable(make_optimizer):
            raise TypeError(
                "make_optimizer must return an optimizer for given parameters, such as lambda"
                f" params: torch.optim.SGD(params, lr=0.1); got {type(make_optimizer).__name__}"
            )
        group = resolve_group(group, mesh)
        described = describe(model)
        ranks = _checked_servers(servers, group.size())
        if dedicated and len(ranks) == group.size():
            raise ValueError("dedicated=True leaves no worker: use fewer servers or more ranks")
        if staleness is not None and (type(staleness) is not int or staleness < 0):
            raise ValueError(f"staleness must be None or a number of steps >= 0, got {staleness!r}")
        is_dtype = isinstance(wire_dtype, torch.dtype)
        if wire_dtype is not None and not (is_dtype and wire_dtype.is_floating_point):
            raise ValueError(
                f"wire_dtype must be a floating-point dtype such as bfloat16, got {wire_dtype}"
            )
        self._model, self._staleness = model, staleness
        trained = {w.name: param for param, w in described.weights.items() if param.requires_grad}
        if not trained:
            raise ValueError("no parameter requires grad: at least one is needed")
        given = trained.values() if param_groups is None else param_groups
        copied: list[Any] = [dict(each) if isinstance(each, dict) else each for each in given]
        groups = torch.optim.Optimizer(copied, {}).param_groups
        own = {*params_in(groups)}
        refuse(described, Asked("ParameterServer", "ParameterServer", trained=own))
        # It never steps: it has the groups, and carries states for get_state_dict().
        self._optimizer = _made(make_optimizer, groups, len(trained))
        groups = self._optimizer.param_groups
        name_of = {param: name for name, param in trained.items()}
        self._params = {name_of[param]: param for param in params_in(groups)}
        likes = {name: _sent_as(name, param, wire_dtype) for name, param in self._params.items()}
        needs_whole(self._optimizer, elementwise, whole, is_copied=False)
        mine = {
            "options": (ranks, dedicated, staleness, wire_dtype),
            "parameters": [(n, tuple(p.shape), str(p.dtype)) for n, p in self._params.items()],
            "parameter groups": [len(each["params"]) for each in groups],
        }
        check_agreement(mine, group)
        backend: Any = backend_of(group, torch.device("cpu"))
        self.group: dist.ProcessGroup = dist.new_group(
            dist.get_process_group_ranks(group),
            backend="ringcomm",
            timeout=timeout_of(backend),
            pg_options=backend.options if backend.name() == "ringcomm" else None,
            use_local_synchronization=group.size() < dist.get_world_size(),
            group_desc="ringcomm parameter server",
        )
        start_equal(described, [self.group])
        self.keys = owned_keys({name: like.nbytes for name, like in likes.items()}, ranks)
        self.servers = list(self.keys)
        workers = [rank for rank in range(group.size()) if not (dedicated and rank in ranks)]
        likes_of = {of: [likes[name] for name in names] for of, names in self.keys.items()}
        rank = self.group.rank()
        self._server: Server | None = None
        if rank in self.keys:
            copies = {
                name: nn.Parameter(self._params[name].detach().to("cpu", copy=True))
                for name in self.keys[rank]
            }
            parts = {self._params[name]: copy for name, copy in copies.items()}
            here = [of_parts(each, parts) for each in groups]
            optimizer = _made(make_optimizer, here, len(copies))
            rounds: Any = {"is_in_rounds": staleness is not None}
            self._server = Server(self.group, workers, likes_of[rank], copies, optimizer, **rounds)
        self._ports: list[Port] = []  # empty on a rank that is not a worker
        if rank in workers:
            self._ports = [
                Port(self.group, of, names, likes_of[of], self._server if of == rank else None)
                for of, names in self.keys.items()
            ]
        self._num_pushes = 0
        self._is_closed = False
        note_trainer(self._params.values(), self)

    def serve(self) -> None:
        """On a dedicated server, waits until all workers have closed; RuntimeError on a worker."""
        if self._ports:
            raise RuntimeError("serve() is for dedicated servers; a worker serves without it")
        if self._server is not None:
            self._server.join()

    def pull(self, *, fresh: bool = False) -> None:
        """Pulls the model's weights; waits for the version that the staleness bound requires.

        Args:
            fresh: wait for all updates before this step, regardless of the bound: for an
                evaluation, or after the last step.

        Raises:
            RuntimeError: this rank is no worker, or has closed.
        """
        bound = self._staleness
        wanted = 0 if bound is None else self._num_pushes - (0 if fresh else bound)
        with self._working("pull()"):
            for port in self._ports:
                port.ask(Header(PULL, port.version, max(0, wanted)))
            answers = [port.answer() for port in self._ports]
        with torch.no_grad():
            for port, (version, message) in zip(self._ports, answers, strict=True):
                if message is not None:
                    device = self._params[port.names[0]].device  # by one copy
                    values = views_in_row(message.to(device), port.likes)
                    for name, value in zip(port.names, values, strict=True):
                        self._params[name].copy_(value)
                port.version = version

    @torch.inference_mode(False)  # updates must be able to write states
    def push(self) -> None:
        """Sends the gradients and clears them; does not wait for the update.

        Gradients may be accumulated over several backward passes. A missing gradient counts as
        zeros, as under DDP; a parameter without a gradient on any worker is not updated.

        Raises:
            RuntimeError: as from pull().
            ValueError: a gradient is sparse, or the model's parameters have changed.
        """
        with self._working("push()"):
            self._check_unchanged()
            for port in self._ports:
                gradients = [self._params[name].grad for name in port.names]
                port.push(Header(PUSH, port.version), gradients)
        for param in self._params.values():
            param.grad = None
        self._num_pushes += 1

    @contextmanager
    def _working(self, what: str) -> Iterator[None]:
        """Raises the error of this rank's server, if any, instead of the group's."""
        if not self._ports:
            raise RuntimeError(f"{what} is for workers; a dedicated server calls serve()")
        if self._is_closed:
            raise RuntimeError(f"{what} after close()")
        try:
            yield
        except RingcommError:
            if self._server is not None:
                self._server.raise_error()
            raise

    def _check_unchanged(self) -> None:
        found = {p: name for name, p in self._model.named_parameters() if p.requires_grad}
        known = {param: name for name, param in self._params.items()}
        for param in found.keys() ^ known.keys():
            raise ValueError(
                f"{known.get(param) or found[param]} was added, replaced, frozen or unfrozen after"
                " the ParameterServer was made: close() it, and make a new one for the changed"
                " model"
            )
        for param, name in known.items():
            if param.grad is not None and param.grad.is_sparse:
                raise ValueError(
                    f"the gradient of {name} is sparse, but a parameter server needs dense"
                    " gradients: make the embedding with sparse=False"
                )

    @property
    def version(self) -> int:
        """The number of updates in a worker's weights, or made by a dedicated server."""
        if self._ports:
            return min(port.version for port in self._ports)
        return 0 if self._server is None else self._server.version

    @property
    def staleness_histogram(self) -> Counter[int]:
        """The number of gradients applied by this rank's server, by their age in updates."""
        return Counter() if self._server is None else Counter(self._server.staleness)

    def pull_states(self) -> torch.optim.Optimizer:
        """The servers' states and groups, in an optimizer of the model's parameters.

        With a wire_dtype a state also has "master", the parameter's value at its server. Not
        collective; asks the servers. Raises RuntimeError if this rank is no worker, or has closed.
        """
        with self._working("get_state_dict()"):
            for port in self._ports:
                port.ask(Header(STATE))
            answers = [port.answer()[1] for port in self._ports]
        self._optimizer.state.clear()
        for answer in answers:
            assert answer is not None
            part = unpacked(answer)
            for name, values in part["state"].items():
                self._optimizer.state[self._params[name]] = values
            for own, given in zip(self._optimizer.param_groups, part["param_groups"], strict=True):
                take_options(own, given)
        return self._optimizer

    def new_states(self) -> torch.optim.Optimizer:
        """The optimizer of the model's parameters, with a "master" of each; for push_states()."""
        self._optimizer.state.clear()
        for param in self._params.values():
            self._optimizer.state[param]["master"] = param.detach().clone()
        return self._optimizer

    @torch.inference_mode(False)  # updates must be able to write states
    def push_states(self) -> None:
        """Loads the model's weights and that optimizer's states into the servers; before step 0.

        Collective: a barrier, also of dedicated servers.
        """
        if self._server is not None:
            self._server.load(self._params, self._optimizer)
        self._optimizer.state.clear()
        dist.barrier(self.group)

    def close(self) -> None:
        """Ends this rank's participation; a second call does nothing.

        The other workers continue without it. On a rank that serves, it returns when all workers
        have closed. The model keeps the weights that it has pulled.
        """
        if self._is_closed:
            return
        try:
            if self._ports:
                with self._working("close()"):
                    for port in self._ports:
                        port.close()
            if self._server is not None:
                self._server.join()
        finally:
            self._leave()

    def _leave(self) -> None:
        self._is_closed = True
        note_trainer(self._params.values(), None)
        dist.destroy_process_group(self.group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        """close(); after an error leaves the group, so that the other ranks do not wait."""
        if kind is None:
            self.close()
        elif not self._is_closed:
            self._leave()


def _checked_servers(servers: str | Sequence[int], world_size: int) -> tuple[int, ...]:
    if servers == "all":
        return tuple(range(world_size))
    is_list = not isinstance(servers, str) and all(isinstance(rank, int) for rank in servers)
    if not is_list or not servers or len(set(servers)) < len(servers):
        raise ValueError(f'servers must be "all" or a list of different ranks, got {servers!r}')
    ranks = tuple(sorted(int(rank) for rank in servers))
    if ranks[0] < 0 or ranks[-1] >= world_size:
        raise ValueError(f"servers must be ranks of a group of {world_size}, got {list(ranks)}")
    return ranks


def _sent_as(name: str, param: nn.Parameter, wire_dtype: torch.dtype | None) -> Tensor:
    """Like it on the wire, on the meta device: in wire_dtype, or in its own if that is no wider."""
    if type(param.data) is not Tensor or param.layout != torch.strided or param.is_meta:
        raise ValueError(f"parameters must be plain, dense tensors that have values; {name} is not")
    dtype = param.dtype
    if wire_dtype is not None and dtype.is_floating_point:
        dtype = min(dtype, wire_dtype, key=lambda each: each.itemsize)
    return torch.empty(param.shape, dtype=dtype, device="meta")


def _made(
    make_optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    groups: list[dict[str, Any]],
    num_params: int,
) -> torch.optim.Optimizer:
    """The optimizer of groups that have all of so many parameters, and must have each once."""
    given = [[id(param) for param in group["params"]] for group in groups]
    made = make_optimizer(groups)
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"make_optimizer must return a torch optimizer, got {type(made).__name__}")
    taken = [[id(param) for param in group["params"]] for group in made.param_groups]
    if taken != given or sum(map(len, given)) > num_params:
        raise ValueError(
            "make_optimizer returned an optimizer of other parameters: it must use the groups that"
            " it gets, and param_groups must have each parameter of the model that requires grad"
            " exactly once; one is not in the model, frozen, or repeated"
        )
    return made
