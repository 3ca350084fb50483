"""What a process records, as csrc/collectives/record_format.h lays it out in memory and in files.

A process's recorder has its groups and a ring of its last calls; a trace's file has a ring of the
same events, and of more kinds. Times are ticks of a clock of the machine. The recorders of
processes of this machine are found in the memory that they map.
"""

import contextlib
import faulthandler
import functools
import os
import re
import signal
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringcomm import _C
from ringcomm.process import above_standard
from ringcomm.version import __version__

NOBODY, ANY_RANK = -1, -2
NO_SEQ = (1 << 64) - 1
# Of events, by their numbers.
KINDS = ("", "collective", "message", "enqueued", "call", "part", "step", "wait", "queue")
TRACE_MAGIC = b"RINGTRC3"
# Two moments by both clocks: 0 where none is written. The ring follows.
TRACE_HEADER = struct.Struct("=32x4Q")
EVENT_BYTES = 64

_HEADER = struct.Struct("=8sQiIQQ32sQ")
_GROUP = struct.Struct("=IiiiQQQ48s96s256s512s")
_EVENT = struct.Struct("=QQQQQIhhHHHHhBBBBBB")
_EVENT_FIELDS = (
    *("number", "begin_ns", "end_ns", "seq", "num_bytes", "group", "peer", "waits_for"),
    *("step", "num_steps", "slice", "num_slices", "chunk"),
    *("kind", "op", "dtype", "reduction", "algorithm", "title"),
)
_MAGIC_NAME, _MAGIC = b"RINGFLY", b"RINGFLY3"
_NUM_GROUPS, NUM_EVENTS, _GROUPS_OFFSET, _NUM_MEMBERS = 128, 1024, 4096, 64
_EVENTS_OFFSET = _GROUPS_OFFSET + _NUM_GROUPS * _GROUP.size
_COUNTS_BYTES = _NUM_GROUPS * _NUM_MEMBERS * 64  # of waits, for ringcomm.peer_stats
NUM_BYTES = _EVENTS_OFFSET + NUM_EVENTS * EVENT_BYTES + _COUNTS_BYTES
_STATES = ("unused", "alive", "failed", "left")


@dataclass(frozen=True)
class Call:
    """A collective or a message; times are in ns of CLOCK_MONOTONIC."""

    number: int  # of the process's calls
    group: int
    op: str
    seq: int  # of a collective in its group; of a message its tag
    num_bytes: int
    dtype: str
    reduction: str
    algorithm: str
    peer: int  # the root, or the other rank of a message; -1: none
    waits_for: int  # a rank of the group, NOBODY or ANY_RANK
    begin_ns: int
    end_ns: int | None  # None: it runs; on a device perhaps nobody has seen its end
    on_device: bool  # enqueued to a stream
    state: str  # "running", "enqueued" (on a device, not seen to have ended), "ended" or "failed"
    # Of the long wait, from 1 on; 0 where they are not known.
    step: int = 0
    num_steps: int = 0
    slice: int = 0  # of the data; each takes all steps
    num_slices: int = 0

    def step_text(self) -> str:
        """As "slice 5/16, step 3/6", without what there is one of; empty where nothing is left."""
        texts = []
        if self.num_slices > 1:
            texts.append(f"slice {self.slice}/{self.num_slices}")
        if self.num_steps > 1:
            texts.append(f"step {self.step}/{self.num_steps}")
        return ", ".join(texts) if self.state == "running" else ""

    @property
    def is_message(self) -> bool:
        """Whether it is a send or a receive."""
        return self.op in ("send", "recv")

    def text(self) -> str:
        """As in error messages: "all_reduce #17"."""
        return f"{self.op} with tag {self.seq}" if self.is_message else f"{self.op} #{self.seq}"


@dataclass(frozen=True)
class Group:
    """A group, as one of its ranks knows it."""

    name: str
    id: int  # equal on all of its ranks
    state: str  # "alive", "failed" or "left"
    rank: int
    world_size: int
    transport: str
    failure: str
    culprit: int  # of the failure, in the group; -1: nobody
    failed_ns: int | None
    pids: list[int]  # -1: this process cannot see it, as on another host
    global_ranks: list[int]


@dataclass
class Record:
    """The record of one process."""

    pid: int  # in its own numbering
    version: str
    num_calls: int
    read_ns: int  # when it was read, by CLOCK_MONOTONIC
    started_ns: int  # when it was made; with the pid it identifies the process
    groups: dict[int, Group] = field(default_factory=dict)  # by number
    calls: list[Call] = field(default_factory=list)  # by number

    @property
    def rank(self) -> int:
        """Its rank in the job; -1 if it has no group."""
        for group in sorted(self.groups.values(), key=lambda group: group.state == "left"):
            if group.rank < len(group.global_ranks):
                return group.global_ranks[group.rank]
        return -1

    def seconds_since(self, time_ns: int) -> float:
        """From a time until it was read."""
        return max(0, self.read_ns - time_ns) / 1e9


def clock_of(first: Sequence[int], last: Sequence[int]) -> Callable[[int], int]:
    """Turns ticks into ns of CLOCK_MONOTONIC: the line through two moments by both clocks."""
    (ticks, ns), (last_ticks, last_ns) = first, last
    passed_ticks, passed_ns = max(1, last_ticks - ticks), last_ns - ns
    return lambda then: ns + (then - ticks) * passed_ns // passed_ticks


