"""Reads recordings and dumps of processes, and aligns the clocks of several hosts."""

import fcntl
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringcomm import _C
from ringcomm.trace import clock_name, dumps, program
from ringcomm.trace.dumps import Known
from ringcomm.trace.layout import NO_SEQ, NOBODY, TRACE_HEADER, TRACE_MAGIC, clock_of, events
from ringcomm.version import __version__

# Collectives that no rank leaves before all have arrived.
_MEETINGS = ("barrier", "all_reduce")
# Rows of calls on devices come after those of the groups' other calls.
_DEVICE_ROW = 1 << 31  # a row's number has 32 bits


@dataclass
class Process:
    """The recording of one process."""

    info: dict[str, Any]  # pid, host and clock
    start_ns: int
    rows: dict[int, str] = field(default_factory=dict)  # their names
    groups: dict[int, dict[str, Any]] = field(default_factory=dict)
    failures: list[tuple[int, str]] = field(default_factory=list)  # when, and the error
    has_ended: bool = False
    is_running: bool = False
    dumped: str = ""  # what it is, if it is a dump of the flight recorder
    events: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # by row
    alive_ns: int = 0  # until when it is known to have lived
    num_dropped: int = 0
    phases: list[program.Phase] = field(default_factory=list)
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
    logs = [path for path in dumps.files_of(folders) if path.suffix == ".log"]
    # All processes of a machine have one clock, and so one line from ticks to ns.
    moments: dict[str, list[list[int]]] = defaultdict(list)
    read = [_read(log, moments) for log in logs if log.with_suffix(".events").exists()]
    found = []
    for process, data, again in (each for each in read if each is not None):
        _add_events(process, data, again, moments[process.info["clock"]])
        found.append(process)
    known = {(process.info["clock"], process.info["pid"]) for process in found}
    dumped = [d for d in dumps.read(folders) if (d.clock, d.record.pid) not in known]
    found += map(_of_dump, dumped)
    found.sort(key=lambda process: (process.rank, process.start_ns))
    for row, process in enumerate(found):
        process.row = row
        process.attempt = sum(other.rank == process.rank for other in found[:row])
    return found


def _read(log: Path, moments: dict[str, list[list[int]]]) -> tuple[Process, bytes, bytes] | None:
    """A process without its events, and their file, read twice; None if it has made no group."""
    # Read before the log: the log has what an event refers to before the event is written.
    path = log.with_suffix(".events")
    data, again = path.read_bytes(), path.read_bytes()
    is_running = False
    with log.open("rb") as file:
        lines = file.read().split(b"\n")[:-1]  # a line that a full disk has truncated
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            is_running = True
    entries: list[dict[str, Any]] = [*map(json.loads, lines)]
    groups = {entry["group"]: entry for entry in entries if "group" in entry}
    if not groups:
        return None
    if not data.startswith(TRACE_MAGIC):
        raise ValueError(
            f"{log} is a recording of format {data[:8].decode('ascii', 'replace')!r}, and this "
            f"ringcomm {__version__} reads {TRACE_MAGIC.decode()!r}"
        )
    info = entries[0]
    has_left = groups.keys() <= {entry.get("left") for entry in entries}
    found = moments[info["clock"]]
    found += [entry["anchor"] for entry in entries]
    process = Process(info, entries[0]["anchor"][1], groups=groups, is_running=is_running)
    if (phases := log.with_suffix(".program")).exists():
        process.phases = program.read(phases)
    failures = [entry for entry in entries if "failure" in entry]
    process.failures = [(entry["anchor"][1], entry["failure"]) for entry in failures]
    process.has_ended = has_left or any("end" in entry for entry in entries)
    # The log of one that was killed may have no late moment.
    ticks, ns, other_ticks, other_ns = TRACE_HEADER.unpack_from(data)
    late = [moment for moment in ([ticks, ns], [other_ticks, other_ns]) if moment[0]]
    found += late
    process.alive_ns = max((ns for _, ns in late), default=0)
    if not process.has_ended and info["clock"] == clock_name():
        found.append(list(_C.recorder_clock()))
    return process, data, again


