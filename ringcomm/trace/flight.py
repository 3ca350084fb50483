"""Reads flight recorders (csrc/collectives/flight.h): the last calls of a process, always on."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import struct
from dataclasses import dataclass, field
from typing import Any

from ringcomm import _C
from ringcomm.version import __version__

# The signal on which a process with a group writes its threads' Python stacks to a memfd.
STACK_SIGNAL = signal.SIGRTMAX - 3
MEMFD, STACKS_MEMFD = "ringcomm-flight", "ringcomm-stacks"
NOBODY, ANY_RANK = -1, -2

_HEADER = struct.Struct("=8sQiIQQ32sQ")
_GROUP = struct.Struct("=IiiIQ48s96s256s512s")
_EVENT = struct.Struct("=QQQQQIiiBBBB8x")
_MAGIC = b"RINGFLY1"
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
    ended_s: float | None  # None: it runs

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
    pids: list[int]
    global_ranks: list[int]


@dataclass
class Record:
    """The record of one process."""

    pid: int  # in its own numbering
    version: str
    num_calls: int
    groups: dict[int, Group] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)  # by number

    @property
    def rank(self) -> int:
        """Its rank in the job; -1 if it has no group."""
        for group in self.groups.values():
            if group.rank < len(group.global_ranks):
                return group.global_ranks[group.rank]
        return -1


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode("utf-8", "replace")


def _group(data: bytes, place: int) -> Group | None:
    fields = _GROUP.unpack_from(data, _GROUPS_OFFSET + place * _GROUP.size)
    state, rank, world_size, _, id_, name, transport, failure, members = fields
    if not 0 < state < len(_STATES):
        return None
    numbers = struct.unpack(f"={2 * _NUM_MEMBERS}i", members)
    num = min(max(world_size, 0), _NUM_MEMBERS)
    return Group(
        name=_text(name),
        id=id_,
        state=_STATES[state],
        rank=rank,
        world_size=world_size,
        transport=_text(transport),
        failure=_text(failure),
        pids=list(numbers[: 2 * num : 2]),
        global_ranks=list(numbers[1 : 2 * num : 2]),
    )


def parse(data: bytes) -> Record:
    """Reads the memory of a recorder of this machine.

    Raises:
        ValueError: it is no recorder, or another version of ringcomm wrote it.
    """
    if len(data) < _HEADER.size or not data.startswith(_MAGIC):
        raise ValueError("this is no flight recorder that this version of ringcomm can read")
    _, num_bytes, pid, _, anchor_ticks, anchor_ns, version, num_calls = _HEADER.unpack_from(data)
    if _text(version) != __version__ or num_bytes != NUM_BYTES or len(data) < NUM_BYTES:
        raise ValueError(
            f"process {pid} runs ringcomm {_text(version)}, and this is {__version__}: use its"
        )
    now_ticks, now_ns = _C.flight_clock()
    ns_per_tick = (now_ns - anchor_ns) / max(1, now_ticks - anchor_ticks)

    def seconds_ago(ticks: int) -> float:
        return max(0.0, (now_ticks - ticks) * ns_per_tick / 1e9)

    record = Record(pid, _text(version), num_calls)
    for place in range(_NUM_GROUPS):
        if (group := _group(data, place)) is not None:
            record.groups[place] = group
    names = _C.flight_names()

    def name(kind: str, number: int) -> str:
        known = names[kind]
        return known[number] if number < len(known) else str(number)

    for place in range(_NUM_EVENTS):
        fields = _EVENT.unpack_from(data, _EVENTS_OFFSET + place * _EVENT.size)
        number, begin, end, seq, size, group_place, peer, waits_for, *kinds = fields
        if number == 0 or group_place not in record.groups:
            continue
        op, dtype, reduction, algorithm = kinds
        call = Call(
            number=number,
            group=group_place,
            op=name("op", op),
            seq=seq,
            num_bytes=size,
            dtype=name("dtype", dtype),
            reduction=name("reduction", reduction),
            algorithm=name("algorithm", algorithm),
            peer=peer,
            waits_for=waits_for,
            began_s=seconds_ago(begin),
            ended_s=seconds_ago(end) if end else None,
        )
        record.calls.append(call)
    record.calls.sort(key=lambda call: call.number)
    return record


@functools.cache
def offer_stacks() -> None:
    """Lets `ringcomm doctor --job` ask this process for its Python stacks, unless it cannot."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        if signal.getsignal(STACK_SIGNAL) is signal.SIG_DFL:
            file: Any = os.memfd_create(STACKS_MEMFD)
            faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)
