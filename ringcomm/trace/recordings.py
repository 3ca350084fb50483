"""Reads recordings and dumps of processes, and aligns the clocks of several hosts."""

import fcntl
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringcomm.trace import EVENT_BYTES, dumps
from ringcomm.trace.dumps import Known
from ringcomm.trace.flight import NOBODY, Call

# Event of csrc/collectives/trace.h, and its kinds.
_FIELDS = (
    *(("begin_ns", "u8"), ("end_ns", "u8"), ("seq", "u8"), ("num_bytes", "u8"), ("group", "u4")),
    *(("to", "i4"), ("from", "i4"), ("root", "i4"), ("chunk", "i4"), ("slice", "u4")),
    *(("step", "i2"), ("kind", "u1"), ("name", "u1"), ("dtype", "u1"), ("reduction", "u1")),
    *(("algorithm", "u1"), ("unused", "u1")),
)
NO_SEQ = (1 << 64) - 1
CALL, COLLECTIVE, PART, STEP, WAIT, MESSAGE = range(1, 7)
# Collectives that no rank leaves before all have arrived.
_MEETINGS = ("barrier", "all_reduce")
# Rows of calls on devices come after those of the groups' other calls.
_DEVICE_ROW = 1000


@dataclass
class Process:
    """The recording of one process."""

    info: dict[str, Any]
    labels: dict[int, str] = field(default_factory=dict)
    threads: dict[int, str] = field(default_factory=dict)
    groups: dict[int, dict[str, Any]] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    has_ended: bool = False
    is_running: bool = False
    dumped: str = ""  # what it is, if it is a dump of the flight recorder
    events: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # by thread
    alive_ns: dict[int, int] = field(default_factory=dict)  # by thread
    dropped: dict[int, int] = field(default_factory=dict)  # by thread
    num_lost: int = 0
    row: int = 0  # in the trace
    attempt: int = 0  # which process of its rank
    shift_ns: int = 0  # from its clock to the trace's

    @property
    def rank(self) -> int:
        """Its rank in the job, from its first group."""
        group = next(iter(self.groups.values()))
        return int(group["ranks"][group["rank"]])

    def title(self) -> str:
        """Its rank, and how it ended if not normally."""
        if self.is_running:
            return f"rank {self.rank} (still running)"
        if self.failures:
            return f"rank {self.rank} (failed)"
        if self.dumped:
            return f"rank {self.rank} (dump)"
        return f"rank {self.rank}{'' if self.has_ended else ' (ended early)'}"

    def peer(self, event: dict[str, Any], key: str) -> int | None:
        """A rank of the event's group, by its number in the job; None if there is none."""
        ranks: list[int] = self.groups.get(event["group"], {}).get("ranks", [])
        return ranks[event[key]] if 0 <= event[key] < len(ranks) else None


def read(folders: Sequence[Path]) -> list[Process]:
    """The processes in folders, numbered by rank and then by time.

    Of a process with a recording and a dump the recording is used, which tells more. Raises
    ValueError for a file that is neither, and as dumps.read().
    """
    paths = (path for folder in folders for path in sorted(folder.iterdir()))
    logs = [path for path in paths if path.suffix == ".log"]
    read = (_read(log) for log in logs if log.with_suffix(".events").exists())
    found = [process for process in read if process is not None]
    known = {(process.info["clock"], process.info["pid"]) for process in found}
    dumped = [d for d in dumps.read(folders) if (d.clock, d.record.pid) not in known]
    found += map(_of_dump, dumped)
    found.sort(key=lambda process: (process.rank, process.info["start_ns"]))
    for row, process in enumerate(found):
        process.row = row
        process.attempt = sum(other.rank == process.rank for other in found[:row])
    return found


