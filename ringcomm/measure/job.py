"""`ringcomm doctor --job PID`: what a job that hangs waits for, asked from outside.

Nothing in the job is stopped, and it needs not to have been prepared: its flight recorders are read
through /proc, and its Python stacks come from py-spy, where that is installed, or from a signal.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ringcomm.measure.machine import TICKS_PER_S
from ringcomm.measure.verdict import Rank, number_of, verdict
from ringcomm.screen import byte_count
from ringcomm.trace import dumps, layout
from ringcomm.trace.layout import Call, Record, parse

SAMPLE_S = 0.5
STACK_S = 1.0


class JobError(Exception):
    """The job cannot be examined; the text says why, and what to do."""


def _stat(pid: int) -> tuple[str, int, int]:
    """A process's state, parent and ticks of CPU time. Raises OSError if it has ended."""
    state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return state, int(fields[0]), int(fields[10]) + int(fields[11])


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                children.setdefault(_stat(int(entry.name))[1], []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def _memfds(pid: int, name: str) -> list[Path]:
    """The descriptors of memfds of this name, in /proc. Raises OSError if they may not be read."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(entry).startswith(f"/memfd:{name}"):
                found.append(entry)
    return found


def _own_pid(pid: int) -> int:
    """A process's number in its own PID namespace."""
    found = re.search(r"^NSpid:.*\s(\d+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
    return int(found[1]) if found else pid


def _record(pid: int) -> Record | None:
    """The record of a process; None if it has none of its own.

    Raises OSError if it has ended or belongs to another user, ValueError if another version of
    ringcomm wrote the record.
    """
    if _stat(pid)[0] in "ZX":
        raise ProcessLookupError(pid)
    # A forked child, such as a data loader's worker, also has its parent's.
    for found in _memfds(pid, layout.MEMFD):
        record = parse(found.read_bytes)
        if record.pid == _own_pid(pid):
            return record
    return None


def _why_unreadable(pid: int, error: Exception) -> str:
    if isinstance(error, ValueError):
        return str(error)
    try:
        os.kill(pid, 0)  # also finds what /proc hides (its mount option hidepid)
    except (ProcessLookupError, OverflowError):
        return f"there is no process {pid}"
    except PermissionError as refusal:
        error = refusal
    if isinstance(error, PermissionError):
        return f"process {pid} belongs to another user: run this as that user, or as root"
    return f"process {pid} has ended meanwhile"


def _are_of_one_job(one: Rank, two: Rank) -> bool:
    """Whether they are in one group. Groups of two jobs may have the same id."""
    for mine in one.record.groups.values():
        theirs = two.group_with(mine.id)
        if theirs is not None and theirs.rank < len(mine.pids):
            return mine.pids[theirs.rank] in (-1, two.pid, two.record.pid)
    return False


def _jobs(ranks: list[Rank]) -> list[list[Rank]]:
    found = []
    while ranks:
        members, rest = ranks[:1], ranks[1:]
        for member in members:  # grows
            members += [rank for rank in rest if _are_of_one_job(member, rank)]
            rest = [rank for rank in rest if rank not in members]
        found.append(members)
        ranks = rest
    return found


def find_ranks(pid: int) -> list[Rank]:
    """The ranks of the job that a process is, has started, or belongs to; raises JobError."""
    if pid <= 0:
        raise JobError(f"there is no process {pid}")
    try:
        is_rank = _record(pid) is not None
        parent = _stat(pid)[1] if is_rank else 0
        root = parent if parent > 1 else pid
    except (OSError, ValueError) as error:
        raise JobError(_why_unreadable(pid, error)) from error
    ranks: dict[int, Rank] = {}
    refusals = []
    pids = _descendants(root)
    for each in pids:  # grows by the members of their groups, which may have other parents
        if each in ranks or each <= 0:
            continue
        try:
            record = _record(each)
        except (PermissionError, ValueError) as error:
            refusals.append(_why_unreadable(each, error))
        except OSError:  # it has ended
            continue
        else:
            if record is not None:
                ranks[each] = Rank(each, record)
                pids += [member for group in record.groups.values() for member in group.pids]
    jobs = _jobs(list(ranks.values()))
    if is_rank:
        jobs = [members for members in jobs if any(rank.pid == pid for rank in members)]
    if not jobs and refusals:
        raise JobError(refusals[0])
    if not jobs:
        raise JobError(
            f"neither process {pid} nor one that it has started has a group of ringcomm of "
            "several ranks"
        )
    if len(jobs) > 1:
        firsts = ", ".join(str(members[0].pid) for members in jobs)
        raise JobError(
            f"process {pid} has started {len(jobs)} jobs: give the pid of a rank of one, as of "
            f"{firsts}"
        )
    return sorted(jobs[0], key=lambda rank: (rank.number, rank.pid))


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
            _, _, ticks, num_calls = before[rank.pid]
            rank.state, _, now = _stat(rank.pid)
            rank.cpu_percent = 100 * (now - ticks) / TICKS_PER_S / (time.monotonic() - began)
            rank.record = _record(rank.pid) or rank.record
            rank.num_calls = rank.record.num_calls - num_calls
            found.append(rank)
    return found


def _ask_for_stack(pid: int) -> str:
    """By the signal that layout.offer_stacks() handles; empty if the process does not."""
    files = _memfds(pid, layout.STACKS_MEMFD)
    caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
    if not files or not caught or not int(caught[1], 16) >> (layout.STACK_SIGNAL - 1) & 1:
        return ""
    found = files[0]
    size = found.stat().st_size
    os.kill(pid, layout.STACK_SIGNAL)
    last, num_same, deadline = size, 0, time.monotonic() + STACK_S
    while num_same < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
        now = found.stat().st_size
        num_same = num_same + 1 if now == last > size else 0
        last = now
    with found.open("rb") as file:
        file.seek(size)
        return file.read().decode("utf-8", "replace")


def _stack_of(rank: Rank) -> list[str]:
    """Of its main thread, innermost first."""
    if rank.is_stopped:
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


def _write_dumps(folder: Path, ranks: list[Rank]) -> None:
    """Writes FOLDER/rank0 and so on. The ranks do nothing for it, so they may be stopped.

    Records of ranks that have ended are in them where the system lets this process read the memory
    of the others, as it lets root.
    """
    for rank in ranks:
        peers: list[Record] = []
        with contextlib.suppress(OSError):
            _, peers = layout.mapped_records(rank.pid)
        peers += [other.record for other in ranks if other is not rank]  # later than what it maps
        last = {(peer.pid, peer.started_ns): peer for peer in peers}
        stacks = {"MainThread": rank.stack}
        dumps.write(f"{folder}/rank", rank.record, last.values(), "ringcomm doctor", stacks)


def _about(rank: Rank, call: Call) -> dict[str, Any]:
    """A call with its text, and how many seconds ago it began and ended."""
    since = rank.record.seconds_since
    ended_s = None if call.end_ns is None else since(call.end_ns)
    times = {"began_s": since(call.begin_ns), "ended_s": ended_s}
    return {**asdict(call), **times, "text": call.text()}


def examine(pid: int, folder: Path | None = None) -> dict[str, Any]:
    """The ranks of a job, the verdict, and the seconds that it took; dumps into a folder.

    Raises JobError where it cannot be examined, OSError where a dump cannot be written.
    """
    began = time.monotonic()
    found = find_ranks(pid)
    ranks = _sample(found)
    if not ranks:
        raise JobError(f"the job of process {pid} has ended meanwhile")
    with ThreadPoolExecutor(max_workers=len(ranks)) as threads:
        for rank, stack in zip(ranks, threads.map(_stack_of, ranks), strict=True):
            rank.stack = stack
    if folder is not None:
        _write_dumps(folder, ranks)
    text, cause = verdict(ranks, len(found) - len(ranks))
    rows = []
    for rank in ranks:
        call = rank.call or rank.last
        waits_for = None
        if call is not None and call.state == "running" and call.waits_for >= 0:
            waits_for = number_of(rank.group_of(call), call.waits_for)
        rows.append({
            "rank": rank.number,
            "pid": rank.pid,
            "state": {"T": "stopped", "t": "stopped", "R": "running"}.get(rank.state, "sleeping"),
            "cpu_percent": round(rank.cpu_percent),
            "group": rank.group_of(call).name if call is not None else "",
            "call": None if call is None else _about(rank, call),
            "waits_for": waits_for,
            "step": call.step_text() if call is not None else "",
            "stack": rank.stack,
            "place": rank.place(),
        })  # fmt: skip
    took_s = round(time.monotonic() - began, 3)
    return {"verdict": text, "cause": cause, "took_s": took_s, "ranks": rows}


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
                whom += f" in {row['step']}" if whom and row["step"] else ""
                what = f"in {what} for {call['began_s']:.0f} s{whom}"
            else:
                what = f"last: {what}, ended {call['ended_s']:.0f} s ago"
        print(f"rank {row['rank']}  pid {row['pid']}  {row['state']}, {row['cpu_percent']} % CPU  "
              f"{what}")  # fmt: skip
        if row["place"]:
            print(f"        at {row['place']}")
    print(f"\n{report['verdict']}")
    print(f"(asked {len(report['ranks'])} ranks in {report['took_s']:.2f} s)")
