"""ParameterServer: what a rank that works, or serves, or both, calls."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import Self

from ringcomm.backend import resolve_group
from ringcomm.parallel.parameter_server.assembly import Assembly
from ringcomm.parallel.parameter_server.options import Options
from ringcomm.parallel.parameter_server.param_groups import MakeOptimizer
from ringcomm.parallel.parameter_server.saved_state import check_state, copied, merged, unpacked
from ringcomm.parallel.parameter_server.worker import Worker

__all__ = ["ParameterServer"]


class ParameterServer:
    """Trains a model through servers that have its parameters (Li et al. 2014), each some of them.

    A worker pulls what is new, computes gradients, and pushes them:

        with ParameterServer(model, lambda params: torch.optim.SGD(params, lr=0.1)) as server:
            for batch in batches:
                server.pull()
                loss_of(model, batch).backward()
                server.push()
            server.pull()

    A parameter that requires grad is a key; every key has one server, such that the servers' bytes
    are about equal. With Phi bytes of keys, a step of a worker sends Phi and is sent Phi, less the
    keys of a server in its own process, and headers of 32 bytes: one with a push, one each way with
    a pull, per server.

    Bounds. With `staleness` s, step t of a worker begins only when update t-1-s is there, and
    update t is made of the mean of the t-th gradients of all workers: 0 is synchronous training,
    and a faster worker is at most s steps ahead. With None nobody waits, and every gradient is an
    update of its own, undivided. A worker that closes is waited for no more, and the means are
    those of the others.

    Args:
        model: the parameters, of the same names, shapes and dtypes on all ranks; they and the
            buffers start from rank 0's. A list of modules: replicas of one model, on several
            devices perhaps, whose gradients a push sums.
        make_optimizer: called with parameter groups (a list of dicts, as torch's optimizers take)
            of the parameters that are updated where it is called; returns a torch optimizer.
        group: None for the default group; of any backend, messages go over ringcomm. Ranks here are
            the group's.
        servers: "all", or which ranks serve.
        dedicated: servers only serve: they call serve(), and the other ranks are the workers.
        staleness: the bound s, or None.
        updates_at: "server": workers pull weights. "worker": servers have no optimizer, workers
            pull mean gradients, every one once, and each makes the updates itself; with staleness
            None a pull brings the sum of what has come, which keeps workers alike only if their
            optimizers are linear in the gradient.
        lockstep: step t gets exactly the weights that update t-1-s has made and none that are
            newer: delayed SGD, the same bits in each run. Servers keep s+1 versions.
        schedule: ("pull" or "push", worker) events, in whose order all servers serve: an
            asynchronous run that can be repeated. Wants staleness=None; see replay().
        param_groups: as torch's optimizers take them, of the model's own parameters (the first
            replica's). Default: one of all that require grad.
        wire_dtype: such as torch.bfloat16: what wider parameters and gradients travel in. Sums and
            servers' weights keep their own dtype.
        loss_scale: a factor for float16, or "dynamic": each worker has one, from 2**16, halved when
            its gradient is not finite and doubled after 2000 that are. Gradients travel with it,
            and servers take it away; an update of which one is not finite changes nothing at any.
            Wants updates_at="server"; see scale().
        server_devices: a server spreads its copies over them by bytes.

    Attributes:
        group: a group of its own.
        servers: ranks that have keys.
        keys: by server the names of its parameters.

    Raises:
        TypeError: the model is no module, or make_optimizer makes no optimizer.
        ValueError: an argument is out of range, or ranks disagree. Nothing has been changed.
        PeerDiedError: a worker or a server has died; its `rank` says which. So from every method.
        CollectiveTimeoutError: a worker said nothing for the group's timeout; likewise.

    Collective: makes a group, and one broadcast.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        make_optimizer: MakeOptimizer,
        *,
        group: dist.ProcessGroup | None = None,
        servers: Literal["all"] | Sequence[int] = "all",
        dedicated: bool = False,
        staleness: int | None = 0,
        updates_at: Literal["server", "worker"] = "server",
        lockstep: bool = False,
        schedule: Sequence[tuple[str, int]] | None = None,
        param_groups: Iterable[Any] | None = None,
        wire_dtype: torch.dtype | None = None,
        loss_scale: float | Literal["dynamic"] | None = None,
        server_devices: Sequence[torch.device | str] = ("cpu",),
    ) -> None:
        parts = Assembly.checked(
            *(model, make_optimizer, group, param_groups, server_devices),
            Options.checked(
                resolve_group(group).size(),
                *(
                    servers,
                    dedicated,
                    staleness,
                    updates_at,
                    lockstep,
                    schedule,
                    wire_dtype,
                    loss_scale,
                ),
            ),
        )
        self._options, self._keys, self._groups = parts.options, parts.keys, parts.groups
        self.group = parts.meet()
        self.servers = list(parts.owned)
        self.keys = {
            server: [self._keys[index].name for index in indices]
            for server, indices in parts.owned.items()
        }
        self._serving = parts.serving(self.group)
        self._worker = parts.worker(self.group, self._serving)
        self._turns = deque(
            kind for kind, worker in self._options.schedule or () if worker == self.group.rank()
        )
        self._is_closed = False
        if self._worker is not None and self._serving is not None:
            self._serving.start()

    # ---- what a rank does

    def serve(self) -> None:
        """Serves until all workers have closed. On a dedicated server, once.

        Raises:
            RuntimeError: this rank is a worker, which serves beside its work.
        """
        if self._worker is not None:
            raise RuntimeError("serve() is for dedicated servers; a worker that serves does so")
        if self._serving is not None:
            self._serving.run()

    def pull(self, *, fresh: bool = False) -> None:
        """Brings the model up to date; waits as long as the staleness bound says.

        Args:
            fresh: wait for all updates before this step, whatever the bound is: for an evaluation,
                or behind the last step.

        Raises:
            RuntimeError: this rank is no worker, or has closed; the schedule has another turn.
        """
        worker = self._worker_at("pull")
        staleness = self._options.staleness
        if staleness is None:
            worker.pull(0)
        else:
            worker.pull(worker.num_pushes - (0 if fresh else staleness))

    @property
    def loss_scale(self) -> float:
        """What scale() multiplies a loss by now."""
        worker = self._worker
        return 1.0 if worker is None or worker.scale is None else worker.scale.value

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, for backward(); the loss itself where there is none."""
        worker = self._worker
        return loss if worker is None or worker.scale is None else loss * worker.scale.value

    def push(self) -> None:
        """Sends the gradients and clears them; does not wait for the update.

        What several backward passes have accumulated is sent once. A parameter without a gradient
        has one of zeros, as under DDP.

        Raises:
            RuntimeError: as from pull().
            ValueError: a gradient is sparse, or the model has other parameters than it had.
        """
        self._worker_at("push").push()

    def replay(self, compute: Callable[[], Any]) -> None:
        """Does this worker's events of the schedule: pull(); compute() and push()."""
        if self._options.schedule is None:
            raise RuntimeError("there is no schedule: give ParameterServer one")
        while self._turns:
            if self._turns[0] == "pull":
                self.pull()
            else:
                compute()
                self.push()

    def _worker_at(self, kind: str) -> Worker:
        """Takes this worker's next turn of the schedule."""
        worker = self._checked_worker(f"{kind}()")
        if self._options.schedule is not None:
            turn = self._turns[0] if self._turns else "nothing more"
            if turn != kind:
                raise RuntimeError(f"the schedule has {turn} for this worker, not a {kind}()")
            self._turns.popleft()
        return worker

    def _checked_worker(self, what: str) -> Worker:
        if self._worker is None:
            raise RuntimeError(f"{what} is for workers; a dedicated server calls serve()")
        if self._is_closed:
            raise RuntimeError(f"{what} after close()")
        return self._worker

    # ---- what there is to see

    @property
    def version(self) -> int:
        """How many updates a worker's weights have had; of a dedicated server, how many it made."""
        if self._worker is not None:
            return self._worker.version
        return 0 if self._serving is None else self._serving.shard.version

    @property
    def staleness_histogram(self) -> Counter[int]:
        """Of each gradient applied by the server in this process: updates since its weights.

        Counted by their number; empty where this rank has no keys.
        """
        return Counter() if self._serving is None else Counter(self._serving.shard.staleness)

    @property
    def num_skipped_updates(self) -> int:
        """Updates that the server in this process left out, for gradients that are not finite."""
        return 0 if self._serving is None else self._serving.shard.num_skipped

    # ---- states

    def full_state_dict(self) -> dict[str, Any]:
        """The state_dict() that one torch optimizer over all parameters would have, on the CPU.

        Behind a pull() with everything that this worker has pulled. With a wire_dtype a parameter's
        state also has "master", its value at its server. Not collective; asks the servers.

        Raises:
            RuntimeError: this rank is no worker, or has closed.
        """
        worker = self._checked_worker("full_state_dict()")
        if worker.optimizer is not None:
            return copied(worker.optimizer.state_dict())
        return merged([unpacked(state) for state in worker.states()], self._groups)

    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a whole state, of any number of servers or of torch's optimizer; before step 0.

        The weights are the model's: load them before the ParameterServer is made.

        Args:
            state: the same on all ranks.

        Raises:
            ValueError: the groups or a shape do not fit; nothing has been written.

        Collective: a barrier, also of dedicated servers, before they serve().
        """
        check_state(state, self._groups, self._keys)
        if self._worker is not None and self._worker.optimizer is not None:
            self._worker.optimizer.load_state_dict(dict(state))
        elif self._serving is not None and self._serving.shard.optimizer is not None:
            optimizer = self._serving.shard.optimizer
            self._serving.call(lambda: optimizer.load_state_dict(state))
        dist.barrier(self.group)

    # ---- the end

    def close(self) -> None:
        """Ends this rank's part; a second call does nothing.

        The others go on without it. Where this rank works and serves it returns when all workers
        have closed. The model keeps the weights that it has pulled.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._worker is not None:
                self._worker.close()
            elif self._serving is not None:
                self._serving.join()
        finally:
            dist.destroy_process_group(self.group)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """close(); behind an error leaves the group, so that the others do not wait."""
        if kind is None:
            self.close()
        elif not self._is_closed:
            self._is_closed = True
            dist.destroy_process_group(self.group)
