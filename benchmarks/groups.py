"""Ranks started by a launcher, and groups of any backend, including mpi4py's communicator.

    mpiexec -n 2 python -m ringcomm bench all_reduce --peers gloo,mpi4py

Under MPI the buffers are the tensors' own memory, and calls go to mpi4py's buffer interface, which
adds about as much to a call as c10d does.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
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


def _connections(store: dist.Store, rank: int, world_size: int, host: str) -> list[Connection]:
    """Rank 0's connections to each other rank, in order; elsewhere the one to rank 0. Collective.

    ``host`` is rank 0's.
    """
    if rank > 0:
        port, key = store.get("port"), store.get("key")
        peer = Client((host, int(port)), "AF_INET", authkey=key)
        peer.send(rank)
        return [peer]
    secret = secrets.token_hex(16)
    with Listener(("", 0), "AF_INET", backlog=world_size, authkey=secret.encode()) as listener:
        store.set("key", secret)
        store.set("port", str(listener.address[1]))
        peers = [listener.accept() for _ in range(1, world_size)]
    by_rank = {peer.recv(): peer for peer in peers}
    return [by_rank[other] for other in range(1, world_size)]


def _mpi_store() -> tuple[dist.Store, int, str]:
    """A store for the processes that mpiexec has started, the rank, and rank 0's host. Collective.

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
    return store or dist.TCPStore(host, port), all_ranks.rank, host


def _join(world_size: int, on_message: Callable[[Any], None]) -> Team:
    """This process's end of the team that its launcher has started. Collective.

    Raises ValueError for another number of ranks, before any rank waits for others.
    """
    size = joined_world_size()
    if size != world_size:
        raise ValueError(
            f"the launcher has started {size} rank(s), but {world_size} were requested"
        )
    if mpi_world_size() is not None:
        store, rank, host = _mpi_store()
    else:
        store, rank, _ = next(iter(dist.rendezvous("env://")))
        host = os.environ["MASTER_ADDR"]
    side = dist.PrefixStore("ringcomm-bench-side-channel", store)
    peers = _connections(side, rank, world_size, host)
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
        raise RankError("another rank of the launcher has ended early") from None


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
