"""`ringcomm trace`: records a program, and merges what its ranks recorded into one trace."""

import contextlib
import gzip
import heapq
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, Any

from _ringcomm.status import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, in_words
from ringcomm.screen import columns, counted, in_seconds, writing
from ringcomm.trace import clock_name, recordings
from ringcomm.trace.layout import NO_SEQ
from ringcomm.trace.recordings import Process

# The arguments of an event, by its kind.
_SHOWN = {
    "call": ("seq", "dtype", "bytes", "from", "to"),
    "collective": ("seq", "op", "dtype", "algorithm", "bytes", "root"),
    "part": ("seq", "algorithm", "bytes"),
    "step": ("seq", "bytes", "chunk", "slice", "from", "to"),
    "wait": ("seq", "rank"),
    "queue": ("seq",),
    "message": ("bytes", "tag", "from", "to"),
}
NUM_LONGEST = 5  # calls of a summary
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
# Rows of the program's phases; those of groups have smaller numbers, and devices larger ones.
_PROGRAM_ROW = 1 << 30


def run_recorded(
    command: Sequence[str], num_events: int, output: Path, then: Callable[[Path], None]
) -> int:
    """Runs a command and writes the trace of its ranks; returns its exit status.

    ``then`` gets the trace if there is one. Blocks until the command has ended. Ctrl-C ends it, a
    second one at once; what was recorded until then is written.
    """
    handlers = {number: signal.getsignal(number) for number in _INTERRUPTS}
    with tempfile.TemporaryDirectory(prefix="ringcomm-trace-") as folder:
        wanted = {"RINGCOMM_TRACE": folder, "RINGCOMM_TRACE_EVENTS": str(num_events)}
        try:
            with _interrupts_delayed():  # one within Popen() would lose the process
                process = subprocess.Popen(command, env=os.environ | wanted)
            status = process.wait()
        except OSError as error:
            print(f"ringcomm trace: cannot run {command[0]}: {error.strerror}", file=sys.stderr)
            return EXIT_BAD_INPUT
        except KeyboardInterrupt:  # which the command has also received from the terminal
            for number in _INTERRUPTS:
                signal.signal(number, lambda *_: process.terminate())
            for grace_s, number in ((1.0, signal.SIGTERM), (10.0, signal.SIGKILL)):
                try:
                    process.wait(grace_s)
                except subprocess.TimeoutExpired:
                    process.send_signal(number)
            process.wait()
            status = EXIT_INTERRUPTED
            for number, handler in handlers.items():  # one more ends the merge
                signal.signal(number, handler)
        try:
            merged = merge_folders([Path(folder)], output, then, time.monotonic_ns())
        except ValueError as error:  # no rank has recorded anything
            print(f"ringcomm trace: {error}", file=sys.stderr)
            merged = EXIT_FAILED
    return merged if status == EXIT_OK else status if status > 0 else 128 - status


@contextlib.contextmanager
def _interrupts_delayed() -> Iterator[None]:
    """Those that come meanwhile are handled at the end."""
    came: list[int] = []
    kept = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in _INTERRUPTS
    }
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    for each in came:
        signal.raise_signal(each)


