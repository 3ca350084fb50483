"""The ranks that measure: forked processes, a side channel between them, and how a program ends.

Ranks agree through pipes and not through a backend, so that no backend under test takes part.
Forking costs 0.4 s, a fresh interpreter with torch 3 to 14 s. It is safe because the parent
computes nothing with more than one thread before: numpy's BLAS ends its own threads at a fork.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_WRONG_RESULTS = 3
EXIT_BEREFT = 4  # of a rank that has lost another one, which reports the reason itself
EXIT_INTERRUPTED = 130

# Longest wait of a rank for another; a call of a backend under test has its group's own timeout.
SIDE_CHANNEL_TIMEOUT_S = 300.0
RUN_TIMEOUT_S = 7200.0
MAX_WORLD_SIZE = 64
PR_SET_PDEATHSIG = 1
# What launchers tell their processes: MPICH's and Intel's, Open MPI's.
MPI_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")


class RankError(RuntimeError):
    """A rank failed; the text holds its traceback or the signal that ended it."""


class PeerLostError(Exception):
    """The other end of the side channel is gone."""


def mpi_world_size() -> int | None:
    """How many ranks mpiexec has started, this process among them, or None."""
    sizes = (os.environ.get(name) for name in MPI_SIZE_VARIABLES)
    return next((int(size) for size in sizes if size), None)


def joined_world_size() -> int | None:
    """How many ranks torchrun or mpiexec has started, this process among them, or None."""
    is_rank = {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()
    return int(os.environ["WORLD_SIZE"]) if is_rank else mpi_world_size()


def _die_with_parent(parent_pid: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the call above
        os._exit(EXIT_FAILED)


def fork(main: Callable[[], int]) -> int:
    """Forks a process that exits with what ``main`` returns and dies with this one; its pid."""
    parent_pid = os.getpid()
    pid = os.fork()
    if pid != 0:
        return pid
    code = EXIT_FAILED
    try:
        _die_with_parent(parent_pid)
        code = main()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # no clean-up that belongs to the parent, no wait for foreign threads


class Team:
    """One rank's view of all: a side channel that sleeps while it waits.

    Attributes:
        open_store: a fresh c10d store by name, for a process group; the same on all ranks.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        peers: Sequence[Any],
        on_message: Callable[[Any], None],
        open_store: Callable[[str], dist.Store],
    ) -> None:
        """``peers``: on rank 0 one channel per other rank, in order; elsewhere that to rank 0.

        A channel has ``send``, ``poll`` and ``recv``, as multiprocessing's connections do.
        """
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
        raise TimeoutError(f"another rank said nothing for {SIDE_CHANNEL_TIMEOUT_S:.0f} s")


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
    except PeerLostError:
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

    Raises:
        RankError: the first rank that failed, and why.
    """
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


def run_main(name: str, main: Callable[[list[str]], int]) -> int:
    """``main(argv)``'s exit code: what a user can mend becomes one message, Ctrl-C ends quietly."""

    def interrupt(_signum: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    try:
        # Also where a shell started this in the background, and so with SIGINT ignored.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, interrupt)
        return main(sys.argv[1:])
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (RankError, OSError, ValueError, subprocess.SubprocessError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return EXIT_FAILED
