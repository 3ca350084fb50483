"""Ranks started by a launcher, and groups of any backend, including mpi4py's communicator.

    mpiexec -n 2 python -m ringcomm bench all_reduce --peers gloo,mpi4py

Under MPI the buffers are the tensors' own memory, and calls go to mpi4py's buffer interface, which
adds about as much to a call as c10d does.
"""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from _ringcomm.status import RankError
from ringcomm.measure import ranks
from ringcomm.measure.ranks import (
    PeerLostError,
    Team,
    joined_world_size,
    mpi_world_size,
)
from ringcomm.measure.timing import GROUP_TIMEOUT, open_default_group

MPI = "mpi4py"  # its name among the backends; "mpi" is c10d's own
# All cores for all ranks: by Intel's own pinning a rank's threads, such as Gloo's, share one core.
# Open MPI refuses to start more ranks than cores, and any as root, unless told.
MPI_ENVIRONMENT = {
    "I_MPI_PIN": "off",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}
# A TCPStore drops the connection of a rank that sets a value of more than 8 MiB.
MAX_STORE_VALUE = 4 << 20


class Communicator:
    """All ranks that mpiexec has started. Raises ImportError where mpi4py is not installed."""

    backend = MPI

    def __init__(self) -> None:
        from mpi4py import MPI as library  # noqa: N811 - it starts MPI, so not before it is wanted

        world = library.COMM_WORLD
        self.rank: int = world.rank
        self.size: int = world.size
        self.broadcast: Callable[[Any], Any] = world.bcast
        self.barrier: Callable[[], None] = world.Barrier
        self.all_reduce: Callable[[Any, Any], None] = world.Allreduce
        self.all_gather: Callable[[Any, Any], None] = world.Allgather
        self.reduce_scatter: Callable[[Any, Any], None] = world.Reduce_scatter_block
        self.in_place: Any = library.IN_PLACE
        # Some end theirs with a line and a zero.
        self.version: str = library.Get_library_version().partition("\n")[0].strip(" \0")


class _StoreChannel:
    """A pair of queues in a c10d store, with the interface of a ``Connection``."""

    def __init__(self, store: dist.Store, mine: int, theirs: int) -> None:
        self._store = store
        self._names = f"{mine}>{theirs}", f"{theirs}>{mine}"
        self._num_sent = self._num_received = 0

    def send(self, value: Any) -> None:
        text, name = pickle.dumps(value).hex(), f"{self._names[0]}/{self._num_sent}"
        starts = range(0, len(text), MAX_STORE_VALUE)
        try:
            for part, start in enumerate(starts):
                self._store.set(f"{name}/{part}", text[start : start + MAX_STORE_VALUE])
            self._store.set(name, str(len(starts)))  # last, because the other end waits for it
        except dist.DistNetworkError as error:
            raise BrokenPipeError(str(error)) from None
        self._num_sent += 1

    def _next(self) -> str:
        return f"{self._names[1]}/{self._num_received}"

    def poll(self, timeout: float) -> bool:
        try:
            self._store.wait([self._next()], timedelta(seconds=timeout))
        except dist.DistNetworkError as error:
            raise EOFError(str(error)) from None
        except RuntimeError:  # timeout; some stores have no class for it
            return False
        return True

    def recv(self) -> Any:
        name = self._next()
        parts = [f"{name}/{part}" for part in range(int(self._store.get(name)))]
        text = b"".join(map(self._store.get, parts)).decode()
        for key in (name, *parts):
            self._store.delete_key(key)
        self._num_received += 1
        return pickle.loads(bytes.fromhex(text))


def _mpi_store() -> tuple[dist.Store, int, int]:
    """A store for the processes that mpiexec has started, with rank and number. Collective.

    Raises ValueError on all ranks if they do not find each other.
    """
    all_ranks = Communicator()
    if all_ranks.size != mpi_world_size():
        raise ValueError(
            f"mpiexec has started {mpi_world_size()} rank(s), but mpi4py sees {all_ranks.size}:"
            " it belongs to another MPI"
        )
    host = all_ranks.broadcast(socket.gethostname())
    store = dist.TCPStore(host, 0, is_master=True) if all_ranks.rank == 0 else None
    port = all_ranks.broadcast(store.port if store is not None else None)
    return store or dist.TCPStore(host, port), all_ranks.rank, all_ranks.size


def _join(world_size: int, on_message: Callable[[Any], None]) -> Team:
    """This process's end of the team that its launcher has started. Collective.

    Raises ValueError for another number of ranks, before any rank waits for others.
    """
    size = joined_world_size()
    if size != world_size:
        raise ValueError(
            f"the launcher has started {size} rank(s), but {world_size} were requested"
        )
    is_mpi = mpi_world_size() is not None
    store, rank, _ = _mpi_store() if is_mpi else next(iter(dist.rendezvous("env://")))
    side = dist.PrefixStore("ringcomm-bench-side-channel", store)
    others = range(1, world_size) if rank == 0 else [0]
    peers = [_StoreChannel(side, rank, other) for other in others]
    return Team(rank, world_size, peers, on_message, lambda name: dist.PrefixStore(name, store))


def run_ranks(
    world_size: int, main: Callable[[Team], None], on_message: Callable[[Any], None]
) -> None:
    """As ``ringcomm.measure.ranks.run_ranks``; under torchrun or mpiexec with the launcher's ranks.

    With a launcher this process already is a rank: it runs ``main`` itself, and ``on_message`` is
    called on rank 0.

    Raises:
        RankError: the first rank that failed, and why.
        ValueError: the launcher has started another number of ranks.
    """
    if joined_world_size() is None:
        ranks.run_ranks(world_size, main, on_message)
        return
    try:
        main(_join(world_size, on_message))
    except PeerLostError:
        raise RankError(
            "the launcher's store is gone, because the process of rank 0 has ended"
        ) from None


def labelled(backends: list[str]) -> dict[str, str]:
    """Backends by label: one given twice gets #2, for a run of A against A."""
    labels: dict[str, str] = {}
    counts = dict.fromkeys(backends, 0)
    for name in backends:
        counts[name] += 1
        labels[name if counts[name] == 1 else f"{name}#{counts[name]}"] = name
    return labels


def open_groups(
    team: Team, backends: dict[str, str], pg_options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A process group or communicator per label, on top of one more group. Collective.

    The additional group uses Gloo if torch has it. ``pg_options`` are by label.
    """
    of_torch = [backend for backend in backends.values() if backend != MPI]
    open_default_group(team, "gloo" if dist.is_gloo_available() else of_torch[0])
    options, timeout = pg_options or {}, GROUP_TIMEOUT
    return {
        label: dist.new_group(backend=backend, timeout=timeout, pg_options=options.get(label))
        if backend != MPI
        else Communicator()
        for label, backend in backends.items()
    }
