"""`ringcomm doctor --job PID`: what a job that hangs waits for, asked from outside.

Nothing in the job is stopped, and it needs not to have been prepared: its flight recorders are read
through /proc, and its Python stacks come from py-spy, where that is installed, or from a signal.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ringcomm.measure.machine import TICKS_PER_S
from ringcomm.measure.screen import byte_count
from ringcomm.trace import flight
from ringcomm.trace.flight import ANY_RANK, Call, Group, Record

SAMPLE_S = 0.5
STACK_S = 1.0
BUSY_PERCENT = 30.0
# Frames in these are not the user's.
_LIBRARIES = ("/torch/", "/ringcomm/", "/site-packages/", "/lib/python")
_LOADERS = ("utils/data/dataloader.py", "multiprocessing/queues.py")


class JobError(Exception):
    """The job cannot be examined; the text says why, and what to do."""


@dataclass
class Rank:
    """One process of the job."""

    pid: int
    record: Record
    state: str = "?"  # of /proc/PID/stat
    cpu_percent: float = 0.0
    num_calls: int = 0  # during the sample
    stack: list[str] = field(default_factory=list)  # "FILE:LINE FUNCTION", innermost first

    @property
    def number(self) -> int:
        """In the job."""
        return self.record.rank

    @property
    def call(self) -> Call | None:
        """The call that it is in: of messages only one that it waits for."""
        running = [call for call in self.record.calls if call.state == "running"]
        found = [call for call in running if not call.is_message or call.waits_for != flight.NOBODY]
        return found[-1] if found else None

    @property
    def last(self) -> Call | None:
        """Its last call that has ended, or is enqueued to a device."""
        over = [call for call in self.record.calls if call.state != "running"]
        return over[-1] if over else None

    def group_of(self, call: Call) -> Group:
        """The group of a call."""
        return self.record.groups[call.group]

    def place(self) -> str:
        """The innermost line of its program, or of a library; empty if no stack is known."""
        own = [line for line in self.stack if not any(name in line for name in _LIBRARIES)]
        return (own or self.stack or [""])[0]


def _stat_fields(pid: int) -> list[str]:
    """What /proc/PID/stat has after the name. Raises OSError if the process has ended."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _stat(pid: int) -> tuple[str, int]:
    """The state of a process, and its ticks of CPU time. Raises OSError if it has ended."""
    fields = _stat_fields(pid)
    return fields[0], int(fields[11]) + int(fields[12])


def _parent(pid: int) -> int:
    return int(_stat_fields(pid)[1])


def _descendants(pid: int) -> list[int]:
    """The process and all below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                children.setdefault(_parent(int(entry.name)), []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def _memfd(pid: int, name: str) -> Path | None:
    """The descriptor of a memfd of this name, in /proc. Raises OSError if it may not be read."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(entry).startswith(f"/memfd:{name}"):
                return entry
    return None