def merge_folders(
    folders: Sequence[Path], output: Path, then: Callable[[Path], None], now_ns: int = 0
) -> int:
    """Writes the trace of recordings and a summary on stderr; returns the exit status.

    ``then`` gets the trace. Raises as `merge`.
    """
    notes, totals = merge(folders, output, now_ns)
    last = f"{output}: {totals.pop()}; open it in https://ui.perfetto.dev"
    for line in (*notes, *totals, last):
        print(f"ringcomm trace: {line}", file=sys.stderr)
    try:
        then(output)
    except BrokenPipeError:  # of `--html /dev/stdout`, or of what it says on stderr
        raise
    except (OSError, ValueError) as error:
        print(f"ringcomm trace: {in_words(error)}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_OK


def merge(folders: Sequence[Path], output: Path, now_ns: int = 0) -> tuple[list[str], list[str]]:
    """Writes one trace of the recordings and dumps in some folders; compressed if named .gz.

    Returns notes, and lines of totals, of which the last has the numbers of ranks and events.
    `now_ns` is this host's CLOCK_MONOTONIC as the end of unfinished events. 0: the time of the last
    record, or now if a process of this host still runs. Raises ValueError if nothing was recorded,
    a file is damaged, dumps are of different jobs, or clocks cannot be compared.
    """
    processes = recordings.read(folders)
    if not processes:
        raise ValueError(
            "nothing was recorded: no rank made a group of backend ringcomm, and there is no dump"
        )
    notes = recordings.align(processes)
    writer = _Writer(processes, now_ns)
    with writing(output), _opened(output) as file:
        file.write('{"displayTimeUnit": "ns",\n')
        groups = [group for process in processes for group in process.groups.values()]
        titles = {f"{g['name']}: ranks {g['ranks']}, {g['transport']}" for g in groups}
        about = {"clock": notes, "groups": sorted(titles)}
        file.write(f'"otherData": {json.dumps(about)},\n"traceEvents": [\n')
        num_events, totals = 0, Totals()
        for event in writer.trace():
            totals.add(event)
            file.write((",\n" if num_events else "") + json.dumps(event))
            num_events += 1
        file.write("\n]}\n")
    counts = f"{counted(len({p.rank for p in processes}), 'rank')}, {num_events} events"
    return [*notes[1:], *writer.notes], [*totals.lines(), counts]


def _opened(path: Path) -> IO[str]:
    """A text file to write, compressed if its name ends in .gz."""
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.GzipFile(path, "w"), encoding="utf-8")
    return path.open("w", encoding="utf-8")


def is_wait_for_peer(event: dict[str, Any]) -> bool:
    """Whether a rank waits for another one, and not for its own thread."""
    return event.get("cat") == "wait" and event["args"].get("rank") is not None


