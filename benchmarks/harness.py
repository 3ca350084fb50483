"""What the benchmarks share: forked ranks, their side channel, percentiles, records.

Import this before torch and ``training``, the main job's package, which it puts on the path: it
allows one thread per rank. Ranks are forked, since a fork costs 0.4 s and a fresh interpreter with
torch several; the parent computes nothing with torch before. They agree through pipes and not
through a backend, so that no backend under test has a part in it.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from training.launch import fork  # noqa: E402
from training.quantiles import quantile  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_WRONG_RESULTS = 3
EXIT_BEREFT = 4  # of a rank that has lost another, which says why itself
EXIT_INTERRUPTED = 130

# Longest wait of a rank for another; a call of a backend under test has its group's own timeout.
SIDE_CHANNEL_TIMEOUT_S = 300.0
RUN_TIMEOUT_S = 7200.0

# The fractions behind p10, p50, p90 and p99.
FRACTIONS = (0.1, 0.5, 0.9, 0.99)


class RankError(RuntimeError):
    """A rank failed; the text holds its traceback or the signal that ended it."""


class _PeerLostError(Exception):
    """The other end of the side channel is gone."""


class Team:
    """One rank's view of all: a side channel that sleeps while it waits."""

    def __init__(
        self, rank: int, world_size: int, peers: list[Connection], outbox: Connection
    ) -> None:
        """``peers``: on rank 0 one connection per other rank, in order; elsewhere that to rank 0.

        ``outbox`` leads to the parent.
        """
        self.rank = rank
        self.world_size = world_size
        self._peers = peers
        self._outbox = outbox

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
        """Hands a message to the parent."""
        self._outbox.send(("message", message))

    @staticmethod
    def _send(peer: Connection, value: Any) -> None:
        try:
            peer.send(value)
        except OSError:
            raise _PeerLostError from None

    @staticmethod
    def _receive(peer: Connection) -> Any:
        try:
            if peer.poll(SIDE_CHANNEL_TIMEOUT_S):
                return peer.recv()
        except (EOFError, OSError):
            raise _PeerLostError from None
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
    except _PeerLostError:
        return EXIT_BEREFT
    except BaseException:
        outbox.send(("failed", traceback.format_exc()))
        return EXIT_FAILED
    return EXIT_OK


def _fork_ranks(
    world_size: int, main: Callable[[Team], None], pids: list[int], inboxes: list[Connection]
) -> None:
    """Forks the ranks, filling ``pids`` and ``inboxes`` one by one."""
    pairs = [Pipe() for _ in range(1, world_size)]
    for rank in range(world_size):
        inbox, outbox = Pipe(duplex=False)
        peers = [pair[0] for pair in pairs] if rank == 0 else [pairs[rank - 1][1]]
        inboxes.append(inbox)
        foreign = [*inboxes, *(end for pair in pairs for end in pair if end not in peers)]
        team = Team(rank, world_size, peers, outbox)
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
    try:
        _fork_ranks(world_size, main, pids, inboxes)
        _attend(pids, inboxes, on_message, time.monotonic() + RUN_TIMEOUT_S)
    finally:
        for pid in filter(None, pids):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for inbox in inboxes:
            inbox.close()


def percentiles(values: Iterable[float], unit: str) -> dict[str, float]:
    """``{"p10_us": ..., "p50_us": ..., "p90_us": ..., "p99_us": ...}`` for the unit "us"."""
    ordered = sorted(values)
    return {f"p{round(f * 100)}_{unit}": quantile(ordered, f) for f in FRACTIONS}


def utc_now() -> datetime.datetime:
    """The time in UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)


def default_path(name: str) -> Path:
    """``benchmarks/results/<UTC date>-<name>.jsonl``."""
    return RESULTS / f"{utc_now().date()}-{name}.jsonl"


class Recorder:
    """Appends records to a JSONL file, each with the same facts in front."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        """Makes the file's folder. Raises OSError when the file cannot be written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._facts = facts
        path.open("a", encoding="utf-8").close()

    def write(self, record: dict[str, Any]) -> None:
        """Appends one line, at once on disk for whoever reads while the run goes on."""
        line = json.dumps({**self._facts, **_rounded(record)}, allow_nan=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def read_records(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """All records of JSONL files, in order. Raises ValueError naming a line that holds none."""
    records = []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
    return records


def _rounded(value: Any) -> Any:
    """Floats to five digits: more than a measurement holds, and lines stay legible."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(entry) for entry in value]
    return value


def run_main(main: Callable[[list[str]], int]) -> int:
    """A script's exit code: errors that a user can mend become one message, Ctrl-C ends quietly."""

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
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return EXIT_FAILED