def _own_pid(pid: int) -> int:
    """A process's number in its own PID namespace."""
    found = re.search(r"^NSpid:.*\s(\d+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
    return int(found[1]) if found else pid


def _record(pid: int) -> Record | None:
    """The record of a process; None if it has none of its own.

    Raises:
        OSError: it has ended, or belongs to another user.
        ValueError: another version of ringcomm wrote it.
    """
    found = _memfd(pid, flight.MEMFD)
    if found is None:
        return None
    record = flight.parse(found.read_bytes())
    # A forked child, such as a data loader's worker, has its parent's.
    return record if record.pid == _own_pid(pid) else None


def find_ranks(pid: int) -> list[Rank]:
    """The ranks of the job that a process is, has started, or belongs to.

    Raises:
        JobError: there is none, or it cannot be read.
    """
    if not Path(f"/proc/{pid}").exists():
        raise JobError(f"there is no process {pid}")
    try:
        is_rank = _record(pid) is not None
        root = _parent(pid) if is_rank and _parent(pid) > 1 else pid
    except PermissionError as error:
        raise JobError(
            f"process {pid} belongs to another user: run this as that user, or as root"
        ) from error
    except OSError as error:
        raise JobError(f"process {pid} has ended meanwhile") from error
    except ValueError as error:
        raise JobError(str(error)) from error
    ranks: dict[int, Rank] = {}
    pids = _descendants(root)
    for each in pids:  # grows by the members of their groups, which may have other parents
        if each in ranks or each <= 0:
            continue
        with contextlib.suppress(OSError, ValueError):
            record = _record(each)
            if record is not None:
                ranks[each] = Rank(each, record)
                pids += [member for group in record.groups.values() for member in group.pids]
    if not ranks:
        raise JobError(
            f"neither process {pid} nor one that it has started has a group of ringcomm of "
            "several ranks"
        )
    return sorted(ranks.values(), key=lambda rank: (rank.number, rank.pid))


def _sample(ranks: list[Rank]) -> list[Rank]:
    """Looks at all twice; those that are still there, as they are at the second look."""
    before = {}
    for rank in ranks:
        with contextlib.suppress(OSError):
            before[rank.pid] = (*_stat(rank.pid), rank.record.num_calls)
    began = time.monotonic()
    time.sleep(SAMPLE_S)
    found = []
    for rank in ranks:
        with contextlib.suppress(OSError, ValueError, KeyError):
            _, ticks, num_calls = before[rank.pid]
            rank.state, now = _stat(rank.pid)
            rank.cpu_percent = 100 * (now - ticks) / TICKS_PER_S / (time.monotonic() - began)
            rank.record = _record(rank.pid) or rank.record
            rank.num_calls = rank.record.num_calls - num_calls
            if rank.state not in "ZX":
                found.append(rank)
    return found


# ---- stacks


def _ask_for_stack(pid: int) -> str:
    """By the signal that flight.offer_stacks() handles; empty if the process does not."""
    found = _memfd(pid, flight.STACKS_MEMFD)
    caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
    if found is None or not caught or not int(caught[1], 16) >> (flight.STACK_SIGNAL - 1) & 1:
        return ""
    size = found.stat().st_size
    os.kill(pid, flight.STACK_SIGNAL)
    last, deadline = size, time.monotonic() + STACK_S
    while time.monotonic() < deadline:
        time.sleep(0.02)
        now = found.stat().st_size
        if now > size and now == last:
            break
        last = now
    with found.open("rb") as file:
        file.seek(size)
        return file.read().decode("utf-8", "replace")


def _stack_of(rank: Rank) -> list[str]:
    """Of its main thread, innermost first."""
    if rank.state in "Tt":
        return []
    py_spy = shutil.which("py-spy")
    if py_spy is not None:
        with contextlib.suppress(subprocess.SubprocessError, OSError):
            command = [py_spy, "dump", "--json", "--nonblocking", "--pid", str(rank.pid)]
            said = subprocess.run(command, capture_output=True, timeout=STACK_S, check=True)
            threads = json.loads(said.stdout)
            main = next((t for t in threads if t["thread_name"] == "MainThread"), threads[0])
            return [f"{f['filename']}:{f['line']} {f['name']}" for f in main["frames"]]
    with contextlib.suppress(OSError):
        # Of all threads; the main thread is the last one.
        blocks = _ask_for_stack(rank.pid).strip().split("\n\n")
        frames = re.findall(r'File "(.*)", line (\d+) in (.*)', blocks[-1])
        return [f"{file}:{line} {name}" for file, line, name in frames]
    return []


# ---- the verdict


def _peer(ranks: list[Rank], rank: Rank, call: Call) -> Rank | int | None:
    """Whom a call waits for; a number in the group if it is not on this machine."""
    if call.waits_for < 0:
        return None
    group = rank.group_of(call)
    for other in ranks:
        for theirs in other.record.groups.values():
            if (theirs.id, theirs.rank, theirs.state) == (group.id, call.waits_for, "alive"):
                return other
    return call.waits_for


def _why_outside(rank: Rank) -> str:
    """What a rank does that others wait for, and that is in no call."""
    place = rank.place()
    at = f", at {place}" if place else ""
    if any(name in line for line in rank.stack for name in _LOADERS):
        return f"is in the data loader{at}"
    if rank.cpu_percent >= BUSY_PERCENT or rank.state == "R":  # it may wait for a core
        return f"computes ({rank.cpu_percent:.0f} % of a core){at}"
    return f"is in no call of ringcomm, and sleeps{at}"


def _end_of(ranks: list[Rank], rank: Rank) -> tuple[str, int | None]:
    """Follows a wait from rank to rank: what is at its end, and which rank that is."""
    path = [rank]
    while (call := path[-1].call) is not None:
        last = path[-1]
        if last.state in "Tt":
            break
        peer = _peer(ranks, last, call)
        if peer is None:
            whom = "any rank" if call.waits_for == ANY_RANK else "no rank yet"
            return f"rank {last.number} is in {call.text()} and waits for {whom}", last.number
        if isinstance(peer, int):
            group = last.group_of(call)
            numbers = group.global_ranks
            number = numbers[peer] if peer < len(numbers) else peer
            return (
                f"rank {number} is the cause: it has ended, or runs on another host; rank "
                f"{last.number} waits for it in {call.text()}. Run `ringcomm doctor --job` there",
                number,
            )
        if peer in path:
            circle = [*path[path.index(peer) :], peer]
            texts = []
            for one, two in pairwise(circle):
                waits = one.call
                assert waits is not None
                group = one.group_of(waits)
                texts.append(f"rank {one.number} waits for {two.number} in {waits.text()} of "
                             f"group {group.name}")  # fmt: skip
            text = "; ".join(texts)
            return f"ranks wait for each other: {text}. Call groups in one order on all ranks", None
        path.append(peer)
    end = path[-1]
    if end.state in "Tt":
        return (
            f"rank {end.number} is the cause: its process {end.pid} is stopped (SIGSTOP or a "
            f"debugger); kill -CONT {end.pid} continues it",
            end.number,
        )
    last_call = end.last
    since = (
        f" since {last_call.text()} ended {last_call.ended_s:.0f} s ago"
        if last_call is not None and last_call.ended_s is not None
        else ""
    )
    return f"rank {end.number} is the cause: it {_why_outside(end)}{since}", end.number


def _behind_on_devices(ranks: list[Rank]) -> tuple[str, int | None] | None:
    """A rank that has enqueued fewer collectives than another one of a group, and makes no call."""
    groups: dict[int, list[tuple[Rank, Call | None]]] = {}
    for rank in ranks:
        calls = [call for call in rank.record.calls if call.on_device and not call.is_message]
        last = {call.group: call for call in calls}
        for place, group in rank.record.groups.items():
            if group.state == "alive":
                groups.setdefault(group.id, []).append((rank, last.get(place)))
    for members in groups.values():
        members.sort(key=lambda member: member[1].seq if member[1] is not None else -1)
        (late, least), (first, most) = members[0], members[-1]
        if most is None or late.num_calls > 0:
            continue
        if least is None or least.seq < most.seq:
            text = f"it has not enqueued {most.text()}, as rank {first.number} has, and "
            return f"rank {late.number} is the cause: {text}{_why_outside(late)}", late.number
    return None


def verdict(ranks: list[Rank], num_lost: int) -> tuple[str, int | None]:
    """One sentence, and the rank that is the cause."""
    failures = [g.failure for r in ranks for g in r.record.groups.values() if g.state == "failed"]
    if failures:
        return f"a group has failed: {failures[0]}", None
    waiting = [rank for rank in ranks if rank.call is not None]
    if not waiting:
        text = "no rank is in a call of ringcomm: the job does not wait for a collective"
        return _behind_on_devices(ranks) or (text, None)
    if all(rank.num_calls > 0 for rank in ranks) and not num_lost:
        return "no hang: every rank makes calls", None
    longest = max(waiting, key=lambda rank: rank.call.began_s if rank.call else 0)
    return _end_of(ranks, longest)


def examine(pid: int, look: Callable[[list[Rank]], None] | None = None) -> dict[str, Any]:
    """The ranks of a job, and the verdict; `look` is called with the ranks.

    Raises:
        JobError: it cannot be examined.
    """
    found = find_ranks(pid)
    ranks = _sample(found)
    if not ranks:
        raise JobError(f"the job of process {pid} has ended meanwhile")
    for rank in ranks:
        rank.stack = _stack_of(rank)
    if look is not None:
        look(ranks)
    text, cause = verdict(ranks, len(found) - len(ranks))
    rows = []
    for rank in ranks:
        call = rank.call or rank.last
        peer = _peer(ranks, rank, call) if call is not None and call.state == "running" else None
        rows.append({
            "rank": rank.number,
            "pid": rank.pid,
            "state": {"T": "stopped", "t": "stopped", "R": "running"}.get(rank.state, "sleeping"),
            "cpu_percent": round(rank.cpu_percent),
            "group": rank.group_of(call).name if call is not None else "",
            "call": None if call is None else {**asdict(call), "text": call.text()},
            "waits_for": peer.number if isinstance(peer, Rank) else peer,
            "stack": rank.stack,
            "place": rank.place(),
        })  # fmt: skip
    return {"verdict": text, "cause": cause, "ranks": rows}


def print_report(report: dict[str, Any]) -> None:
    """A line for each rank, and the verdict."""
    for row in report["ranks"]:
        call = row["call"]
        if call is None:
            what = "no call yet"
        else:
            what = f"{call['text']} ({byte_count(call['num_bytes'])}, group {row['group']})"
            if call["state"] == "enqueued":
                what = f"last: {what}, enqueued to a device {call['began_s']:.0f} s ago"
            elif call["ended_s"] is None:
                whom = "" if row["waits_for"] is None else f", waits for rank {row['waits_for']}"
                what = f"in {what} for {call['began_s']:.0f} s{whom}"
            else:
                what = f"last: {what}, ended {call['ended_s']:.0f} s ago"
        print(f"rank {row['rank']}  pid {row['pid']}  {row['state']}, {row['cpu_percent']} % CPU  "
              f"{what}")  # fmt: skip
        if row["place"]:
            print(f"        at {row['place']}")
    print(f"\n{report['verdict']}")