def _add_events(process: Process, data: bytes, again: bytes, moments: list[list[int]]) -> None:
    to_ns = clock_of(min(moments), max(moments))
    ring, later = (memoryview(copy)[TRACE_HEADER.size :] for copy in (data, again))
    found = events(ring, later, process.info["names"], to_ns)
    if not found:
        return
    process.num_dropped = found[-1]["number"] - len(found)
    times = [event[key] or 0 for event in found for key in ("begin_ns", "end_ns")]
    process.alive_ns = max(process.alive_ns, *times)
    # A group has a row of its collectives, with what is in them. What its callers do is apart, in
    # as many rows as overlap. An event has the end of those that are around it.
    rows: dict[tuple[Any, ...], tuple[int, list[float]]] = {}
    for event in sorted(found, key=lambda event: (event["begin_ns"], -_end(event))):
        is_call = event["kind"] in ("call", "queue", "message") or event["seq"] == NO_SEQ
        group = process.groups.get(event["group"], {"name": "of before the trace"})
        name = f"{'calls of ' if is_call else ''}group {group['name']}"
        if event["group"] == 0:  # in no call: wait() of a work
            name = "waits of callers"
        for number in itertools.count(1):
            row, ends = rows.setdefault((event["group"], is_call, number), (len(rows) + 1, []))
            while ends and ends[-1] <= event["begin_ns"]:
                ends.pop()
            if event["kind"] == "message" or not ends or _end(event) <= ends[-1]:
                break
        if event["kind"] != "message":  # those overlap
            ends.append(_end(event))
        process.rows[row] = name if number == 1 else f"{name} ({number})"
        process.events.setdefault(row, []).append(event)


def _end(event: dict[str, Any]) -> float:
    return event["end_ns"] or math.inf


def _of_dump(dump: Known) -> Process:
    record = dump.record
    info = {"pid": record.pid, "host": dump.host, "clock": dump.clock}
    process = Process(info, min((call.begin_ns for call in record.calls), default=record.read_ns))
    whose = "its own dump" if dump.is_own else f"the dump of another rank, {dump.path.name}"
    process.alive_ns = record.read_ns
    process.dumped = f"the last {len(record.calls)} of {record.num_calls} calls, from {whose}"
    # The first one says the rank; those that the process has left may be of an earlier job.
    by_state = sorted(record.groups.items(), key=lambda item: item[1].state == "left")
    for number, group in by_state:
        if group.rank < len(group.global_ranks):
            about = {"name": group.name, "ranks": group.global_ranks, "rank": group.rank}
            process.groups[number] = {**about, "transport": group.transport}
        if group.failed_ns is not None:
            process.failures.append((group.failed_ns, group.failure))
    for call in record.calls:
        if call.group not in process.groups:
            continue
        row = call.group + (_DEVICE_ROW if call.on_device else 0)
        where = " on a device" if call.on_device else ""
        process.rows[row] = f"group {record.groups[call.group].name}{where}"
        kind = "message" if call.is_message else "collective"
        event = {**vars(call), "kind": kind, "title": "", "chunk": -1}
        if call.on_device:  # the host knows when it was enqueued
            event["end_ns"] = call.begin_ns
        found = process.events.setdefault(row, [])
        found.append(event)
        if call.state == "running" and call.waits_for != NOBODY and not call.is_message:
            found.append(event | {"kind": "wait"})
    return process


def collectives(process: Process) -> Iterator[tuple[tuple[Any, ...], int, dict[str, Any]]]:
    """The row and event of each collective (group, its ranks, attempt, on a device, op, seq)."""
    for row, found in process.events.items():
        for event in found:
            group = process.groups.get(event["group"])
            if event["kind"] == "collective" and group is not None:
                ranks = tuple(group["ranks"])
                on_device = event.get("on_device", False)  # has numbers of its own
                call = (on_device, event["op"], event["seq"])
                yield (group["name"], ranks, process.attempt, *call), row, event


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
            # Of a call on a device it is known only when it was enqueued.
            if event["end_ns"] and event["op"] in _MEETINGS and not event.get("on_device"):
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
