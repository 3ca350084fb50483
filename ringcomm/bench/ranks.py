"""The ranks that measure: forked here, or started by torchrun; and the channel beside them.

Ranks are forked by a parent that computes nothing with torch before. They agree through pipes (or,
under torchrun, its store) and not through a backend, so that no backend under test has a part in
it.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from ringcomm.bench import mpi
from ringcomm.bench.exit_codes import EXIT_BEREFT, EXIT_FAILED, EXIT_OK
from ringcomm.bench.fork import fork

# Longest wait of a rank for another; a call of a backend under test has its group's own timeout.
SIDE_CHANNEL_TIMEOUT_S = 300.0
RUN_TIMEOUT_S = 7200.0
MAX_WORLD_SIZE = 64
# A TCPStore drops the connection of who sets a value of more than 8 MiB.
MAX_STORE_VALUE = 4 << 20


class RankError(RuntimeError):
    """A rank failed; the text holds its traceback or the signal that ended it."""


class _PeerLostError(Exception):
    """The other end of the side channel is gone."""


def joined_world_size() -> int | None:
    """How many ranks torchrun or mpiexec has started, this process among them, or None."""
    is_rank = {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()
    return int(os.environ["WORLD_SIZE"]) if is_rank else mpi.started_world_size()


class Channel(Protocol):
    """What a side channel takes of a ``Connection``."""

    def send(self, value: Any) -> None:
        """Passes a value on; never waits for the other end."""

    def poll(self, timeout: float) -> bool:
        """Whether a value came within ``timeout`` seconds."""

    def recv(self) -> Any:
        """The next value."""


class Team:
    """One rank's view of all: a side channel that sleeps while it waits.

    Attributes:
        open_store: a fresh c10d store by name, for a process group; the same on all ranks.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        peers: Sequence[Channel],
        on_message: Callable[[Any], None],
        open_store: Callable[[str], dist.Store],
    ) -> None:
        """``peers``: on rank 0 one channel per other rank, in order; elsewhere that to rank 0."""
        self.rank = rank
        self.world_size = world_size
        self.open_store = open_store
        self._peers = peers
        self._on_message = on_message

    def gather(self, value: Any) -> list[Any] | None:
        """Every rank's value by rank, on rank 0; None elsewhere. Collective."""
        if self.rank != 0:
            self._send(self._peers[0], value)
            return None
        return [value, *(self._receive(peer) for peer in self._peers)]

    def agree(self, value: Any) -> Any:
        """Rank 0's value, on all. Collective; blocks until rank 0 calls it."""
        if self.rank != 0:
            return self._receive(self._peers[0])
        for peer in self._peers:
            self._send(peer, value)
        return value

    def share(self, value: Any) -> list[Any]:
        """Every rank's value by rank, on all ranks. Collective; no rank returns before all came."""
        shared: list[Any] = self.agree(self.gather(value))
        return shared

    def report(self, message: Any) -> None:
        """Hands a message to whoever prints and writes: the parent, or rank 0's own process."""
        self._on_message(message)

    @staticmethod
    def _send(peer: Channel, value: Any) -> None:
        try:
            peer.send(value)
        except OSError:
            raise _PeerLostError from None

    @staticmethod
    def _receive(peer: Channel) -> Any:
        try:
            if peer.poll(SIDE_CHANNEL_TIMEOUT_S):
                return peer.recv()
        except (EOFError, OSError):
            raise _PeerLostError from None
        raise TimeoutError(f"another rank said nothing for {SIDE_CHANNEL_TIMEOUT_S:.0f} s")


class _StoreChannel:
    """A pair of queues in a c10d store, in the words of a ``Connection``."""

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
            self._store.set(name, str(len(starts)))  # last: it is what the other end waits for
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
        except RuntimeError:  # it did not come in time; some stores have no class for it
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

    Raises ValueError, on all ranks, where they do not find each other.
    """
    all_ranks = mpi.Communicator()
    if all_ranks.size != mpi.started_world_size():
        raise ValueError(
            f"mpiexec has started {mpi.started_world_size()} rank(s), of which mpi4py sees"
            f" {all_ranks.size}: it belongs to another MPI"
        )
    host = all_ranks.broadcast(socket.gethostname())
    store = dist.TCPStore(host, 0, is_master=True) if all_ranks.rank == 0 else None
    port = all_ranks.broadcast(store.port if store is not None else None)
    return store or dist.TCPStore(host, port), all_ranks.rank, all_ranks.size


def _join(world_size: int, on_message: Callable[[Any], None]) -> Team:
    """This process's end of the team that its launcher has started. Collective.

    Raises ValueError where it has started another number, before any rank waits for others.
    """
    size = joined_world_size()
    if size != world_size:
        raise ValueError(f"the launcher has started {size} rank(s), and {world_size} are asked for")
    is_mpi = mpi.started_world_size() is not None
    store, rank, _ = _mpi_store() if is_mpi else next(iter(dist.rendezvous("env://")))
    side = dist.PrefixStore("ringcomm-bench-side-channel", store)
    others = range(1, world_size) if rank == 0 else [0]
    peers = [_StoreChannel(side, rank, other) for other in others]
    return Team(rank, world_size, peers, on_message, lambda name: dist.PrefixStore(name, store))


def _be_rank(
    team: Team, main: Callable[[Team], None], outbox: Connection, foreign: list[Connection]
) -> int:
    """Runs a forked rank. ``foreign`` are the others' ends, which must end when those do."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for end in foreign:
            end.close()
        main(team)
    except _PeerLostError:
        return EXIT_BEREFT
    except BaseException:
        outbox.send(("failed", traceback.format_exc()))
        return EXIT_FAILED
    return EXIT_OK


