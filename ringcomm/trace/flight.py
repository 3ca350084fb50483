"""Reads flight recorders (csrc/collectives/flight.h): the last calls of a process, always on."""

import contextlib
import faulthandler
import functools
import os
import re
import signal
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringcomm import _C
from ringcomm.descriptors import above_standard
from ringcomm.version import __version__

# The signal on which a process with a group writes its threads' Python stacks to a memfd.
STACK_SIGNAL = signal.SIGRTMAX - 3
MEMFD, STACKS_MEMFD = "ringcomm-flight", "ringcomm-stacks"
NOBODY, ANY_RANK = -1, -2

_HEADER = struct.Struct("=8sQiIQQ32sQ")
_GROUP = struct.Struct("=IiiiQQQ48s96s256s512s")
_EVENT = struct.Struct("=QQQQQHHiiBBBBHHHH")
# The fields of an event, by those of a Call; times are ticks.
_EVENT_FIELDS = (
    *("number", "began_s", "ended_s", "seq", "num_bytes", "group", "on_device", "peer"),
    *("waits_for", "op", "dtype", "reduction", "algorithm"),
    *("step", "num_steps", "slice", "num_slices"),
)
_MAGIC_NAME, _MAGIC = b"RINGFLY", b"RINGFLY2"
_NUM_GROUPS, _NUM_EVENTS, _GROUPS_OFFSET, _NUM_MEMBERS = 128, 1024, 4096, 64
_EVENTS_OFFSET = _GROUPS_OFFSET + _NUM_GROUPS * _GROUP.size
_COUNTS_BYTES = _NUM_GROUPS * _NUM_MEMBERS * 64  # of waits, for ringcomm.peer_stats
NUM_BYTES = _EVENTS_OFFSET + _NUM_EVENTS * _EVENT.size + _COUNTS_BYTES
_STATES = ("unused", "alive", "failed", "left")


@dataclass(frozen=True)
class Call:
    """A collective or a message; times are in seconds before the record was read."""

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
    began_s: float
    ended_s: float | None  # None: it runs; on a device perhaps nobody has seen its end
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
    failed_s: float | None  # before the record was read
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
    groups: dict[int, Group] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)  # by number

    @property
    def rank(self) -> int:
        """Its rank in the job; -1 if it has no group."""
        for group in sorted(self.groups.values(), key=lambda group: group.state == "left"):
            if group.rank < len(group.global_ranks):
                return group.global_ranks[group.rank]
        return -1


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode("utf-8", "replace")


def _group(data: bytes, place: int, seconds_ago: Callable[[int], float]) -> Group | None:
    fields = _GROUP.unpack_from(data, _GROUPS_OFFSET + place * _GROUP.size)
    state, rank, world_size, culprit, id_, failed_ticks, _, *texts, members = fields
    name, transport, failure = map(_text, texts)
    if not 0 < state < len(_STATES):
        return None
    numbers = struct.unpack(f"={2 * _NUM_MEMBERS}i", members)
    num = min(max(world_size, 0), _NUM_MEMBERS)
    return Group(
        name=name,
        id=id_,
        state=_STATES[state],
        rank=rank,
        world_size=world_size,
        transport=transport,
        failure=failure,
        culprit=culprit,
        failed_s=seconds_ago(failed_ticks) if failure else None,
        pids=list(numbers[: 2 * num : 2]),
        global_ranks=list(numbers[1 : 2 * num : 2]),
    )


def parse(data: bytes) -> Record:
    """Reads the memory of a recorder of this machine; raises ValueError for another version's."""
    if len(data) < _HEADER.size or not data.startswith(_MAGIC_NAME):
        raise ValueError("this is no flight recorder that this version of ringcomm can read")
    magic, num_bytes, pid, _, *anchors, version, num_calls = _HEADER.unpack_from(data)
    anchor_ticks, anchor_ns = anchors
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
    now_ticks, now_ns = _C.flight_clock()
    ns_per_tick = (now_ns - anchor_ns) / max(1, now_ticks - anchor_ticks)

    def seconds_ago(ticks: int) -> float:
        return max(0.0, (now_ticks - ticks) * ns_per_tick / 1e9)

    record = Record(pid, _text(version), num_calls, now_ns, anchor_ns)
    for place in range(_NUM_GROUPS):
        if (found := _group(data, place, seconds_ago)) is not None:
            record.groups[place] = found
    names = {kind: dict(enumerate(known)) for kind, known in _C.flight_names().items()}
    for place in range(_NUM_EVENTS):
        values = _EVENT.unpack_from(data, _EVENTS_OFFSET + place * _EVENT.size)
        event: dict[str, Any] = dict(zip(_EVENT_FIELDS, values, strict=True))
        if event["number"] == 0 or event["group"] not in record.groups:
            continue
        for kind, known in names.items():
            event[kind] = known.get(event[kind], str(event[kind]))
        event["began_s"] = seconds_ago(event["began_s"])
        ended_s = seconds_ago(event["ended_s"]) if event["ended_s"] else None
        failed_s = record.groups[event["group"]].failed_s
        state = "enqueued" if event["on_device"] else "running"
        if ended_s is not None:
            state = "ended" if failed_s is None or ended_s > failed_s else "failed"
        about = {"ended_s": ended_s, "on_device": event["on_device"] != 0, "state": state}
        record.calls.append(Call(**event | about))
    record.calls.sort(key=lambda call: call.number)
    return record


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
                record = parse(os.pread(memory.fileno(), NUM_BYTES, address))
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