def events(
    ring: bytes | memoryview,
    again: bytes | memoryview,
    names: Mapping[str, Sequence[str]],
    to_ns: Callable[[int], int],
) -> list[dict[str, Any]]:
    """The events of a ring, the oldest first; `names` are those of their codes, by field.

    `again` is the ring, read after `ring`: an event whose number has changed was being replaced,
    and is left out. `end_ns` is None where an event has not ended, a name "" where there is none.
    """
    known = {key: dict(enumerate(texts)) for key, texts in (*names.items(), ("kind", KINDS))}
    found = []
    for values, later in zip(_EVENT.iter_unpack(ring), _EVENT.iter_unpack(again), strict=True):
        if values[0] == 0 or values[0] != later[0]:  # never written, or being replaced
            continue
        event: dict[str, Any] = dict(zip(_EVENT_FIELDS, values, strict=True))
        for key, texts in known.items():
            event[key] = texts.get(event[key], "")
        event["begin_ns"] = to_ns(event["begin_ns"])
        event["end_ns"] = to_ns(event["end_ns"]) if event["end_ns"] else None
        found.append(event)
    return sorted(found, key=lambda event: event["number"])


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode("utf-8", "replace")


def _groups(data: bytes, to_ns: Callable[[int], int]) -> dict[int, Group]:
    found = {}
    for fields in _GROUP.iter_unpack(data[_GROUPS_OFFSET:_EVENTS_OFFSET]):
        state, rank, world_size, culprit, id_, failed_ticks, number, *texts, members = fields
        if not 0 < state < len(_STATES):
            continue
        name, transport, failure = map(_text, texts)
        ranks = struct.unpack(f"={2 * _NUM_MEMBERS}i", members)
        num = min(max(world_size, 0), _NUM_MEMBERS)
        found[number] = Group(
            name=name,
            id=id_,
            state=_STATES[state],
            rank=rank,
            world_size=world_size,
            transport=transport,
            failure=failure,
            culprit=culprit,
            failed_ns=to_ns(failed_ticks) if failure else None,
            pids=list(ranks[: 2 * num : 2]),
            global_ranks=list(ranks[1 : 2 * num : 2]),
        )
    return found


def parse(read: Callable[[], bytes]) -> Record:
    """The record that read() gives of a recorder of this machine, which may be recording.

    Raises ValueError for another version's.
    """
    data = read()
    if len(data) < _HEADER.size or not data.startswith(_MAGIC_NAME):
        raise ValueError("this is no flight recorder that this version of ringcomm can read")
    magic, num_bytes, pid, _, *start, version, num_calls = _HEADER.unpack_from(data)
    if _text(version) != __version__:
        raise ValueError(
            f"process {pid} runs ringcomm {_text(version)}, and this is {__version__}: run "
            "`ringcomm doctor` of that version"
        )
    if (magic, num_bytes) != (_MAGIC, NUM_BYTES):
        raise ValueError(
            f"process {pid} runs another build of ringcomm {__version__}, whose recorder is "
            f"{_text(magic)}, and this reads {_text(_MAGIC)}: run `ringcomm doctor` of that build"
        )
    if len(data) < NUM_BYTES:
        raise ValueError(f"the recorder of process {pid} is truncated")
    now = _C.recorder_clock()
    to_ns = clock_of(start, now)
    record = Record(pid, _text(version), num_calls, now[1], start[1], _groups(data, to_ns))
    place = slice(_EVENTS_OFFSET, _EVENTS_OFFSET + NUM_EVENTS * EVENT_BYTES)
    for event in events(data[place], read()[place], _C.recorder_names(), to_ns):
        group = record.groups.get(event["group"])
        if group is None:
            continue
        on_device, end_ns = event["kind"] == "enqueued", event["end_ns"]
        state = "enqueued" if on_device else "running"
        if end_ns is not None:
            is_late = group.failed_ns is not None and end_ns >= group.failed_ns
            state = "failed" if is_late else "ended"
        for key in ("kind", "chunk", "title"):  # of a trace
            del event[key]
        record.calls.append(Call(**event, on_device=on_device, state=state))
    return record


# The signal on which a process with a group writes its threads' Python stacks to a memfd.
STACK_SIGNAL = signal.SIGRTMAX - 3
MEMFD, STACKS_MEMFD = "ringcomm-flight", "ringcomm-stacks"


def mapped_records(pid: int | str = "self") -> tuple[Record | None, list[Record]]:
    """The records that a process maps: its own, and those of its peers, also of ended ones.

    Its own is the one of which it has the descriptor: pids of other PID namespaces may be equal. A
    forked child has its parent's. Raises OSError where its memory may not be read.
    """
    found: dict[str, int] = {}  # address by inode
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = re.fullmatch(rf"(\w+)-\S+ \S+ 0+ \S+ (\d+)\s+/memfd:{MEMFD} .*", line)
        if fields is not None:
            found[fields[2]] = int(fields[1], 16)
    opened = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # just closed
            opened.add(str(entry.stat().st_ino))
    own, peers = None, []
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for inode, address in found.items():
            # Another version's, or one that another thread has just unmapped.
            with contextlib.suppress(OSError, ValueError):
                record = parse(functools.partial(os.pread, memory.fileno(), NUM_BYTES, address))
                if inode in opened:
                    own = record
                else:
                    peers.append(record)
    return own, peers


@functools.cache
def offer_stacks() -> None:
    """Lets `ringcomm doctor --job` ask this process for its Python stacks, unless it cannot."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        if signal.getsignal(STACK_SIGNAL) is signal.SIG_DFL:
            file: Any = above_standard(os.memfd_create(STACKS_MEMFD))
            faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)
