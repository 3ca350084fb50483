"""Dumps of flight recorders: one file for each rank, how they are written, read and chosen.

A process writes its own on request and on an error; the doctor writes those of a job. A file is a
pickle in the format of torch's flight recorder, with more keys.

A dump has the calls of its process, and what it has mapped of its peers' recorders, so that the
calls of a process that has ended are in the dumps of the others. docs/reference/flight.md has the
fields.
"""

import contextlib
import io
import os
import pickle
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from glob import escape
from itertools import dropwhile
from pathlib import Path
from typing import Any, TypeVar

from ringcomm import errors
from ringcomm.process import open_above
from ringcomm.trace import clock_name, layout, torch_dumps
from ringcomm.trace.layout import Call, Group, Record
from ringcomm.version import __version__

FORMAT, FORMAT_VERSION = "ringcomm flight dump", 3
_START_BYTES = 64  # in which a file has its format, if it is a dump, whole or not
# Of a peer that has not ended, and so may write a dump of its own.
NUM_CALLS_OF_PEER = 64
_PF_EXITING = 4  # of the kernel's flags of a process
_OWN_FILES = (__file__, errors.__file__)

T = TypeVar("T", Record, Group, Call)


@dataclass(frozen=True)
class Known:
    """A process of a job, as a dump has it."""

    path: Path  # of the dump
    is_own: bool  # its own dump, not that of a peer
    host: str
    clock: str  # equal where CLOCK_MONOTONIC is
    record: Record


def write(
    prefix: str | os.PathLike[str],
    own: Record,
    peers: Iterable[Record],
    reason: str,
    stacks: Mapping[str, list[str]],
) -> Path:
    """Writes the dump of a process to PREFIX + its rank, and replaces an earlier one.

    `peers` are the records of other processes; `stacks` has by thread the lines "FILE:LINE
    FUNCTION", innermost first. Raises OSError.
    """
    path = Path(f"{os.fspath(prefix)}{own.rank}")
    peers = list(peers)
    processes = [_process(own, len(own.calls), has_ended=False)]
    for peer in sorted(peers, key=lambda record: record.rank):
        has_ended = _has_ended(own, peer)
        processes.append(
            _process(peer, len(peer.calls) if has_ended else NUM_CALLS_OF_PEER, has_ended=has_ended)
        )
    now_ns, unix_ns = time.monotonic_ns(), time.time_ns()
    of_torch = torch_dumps.entries_of(own, peers, unix_ns - now_ns, stacks.get("MainThread", []))
    dump = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "ringcomm": __version__,
        "reason": reason,
        "rank": own.rank,
        "host": socket.gethostname(),
        "clock": clock_name(),
        "time_ns": now_ns,
        "unix_ns": unix_ns,
        "stacks": dict(stacks),
        "processes": processes,
        **of_torch,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb", opener=open_above) as file:
            pickle.dump(dump, file)
        partial.replace(path)  # a reader sees a whole one
    finally:
        partial.unlink(missing_ok=True)
    return path


def _process(record: Record, num_calls: int, *, has_ended: bool) -> dict[str, Any]:
    groups = {str(number): asdict(group) for number, group in record.groups.items()}
    calls = [asdict(call) for call in record.calls[-num_calls:]]
    about = {"rank": record.rank, "has_ended": has_ended, "groups": groups, "calls": calls}
    return vars(record) | about


def _has_ended(own: Record, peer: Record) -> bool:
    """Whether a peer's process is gone; False where its pid cannot be seen."""
    ranks = {group.id: group.rank for group in peer.groups.values()}
    for group in own.groups.values():
        rank = ranks.get(group.id, len(group.pids))
        if rank < len(group.pids) and group.pids[rank] > 0:
            try:
                status = Path(f"/proc/{group.pids[rank]}/stat").read_text(encoding="utf-8")
            except OSError:
                return True
            state, *_, flags = status.rpartition(")")[2].split()[:7]
            # A process that ends closes its files, which its peers notice, before it is a zombie.
            return state in "ZX" or int(flags) & _PF_EXITING != 0
    return False


def files_of(folders: Sequence[Path]) -> list[Path]:
    """The files in folders, each once; of a path that is no folder, those that begin with it."""
    found: dict[Path, Path] = {}
    for path in folders:
        names = path.iterdir() if path.is_dir() else path.parent.glob(f"{escape(path.name)}*")
        for name in sorted(names):
            found.setdefault(name.resolve(), name)
    return [*found.values()]