def _send_up(outbox: Connection, message: Any) -> None:
    outbox.send(("message", message))


def _fork_ranks(
    world_size: int,
    main: Callable[[Team], None],
    folder: Path,
    pids: list[int],
    inboxes: list[Connection],
) -> None:
    """Forks the ranks, filling ``pids`` and ``inboxes`` one by one."""

    def open_store(name: str) -> dist.Store:
        return dist.FileStore(str(folder / name), world_size)

    pairs = [Pipe() for _ in range(1, world_size)]
    for rank in range(world_size):
        inbox, outbox = Pipe(duplex=False)
        peers = [pair[0] for pair in pairs] if rank == 0 else [pairs[rank - 1][1]]
        inboxes.append(inbox)
        foreign = [*inboxes, *(end for pair in pairs for end in pair if end not in peers)]
        team = Team(rank, world_size, peers, partial(_send_up, outbox), open_store)
        pids.append(fork(partial(_be_rank, team, main, outbox, foreign)))
        outbox.close()  # so that the inbox ends when the rank does
    for pair in pairs:
        for end in pair:
            end.close()


def _attend(
    pids: list[int], inboxes: list[Connection], on_message: Callable[[Any], None], deadline: float
) -> None:
    """Passes the ranks' messages on until all have ended well. Raises RankError."""
    open_inboxes = list(inboxes)
    bereft = []
    while open_inboxes:
        ready = wait(open_inboxes, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"{len(open_inboxes)} rank(s) did not end in {RUN_TIMEOUT_S:.0f} s")
        for inbox in ready:
            assert isinstance(inbox, Connection)
            rank = inboxes.index(inbox)
            try:
                kind, content = inbox.recv()
            except EOFError:
                open_inboxes.remove(inbox)
                code = os.waitstatus_to_exitcode(os.waitpid(pids[rank], 0)[1])
                pids[rank] = 0
                if code < 0:
                    name = signal.Signals(-code).name
                    raise RankError(f"rank {rank} was killed by {name}") from None
                if code not in (EXIT_OK, EXIT_BEREFT):
                    raise RankError(f"rank {rank} ended with exit code {code}") from None
                if code == EXIT_BEREFT:
                    bereft.append(rank)
                continue
            if kind == "failed":
                raise RankError(f"rank {rank} failed:\n{content}")
            on_message(content)
    if bereft:
        raise RankError(f"ranks {bereft} lost a rank that ended too early, without an error")


def run_ranks(
    world_size: int, main: Callable[[Team], None], on_message: Callable[[Any], None]
) -> None:
    """Forks ``world_size`` ranks that run ``main(team)``; blocks until all have ended.

    ``on_message`` gets, in this process, what a rank passes to ``team.report``. When a rank fails,
    or this process is interrupted, all ranks are killed; none outlives this process.

    Under torchrun or mpiexec this process is a rank already: it runs ``main`` itself, and
    ``on_message`` is called on rank 0.

    Raises:
        RankError: the first rank that failed, and why.
    """
    if joined_world_size() is not None:
        try:
            main(_join(world_size, on_message))
        except _PeerLostError:
            raise RankError("the launcher's store is gone, and rank 0's process with it") from None
        return
    sys.stdout.flush()
    sys.stderr.flush()
    pids: list[int] = []
    inboxes: list[Connection] = []
    folder = tempfile.TemporaryDirectory(prefix="ringcomm-bench-")
    try:
        _fork_ranks(world_size, main, Path(folder.name), pids, inboxes)
        _attend(pids, inboxes, on_message, time.monotonic() + RUN_TIMEOUT_S)
    finally:
        for pid in filter(None, pids):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for inbox in inboxes:
            inbox.close()
        folder.cleanup()
