"""Dumps of flight recorders as recordings, from which merge.py writes a trace."""

from collections.abc import Sequence
from typing import Any

from ringcomm.trace.dumps import Known
from ringcomm.trace.flight import NOBODY, Call
from ringcomm.trace.recordings import COLLECTIVE, MESSAGE, NO_SEQ, WAIT, Process

# Rows of calls on devices come after those of the groups' other calls.
_DEVICE_ROW = 1000


def processes_of(dumps: Sequence[Known], recorded: Sequence[Process]) -> list[Process]:
    """A process for each of the dumps, but for those that have a recording, which tells more."""
    known = {(process.info["clock"], process.info["pid"]) for process in recorded}
    return [_process(dump) for dump in dumps if (dump.clock, dump.record.pid) not in known]


def _process(dump: Known) -> Process:
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