def _read(log: Path) -> Process | None:
    """Reads a recording; None for a process that has made no group."""
    # Read before the log: the log has what an event refers to before the event is written.
    data = log.with_suffix(".events").read_bytes()
    with log.open("rb") as file:
        lines = file.read().split(b"\n")[:-1]  # a line that a full disk has truncated
        process = Process(json.loads(lines[0]) if lines else {})
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            process.is_running = True
    entries = [json.loads(line) for line in lines[1:]]
    process.labels = {entry["label"]: entry["text"] for entry in entries if "label" in entry}
    process.threads = {entry["thread"]: entry["name"] for entry in entries if "thread" in entry}
    process.groups = {entry["group"]: entry for entry in entries if "group" in entry}
    process.failures = [entry for entry in entries if "failure" in entry]
    has_left = {entry["left"] for entry in entries if "left" in entry} == process.groups.keys()
    process.has_ended = has_left or any("end_ns" in entry for entry in entries)
    if not process.groups:
        return None
    if data[:8] != b"RINGTRC1":
        raise ValueError(f"{log} is not a recording of this version of ringcomm")
    import numpy as np

    capacity = int(process.info["num_events"])
    process.num_lost = int(np.frombuffer(data, "u8", 1, 8)[0])
    page_bytes = int(process.info["page_bytes"])
    thread_bytes = page_bytes + -(-capacity * EVENT_BYTES // page_bytes) * page_bytes
    for thread, place in enumerate(range(page_bytes, len(data) - thread_bytes + 1, thread_bytes)):
        count, alive_ns = (int(number) for number in np.frombuffer(data, "u8", 2, place))
        found = np.frombuffer(data, np.dtype(list(_FIELDS)), capacity, place + page_bytes)
        # The oldest of a full buffer may have been half overwritten when its process was killed.
        kept = min(count, capacity - 1)
        rows = found[np.arange(count - kept, count) % capacity].tolist()
        names = [name for name, _ in _FIELDS]
        process.events[thread] = [dict(zip(names, row, strict=True)) for row in rows]
        process.alive_ns[thread] = alive_ns
        process.dropped[thread] = count - kept
    return process


def _of_dump(dump: Known) -> Process:
    """A dump as a recording."""
    record = dump.record
    first_ns = min((_ns(dump, call.began_s) for call in record.calls), default=record.read_ns)
    process = Process({"pid": record.pid, "host": dump.host, "clock": dump.clock})
    process.info["start_ns"] = first_ns
    whose = "its own dump" if dump.is_own else f"the dump of another rank, {dump.path.name}"
    process.dumped = f"the last {len(record.calls)} of {record.num_calls} calls, from {whose}"
    # The first one says the rank; those that the process has left may be of an earlier job.
    by_state = sorted(record.groups.items(), key=lambda item: item[1].state == "left")
    for place, group in by_state:
        if group.rank < len(group.global_ranks):
            about = {"name": group.name, "ranks": group.global_ranks, "rank": group.rank}
            process.groups[place] = {**about, "transport": group.transport}
        if group.failed_s is not None:
            failure = {"failure": group.failure, "time_ns": _ns(dump, group.failed_s)}
            process.failures.append(failure)
    labels: dict[str, int] = {}
    for call in record.calls:
        if call.group not in process.groups:
            continue
        row = call.group + (_DEVICE_ROW if call.on_device else 0)
        where = " on a device" if call.on_device else ""
        process.threads[row] = f"group {record.groups[call.group].name}{where}"
        process.alive_ns[row] = record.read_ns
        process.dropped[row] = 0
        process.events.setdefault(row, []).extend(_events(dump, call, labels))
    process.labels = {number: text for text, number in labels.items()}
    return process


def _ns(dump: Known, ago_s: float) -> int:
    return dump.record.read_ns - round(ago_s * 1e9)


def _events(dump: Known, call: Call, labels: dict[str, int]) -> list[dict[str, Any]]:
    """A call, and the wait that it is in."""

    def label(text: str) -> int:
        return labels.setdefault(text, len(labels))

    begin_ns = _ns(dump, call.began_s)
    end_ns = 0 if call.ended_s is None else _ns(dump, call.ended_s)
    is_send = call.op == "send"
    event: dict[str, Any] = dict.fromkeys(("to", "from", "root", "chunk"), -1)
    event |= dict.fromkeys(("slice", "step"), 0)
    event |= {"begin_ns": begin_ns, "end_ns": end_ns, "num_bytes": call.num_bytes}
    event |= {"group": call.group, "name": label(call.op)}
    event |= {"dtype": NO_SEQ, "reduction": NO_SEQ, "algorithm": NO_SEQ, "seq": call.seq}
    if call.on_device:  # the host knows when it was enqueued
        event |= {"end_ns": begin_ns, "name": label(f"{call.op} enqueued")}
    if call.is_message:
        event |= {"kind": MESSAGE, "seq": call.number, "chunk": call.seq}
        event["to" if is_send else "from"] = call.peer
        return [event]
    event |= {"kind": COLLECTIVE, "root": call.peer, "dtype": label(call.dtype)}
    event["algorithm"] = label(call.algorithm)
    if "reduce" in call.op:
        event["reduction"] = label(call.reduction)
    if call.state != "running" or call.waits_for == NOBODY:
        return [event]
    wait = {**event, "kind": WAIT, "from": call.waits_for, "root": -1, "name": label("wait")}
    return [event, wait]


def collectives(process: Process) -> Iterator[tuple[tuple[Any, ...], int, dict[str, Any]]]:
    """The thread and event of each collective (group, its ranks, attempt, op, seq)."""
    for thread, events in process.events.items():
        for event in events:
            group = process.groups.get(event["group"])
            if event["kind"] == COLLECTIVE and group is not None:
                name = process.labels[event["name"]]
                ranks = tuple(group["ranks"])
                yield (group["name"], ranks, process.attempt, name, event["seq"]), thread, event


def align(processes: list[Process]) -> list[str]:
    """Sets shift_ns so that all times are in the first process's clock; returns notes on this.

    No rank leaves an all_reduce or a barrier before all have begun it. Each call therefore bounds
    the difference of two clocks from both sides; the middle of the remaining interval is used.
    Raises ValueError if the clocks cannot be compared.
    """
    first = processes[0].info["clock"]
    bounds: dict[str, tuple[int, int]] = {}
    calls: dict[tuple[Any, ...], dict[str, tuple[int, int]]] = defaultdict(dict)
    for process in processes:
        for key, _, event in collectives(process):
            if event["end_ns"] and key[3] in _MEETINGS:
                clock = process.info["clock"]
                begin, end = calls[key].get(clock, (0, 1 << 63))
                calls[key][clock] = max(begin, event["begin_ns"]), min(end, event["end_ns"])
    for times in calls.values():
        for clock in times.keys() - {first} if first in times else ():
            low, high = bounds.get(clock, (-1 << 63, 1 << 63))
            here, there = times[first], times[clock]
            bounds[clock] = max(low, here[0] - there[1]), min(high, here[1] - there[0])
    notes = []
    for process in processes:
        clock, host = process.info["clock"], process.info["host"]
        if clock == first:
            continue
        low, high = bounds.get(clock, (1, 0))
        if low > high:
            why = "drift apart" if clock in bounds else "have no all_reduce or barrier in common"
            raise ValueError(
                f"the clocks of {processes[0].info['host']} and {host} cannot be compared: they"
                f" {why}. Merge the recordings of each host separately"
            )
        process.shift_ns = (low + high) // 2
        notes.append(f"{host}: aligned by common calls, within ±{(high - low) / 2e3:.1f} µs")
    return [f"CLOCK_MONOTONIC of {processes[0].info['host']}", *sorted(set(notes))]