def read(folders: Sequence[Path]) -> list[Known]:
    """The processes of the dumps in some folders, by rank; empty if there is no dump.

    Of a rank that has written no dump, it is what the others knew last. Raises ValueError for a
    dump that is truncated or of another version, and for dumps of different jobs.
    """
    found: dict[tuple[str, int, int], Known] = {}  # by process
    for path in files_of(folders):
        for known in _read(path) if path.name[-1].isdigit() and path.is_file() else ():
            key = (known.clock, known.record.pid, known.record.started_ns)
            other = found.setdefault(key, known)
            if (known.is_own, known.record.read_ns) > (other.is_own, other.record.read_ns):
                found[key] = known
    by_rank: dict[int, Known] = {}
    for known in found.values():
        rank = known.record.rank
        if rank < 0:  # it had no group yet
            continue
        other = by_rank.setdefault(rank, known)
        if other is not known:
            raise ValueError(
                f"{other.path} and {known.path} are dumps of different jobs: rank {rank} is "
                f"process {other.record.pid} on {other.host} in one, and {known.record.pid} on "
                f"{known.host} in the other. Remove those of the older job"
            )
    return [by_rank[rank] for rank in sorted(by_rank)]


class _PlainUnpickler(pickle.Unpickler):
    """Loads no classes and functions: a file of somebody else runs nothing."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a dump")


def _read(path: Path) -> list[Known]:
    """The processes of a dump; none if the file is something else."""
    with path.open("rb") as file:
        if FORMAT.encode() not in file.read(_START_BYTES):
            return []
    try:
        dump = _PlainUnpickler(io.BytesIO(path.read_bytes())).load()
    except Exception as error:  # of many types
        raise ValueError(f"{path} is truncated or damaged: {error}") from None
    if dump.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{path} is a dump of format {dump.get('format_version')}, which ringcomm "
            f"{dump.get('ringcomm')} has written; this is {__version__}, which reads format "
            f"{FORMAT_VERSION}: use that version"
        )
    try:
        return [_known(path, dump, idx) for idx in range(len(dump["processes"]))]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from None


def _known(path: Path, dump: dict[str, Any], idx: int) -> Known:
    process = dump["processes"][idx]
    record = _made(Record, process)
    groups = process["groups"].items()
    record.groups = {int(number): _made(Group, group) for number, group in groups}
    record.calls = [_made(Call, call) for call in process["calls"]]
    return Known(path, idx == 0, dump["host"], dump["clock"], record)


def _made(kind: type[T], values: dict[str, Any]) -> T:
    return kind(**{field.name: values[field.name] for field in fields(kind)})


def flight_dump(prefix: str | os.PathLike[str] | None = None) -> Path:
    """Writes a dump of the flight recorder of this process. Not collective.

    The file is PREFIX + the rank in the job, and replaces an earlier one. It has the last 1,024
    calls of this process and the Python stacks of its threads, and what it knows of the ranks of
    its groups on this host: the last 64 calls of each, and all 1,024 of a process that has ended.
    `ringcomm trace --merge` reads it, and torch's analyser `torchfrtrace`.

    Args:
        prefix: what the path begins with; "dumps/" makes dumps/0. None: RINGCOMM_FLIGHT_DUMP.

    Returns:
        The path of the file.

    Raises:
        ValueError: there is no prefix, or this process has no group of several ranks.
        OSError: the file cannot be written, or the system does not let the process read its memory.
    """
    chosen = os.fspath(prefix) if prefix is not None else _prefix()
    if not chosen:
        raise ValueError("give a prefix, or set the environment variable RINGCOMM_FLIGHT_DUMP")
    return _dump(chosen, "request")


def _prefix() -> str:
    return os.environ.get("RINGCOMM_FLIGHT_DUMP") or ""


def _dump(prefix: str, reason: str) -> Path:
    own, peers = layout.mapped_records()
    if own is None or own.pid != os.getpid() or own.rank < 0:
        raise ValueError("this process has no group of ringcomm of several ranks to dump")
    return write(prefix, own, peers, reason, _stacks())


def _stacks() -> dict[str, list[str]]:
    """Of this process's threads, innermost first, without what makes the dump."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks: dict[str, list[str]] = {}
    for ident, frame in sys._current_frames().items():
        name = names.get(ident, f"thread {ident}")
        lines = [(at.f_code, line) for at, line in traceback.walk_stack(frame)]
        own = dropwhile(lambda at: at[0].co_filename in _OWN_FILES, lines)
        stacks[name] = [f"{code.co_filename}:{line} {code.co_name}" for code, line in own]
    return stacks


def start() -> None:
    """Dumps this process on errors, if RINGCOMM_FLIGHT_DUMP is set."""
    if _prefix():
        errors.on_error = _on_error


_said: set[str] = set()
_lock = threading.Lock()


def _on_error(message: str) -> None:
    """An error is being raised; later calls of its group raise the same text.

    Writes the dump's path, or why there is none, to stderr: the program goes on as it would.
    """
    with _lock:
        if message in _said:
            return
        _said.add(message)
    try:
        text = f"its flight recorder is in {_dump(_prefix(), f'error: {message}')}"
    except ValueError:  # no group: a forked child
        return
    except Exception as error:
        text = f"RINGCOMM_FLIGHT_DUMP: cannot dump its flight recorder: {error}"
    with contextlib.suppress(OSError, ValueError):
        print(f"ringcomm process {os.getpid()}: {text}", file=sys.stderr, flush=True)
