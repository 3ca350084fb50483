"""The ranks that measure: forked processes and a side channel between them.

Ranks coordinate through pipes, so that no backend under test is involved. Forking costs 0.4 s, a
fresh interpreter with torch 3 to 14 s. It is safe because the parent has not computed with several
threads before: numpy's BLAS ends its own threads at a fork.
"""

import itertools
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

from _ringcomm.status import RankError
from ringcomm.process import path_of
from ringcomm.torch_names import die_with_parent

# Longest wait of a rank for another; a call of a backend under test has its group's own timeout.
SIDE_CHANNEL_TIMEOUT_S = 300.0
RUN_TIMEOUT_S = 7200.0  # of rank 0 to its next report
POLL_S = 0.05
# For this long, a rank that lost its peer lets the peer report the error.
GRACE_S = 1.0
# Environment variables of launchers: MPICH and Intel MPI, Open MPI.
MPI_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")


def mpi_world_size() -> int | None:
    """How many ranks mpiexec has started, this process among them, or None."""
    sizes = (os.environ.get(name) for name in MPI_SIZE_VARIABLES)
    return next((int(size) for size in sizes if size), None)


def joined_world_size() -> int | None:
    """How many ranks torchrun or mpiexec has started, this process among them, or None."""
    is_rank = {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()
    return int(os.environ["WORLD_SIZE"]) if is_rank else mpi_world_size()


class PeerLostError(Exception):
    """The other end of the side channel is gone."""


@dataclass
class Team:
    """One rank's view of all: a side channel that sleeps while it waits."""

    rank: int
    world_size: int
    peers: Sequence[Any]  # connections; on rank 0 to each other rank, in order; elsewhere to rank 0
    report: Callable[[Any], None]  # to the process that prints and writes; for rank 0 alone
    open_store: Callable[[str], dist.Store]  # a fresh one by name, the same on all ranks

    def gather(self, value: Any) -> list[Any] | None:
        """Every rank's value by rank, on rank 0; None elsewhere. Collective."""
        if self.rank != 0:
            self._send(self.peers[0], value)
            return None
        return [value, *(self._receive(peer) for peer in self.peers)]

    def agree(self, value: Any) -> Any:
        """Rank 0's value, on all. Collective; blocks until rank 0 calls it."""
        if self.rank != 0:
            return self._receive(self.peers[0])
        for peer in self.peers:
            self._send(peer, value)
        return value

    def share(self, value: Any) -> list[Any]:
        """Every rank's value by rank, on all ranks. Collective; returns after all have arrived."""
        return self.agree(self.gather(value))

    @staticmethod
    def _send(peer: Any, value: Any) -> None:
        try:
            peer.send(value)
        except OSError:
            raise PeerLostError from None

    @staticmethod
    def _receive(peer: Any) -> Any:
        try:
            if peer.poll(SIDE_CHANNEL_TIMEOUT_S):
                return peer.recv()
        except (EOFError, OSError):
            raise PeerLostError from None
        raise TimeoutError(f"another rank sent nothing for {SIDE_CHANNEL_TIMEOUT_S:.0f} s")


def _be_rank(
    rank: int,
    main: Callable[[Team], None],
    pairs: list[tuple[Connection, Connection]],
    outbox: Connection,
    memory: str,
) -> None:
    """Runs a forked rank. ``pairs`` join rank 0 with each other rank; ``memory`` has the store."""
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.pop("RINGCOMM_AS_GLOO", None)  # with it ringcomm would be compared with itself
    world_size = len(pairs) + 1
    peers = [pair[0] for pair in pairs] if rank == 0 else [pairs[rank - 1][1]]
    for end in itertools.chain(*pairs):  # the other ends must close when their ranks exit
        if end not in peers:
            end.close()

    store = dist.FileStore(memory, world_size)

    def open_store(name: str) -> dist.Store:
        return dist.PrefixStore(name, store)

    try:
        main(Team(rank, world_size, peers, outbox.send, open_store))
    except PeerLostError:
        time.sleep(GRACE_S)
        raise RuntimeError("another rank ended early, without an error") from None


def _pass_on(inbox: Connection, on_message: Callable[[Any], None], timeout_s: float) -> bool:
    """Whether there was a message."""
    has_any = False
    while inbox.poll(timeout_s):
        try:
            message = inbox.recv()
        except (EOFError, OSError):  # all ranks have ended
            break
        on_message(message)
        has_any = True
    return has_any


def run_ranks(
    world_size: int, main: Callable[[Team], None], on_message: Callable[[Any], None]
) -> None:
    """Forks ``world_size`` ranks that run ``main(team)``; blocks until all have ended.

    ``on_message`` gets, in this process, what rank 0 passes to ``team.report``. When a rank fails,
    or this process is interrupted, all ranks are killed; none outlives this process. Raises
    RankError with the first rank that failed, and why, OSError without /proc.
    """
    # The logger reports each process that it terminates.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    pairs: list[Any] = [Pipe() for _ in range(1, world_size)]
    inbox, outbox = Pipe(duplex=False)
    deadline = time.monotonic() + RUN_TIMEOUT_S
    # Memory in place of a file: a SIGKILL leaves nothing of it.
    with open(os.memfd_create("ringcomm-bench"), "rb") as memory:
        arguments = (main, pairs, outbox, path_of(memory.fileno()))
        ranks = mp.start_processes(
            _be_rank, arguments, nprocs=world_size, join=False, start_method="fork"
        )
        for end in (outbox, *itertools.chain(*pairs)):
            end.close()
        try:
            while not ranks.join(timeout=0):
                if _pass_on(inbox, on_message, POLL_S):
                    deadline = time.monotonic() + RUN_TIMEOUT_S
                if time.monotonic() > deadline:
                    raise RankError(f"ranks reported nothing for {RUN_TIMEOUT_S:.0f} s")
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            raise RankError(f"rank {error.error_index}: {error.msg.strip()}") from None
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
            _pass_on(inbox, on_message, 0)
            inbox.close()
