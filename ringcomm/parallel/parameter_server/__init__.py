"""A parameter server (Li et al. 2014): workers push gradients and pull weights, in step or not."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ringcomm.backend import resolve_group
from ringcomm.errors import RingcommError
from ringcomm.parallel.flat_collectives import agreeing
from ringcomm.parallel.model.cut import note_trainer
from ringcomm.parallel.model.describe import describe, start_equal
from ringcomm.parallel.model.refuse import Asked, refuse
from ringcomm.parallel.offload.transfers import views_in_row
from ringcomm.parallel.optimizer_classes import of_parts, params_in
from ringcomm.parallel.optimizer_kinds import needs_whole
from ringcomm.parallel.parameter_server.server import PULL, Port, Server, owned_keys
from ringcomm.torch_names import backend_of, timeout_of, version_of

__all__ = ["ParameterServer"]


class ParameterServer(AbstractContextManager["ParameterServer"]):
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
    the keys of a server in its own process. Each server adds per push a header of 24 bytes and a
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
        elementwise, whole: see zero.shard().

    Attributes:
        group: a separate group for its messages.
        servers: ranks that have keys.
        keys: by server the names of its parameters.
        server_optimizer: that of this rank's server, of copies of its keys; None without. Save its
            state_dict() after serve(); or between pull(fresh=True) and push(), unless staleness is
            None. Load one before the first push(), with a barrier after it.

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
        elementwise: Collection[type] = (),
        whole: Collection[type] = (),
    ) -> None:
        group = resolve_group(group, mesh)
        with agreeing(group) as mine:
            if not isinstance(model, nn.Module):
                raise TypeError(f"expected a model, got {type(model).__name__}")
            described = describe(model)
            ranks = _checked_servers(servers, group.size())
            if dedicated and len(ranks) == group.size():
                raise ValueError("dedicated=True leaves no worker: use fewer servers or more ranks")
            if staleness is not None and (type(staleness) is not int or staleness < 0):
                raise ValueError(
                    f"staleness must be None or a number of steps >= 0, got {staleness!r}"
                )
            trained = [param for param in described.weights if param.requires_grad]
            if not trained:
                raise ValueError("no parameter requires grad: at least one is needed")
            given = trained if param_groups is None else param_groups
            copied: list[Any] = [dict(each) if isinstance(each, dict) else each for each in given]
            groups = torch.optim.Optimizer(copied, {}).param_groups
            asked = Asked("ParameterServer", "ParameterServer", trained={*params_in(groups)})
            refuse(described, asked)
            # Optimizers and schedulers write into the groups that they get.
            of_model = _made(make_optimizer, [dict(each) for each in groups], len(trained))
            needs_whole(of_model, elementwise, whole, is_copied=False)
            self._params = {described.weights[param].name: param for param in params_in(groups)}
            for name, param in self._params.items():
                if type(param.data) is not Tensor or param.layout != torch.strided or param.is_meta:
                    raise ValueError(
                        f"parameters must be plain, dense tensors that have values; {name} is not"
                    )
            mine |= {
                "options": (ranks, dedicated, staleness),
                "parameters": [(n, tuple(p.shape), str(p.dtype)) for n, p in self._params.items()],
                "parameter groups": [len(each["params"]) for each in groups],
            }
        self._model, self._staleness = model, staleness
        self.server_optimizer: torch.optim.Optimizer | None = None
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
        self.keys = owned_keys({name: param.nbytes for name, param in self._params.items()}, ranks)
        self.servers = list(self.keys)
        workers = [rank for rank in range(group.size()) if not (dedicated and rank in ranks)]
        rank = self.group.rank()
        self._server: Server | None = None
        if rank in self.keys:
            parts = {
                self._params[name]: nn.Parameter(self._params[name].detach().to("cpu", copy=True))
                for name in self.keys[rank]
            }
            here = [of_parts(each, parts) for each in groups]
            self.server_optimizer = _made(make_optimizer, here, len(parts))
            self._server = Server(self.group, workers, self.server_optimizer, staleness)
        self._ports: list[Port] = []  # empty on a rank that is not a worker
        for server, names in self.keys.items() if rank in workers else ():
            params = [self._params[name] for name in names]
            own = self._server if server == rank else None
            self._ports.append(Port(self.group, server, params, own))
        self._num_pushes, self._is_closed = 0, False
        self._first_writes = self._writes()
        note_trainer(self._params.values(), self)

    def serve(self) -> None:
        """On a dedicated server, waits until all workers have closed; RuntimeError on a worker."""
        if self._ports:
            raise RuntimeError("serve() is for dedicated servers; a worker serves without it")
        if self._server is not None:
            self._server.join()

    @torch.no_grad()
    def pull(self, *, fresh: bool = False) -> None:
        """Pulls the model's weights; waits for the version that the staleness bound requires.

        Args:
            fresh: wait for all updates before this step, regardless of the bound: for an
                evaluation, or after the last step.

        Raises:
            RuntimeError: this rank is no worker, or has closed.
            ValueError: other weights were loaded after the ParameterServer was made.
        """
        bound = self._staleness
        wanted = 0 if bound is None else self._num_pushes - (0 if fresh else bound)
        is_written = self._num_pushes == 0 and self._writes() != self._first_writes
        with self._working("pull()"):
            for port in self._ports:
                if is_written:
                    port.version = -1  # the server's weights come, to compare with
                port.ask(PULL, max(0, wanted))
            answers = [port.answer() for port in self._ports]
        for port, (version, row) in zip(self._ports, answers, strict=True):
            if row is not None:
                values = views_in_row(row.to(port.params[0].device), port.likes)  # by one copy
                for param, value in zip(port.params, values, strict=True):
                    if is_written and version == 0 and not param.equal(value.to(param)):
                        raise ValueError(
                            "the model's weights have changed since the ParameterServer was made,"
                            " but its servers have those of before: load weights first"
                        )
                    param.copy_(value)
            port.version = version

    def _writes(self) -> list[int]:
        """How often each weight has been written in place."""
        return [version_of(param) for param in self._params.values()]

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
                port.push()
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
    def staleness_histogram(self) -> Counter[int]:
        """The number of gradients by age in updates, of this rank's server."""
        return Counter() if self._server is None else Counter(self._server.staleness)

    @property
    def version(self) -> int:
        """The number of updates in a worker's weights, or made by a dedicated server."""
        if self._ports:
            return min(port.version for port in self._ports)
        return 0 if self._server is None else self._server.version

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

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        """close(); after an error leaves the group, so that the other ranks do not wait."""
        if kind is None:
            self.close()
        elif not self._is_closed:
            self._leave()