class Totals:
    """Adds up the events of a trace, in µs."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._num_calls: Counter[int] = Counter()
        self._in_calls: Counter[int] = Counter()
        self._waits: dict[int, Counter[int]] = defaultdict(Counter)  # by row and awaited rank
        self._phases: dict[int, Counter[str]] = defaultdict(Counter)  # by row and name
        self._longest: list[tuple[float, int, str]] = []

    def add(self, event: dict[str, Any]) -> None:
        """An event as it is written."""
        kind, row = event.get("cat"), event["pid"]
        if event["name"] == "process_name":
            self._names[row] = event["args"]["name"]
        elif kind == "collective":
            self._num_calls[row] += 1
            self._in_calls[row] += event["dur"]
            call = f"{event['name']} #{event['args'].get('seq', '')}"
            push = heapq.heappush if len(self._longest) < NUM_LONGEST else heapq.heappushpop
            push(self._longest, (event["dur"], row, call))
        elif kind == "program":
            self._phases[row][event["name"]] += event["dur"]
        elif is_wait_for_peer(event):
            self._waits[row][event["args"]["rank"]] += event["dur"]

    def lines(self) -> list[str]:
        """A row for each rank, the rank that was awaited longest, and the longest calls."""
        if not self._num_calls:
            return []
        phases = list(dict.fromkeys(name for found in self._phases.values() for name in found))
        table = [["", "collectives", "time in them", "of it waiting", "most for", *phases]]
        for row in sorted(self._num_calls):
            waits = self._waits[row]
            cells = [in_seconds(us / 1e6) for us in (self._in_calls[row], waits.total())]
            most = f"rank {max(waits, key=waits.__getitem__)}" if waits else ""
            times = [in_seconds(self._phases[row][name] / 1e6) for name in phases]
            table.append([self._names[row], str(self._num_calls[row]), *cells, most, *times])
        lines = columns(table, "<").splitlines()
        awaited = sum(self._waits.values(), Counter())
        if awaited:
            rank, us = awaited.most_common(1)[0]
            whole = in_seconds(us / 1e6)
            lines.append(f"the others waited longest for rank {rank}: {whole} in all")
        longest = [
            f"{call} of {self._names[row]} {in_seconds(us / 1e6)}"
            for us, row, call in sorted(self._longest, reverse=True)
        ]
        return [*lines, f"the longest: {', '.join(longest)}"]


class _Writer:
    """Converts recordings to trace events, and fills `notes`."""

    def __init__(self, processes: list[Process], now_ns: int) -> None:
        self.notes: list[str] = []
        self._processes = processes
        here, now, times = clock_name(), time.monotonic_ns(), []
        for p in processes:
            found = [p.start_ns]
            found += [e[key] for e in chain(*p.events.values()) for key in ("begin_ns", "end_ns")]
            found += [time_ns for phase in p.phases for time_ns in (phase.begin_ns, phase.end_ns)]
            found += [now] if p.is_running and p.info["clock"] == here else []
            times += [time_ns + p.shift_ns for time_ns in found if time_ns]
        self._start_ns, self._end_ns = min(times), max([*times, now_ns])

    def trace(self) -> Iterator[dict[str, Any]]:
        for process in self._processes:
            yield from self._about(process)
            yield from self._program(process)
            for row, events in process.events.items():
                yield _metadata("thread_name", process.row, row, name=process.rows[row])
                for event in events:
                    yield from self._of_event(process, row, event)
        yield from self._arrows()

    def _us(self, process: Process, time_ns: int) -> float:
        return (time_ns + process.shift_ns - self._start_ns) / 1e3

    def _about(self, process: Process) -> Iterator[dict[str, Any]]:
        row, title = process.row, process.title()
        about = f"pid {process.info['pid']} on {process.info['host']}"
        yield _metadata("process_name", row, name=title)
        yield _metadata("process_sort_index", row, sort_index=row)
        yield _metadata("process_labels", row, labels=about)
        if title != f"rank {process.rank}":
            self.notes.append(f"{title}: {about}{process.dumped and ', '}{process.dumped}")
        for failed_ns, failure in process.failures:
            yield self._note(process, 0, failed_ns, failure)
            self.notes.append(failure)
        if process.num_dropped:
            first_ns = min(event["begin_ns"] for event in chain(*process.events.values()))
            text = f"{process.num_dropped} events before this were dropped"
            yield self._note(process, 0, first_ns, text)
            self.notes.append(
                f"rank {process.rank}: the oldest {process.num_dropped} events were dropped;"
                " raise --events"
            )

    def _program(self, process: Process) -> Iterator[dict[str, Any]]:
        """A row for each thread that ran the model, above those of calls."""
        rows = {
            thread: _PROGRAM_ROW + idx
            for idx, thread in enumerate(dict.fromkeys(p.thread for p in process.phases))
        }
        for row in rows.values():
            yield _metadata("thread_name", process.row, row, name="program")
            yield _metadata("thread_sort_index", process.row, row, sort_index=-1)
        for phase in process.phases:
            place = {"pid": process.row, "tid": rows[phase.thread]}
            begin = self._us(process, phase.begin_ns)
            end = self._us(process, phase.end_ns or self._end_ns - process.shift_ns)
            about = {"args": {} if phase.end_ns else {"unfinished": "its process recorded no end"}}
            times = {"ts": begin, "dur": round(end - begin, 3)}
            yield {"ph": "X", "cat": "program", "name": phase.name} | place | times | about
        if process.phases and process.phases[0].number > 1:
            self.notes.append(
                f"rank {process.rank}: the oldest {process.phases[0].number - 1} phases of the"
                " program were dropped; raise --events"
            )

    def _note(self, process: Process, row: int, time_ns: int, text: str) -> dict[str, Any]:
        place = {"pid": process.row, "tid": row, "ts": self._us(process, time_ns)}
        return {"ph": "i", "s": "p", "cat": "note", "name": text, **place}

    def _of_event(
        self, process: Process, row: int, event: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        begin_ns, end_ns = event["begin_ns"], event["end_ns"]
        kind = event["kind"]
        about: dict[str, Any] = {"name": _name(process, event)}
        about["cat"] = "wait" if kind == "queue" else kind
        about |= {"pid": process.row, "tid": row, "args": _arguments(process, event)}
        if not end_ns:
            about["args"]["unfinished"] = "its process recorded no end"
            is_over = process.alive_ns > begin_ns and not process.is_running
            end_ns = process.alive_ns if is_over else self._end_ns - process.shift_ns
        begin, end = self._us(process, begin_ns), self._us(process, end_ns)
        if kind != "message":
            yield {"ph": "X", "ts": begin, "dur": round(end - begin, 3), **about}
            return
        # Messages overlap, so they have a separate row.
        about["id"] = f"{process.row}-{row}-{event['number']}"
        yield {"ph": "b", "ts": begin, **about}
        yield {"ph": "e", "ts": end, **about}

    def _arrows(self) -> Iterator[dict[str, Any]]:
        """Arrows between ranks through the same call, in the order of their arrival."""
        calls: dict[tuple[Any, ...], list[tuple[float, int, int]]] = defaultdict(list)
        for process in self._processes:
            for key, row, event in recordings.collectives(process):
                # Inside the event, because its begin may equal that of its neighbour.
                place = self._us(process, event["begin_ns"]) + 0.001
                calls[key].append((place, process.row, row))
        for number, places in enumerate(calls.values()):
            for idx, (begin, rank_row, row) in enumerate(sorted(places)):
                if len(places) > 1:
                    phase = "s" if idx == 0 else "f" if idx == len(places) - 1 else "t"
                    about = {"name": "same call", "cat": "arrow", "id": number, "bp": "e"}
                    yield {"ph": phase, "pid": rank_row, "tid": row, "ts": begin, **about}


def _metadata(kind: str, process: int, row: int = 0, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": row, "args": arguments}


def _name(process: Process, event: dict[str, Any]) -> str:
    kind, op = event["kind"], event["op"]
    peer = process.peer(event, "waits_for" if kind == "wait" else "peer")
    whom = "any rank" if peer is None else f"rank {peer}"
    enqueued = " enqueued" if event.get("on_device") else ""
    names = {
        "call": event["title"],
        "collective": f"{op}{enqueued}",
        "part": f"{op} inside the host",
        "step": f"{op} step {event['step']}" if event["step"] else f"{op} first send",
        "wait": f"wait for {whom}",
        "queue": "wait for this rank's own thread",
        "message": f"{op}{enqueued} {'from' if op == 'recv' else 'to'} {whom}",
    }
    return str(names[kind])


def _arguments(process: Process, event: dict[str, Any]) -> dict[str, Any]:
    kind, seq, group = event["kind"], event["seq"], process.groups.get(event["group"])
    peer, other = process.peer(event, "peer"), process.peer(event, "waits_for")
    is_recv = event["op"] == "recv" and kind != "step"
    found = {
        "seq": seq if seq != NO_SEQ else None,
        "op": event["reduction"] if "reduce" in event["op"] else None,
        "dtype": event["dtype"] or None,
        "algorithm": event["algorithm"],
        "bytes": event["num_bytes"],
        "chunk": event["chunk"],
        "slice": event["slice"] or None,
        "tag": seq if seq < 1 << 32 else "of ringcomm",
        "root": peer,
        "rank": other,
        "from": other if kind == "step" else peer if is_recv else None,
        "to": None if is_recv else peer,
    }
    shown = {key: found[key] for key in _SHOWN[kind] if found[key] is not None}
    return {"group": group["name"], **shown} if group else shown