def _checked_servers(servers: str | Sequence[int], world_size: int) -> tuple[int, ...]:
    if servers == "all":
        return tuple(range(world_size))
    ranks = [*servers] if isinstance(servers, Iterable) else []
    are_ranks = all(isinstance(rank, int) and rank in range(world_size) for rank in ranks)
    if not ranks or not are_ranks or len({*ranks}) < len(ranks):
        raise ValueError(
            f'servers must be "all" or a list of different ranks of a group of {world_size}, got'
            f" {servers!r}"
        )
    return tuple(sorted(ranks))


def _made(
    make_optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    groups: list[dict[str, Any]],
    num_params: int,
) -> torch.optim.Optimizer:
    """The optimizer of groups that have all of so many parameters, and must have each once."""
    given = [[id(param) for param in group["params"]] for group in groups]
    made = make_optimizer(groups) if callable(make_optimizer) else make_optimizer
    if not callable(make_optimizer) or not isinstance(made, torch.optim.Optimizer):
        raise TypeError(
            "make_optimizer must return a torch optimizer of given parameter groups, such as lambda"
            f" groups: torch.optim.SGD(groups, lr=0.1); got {type(made).__name__}"
        )
    taken = [[id(param) for param in group["params"]] for group in made.param_groups]
    if taken != given or sum(map(len, given)) > num_params:
        raise ValueError(
            "make_optimizer returned an optimizer of other parameters: it must use the groups that"
            " it gets, and param_groups must have each parameter of the model that requires grad"
            " exactly once; one is not in the model, frozen, or repeated"
        )
    return made
