"""What torch's analyser reads of a dump of the flight recorder: `torchfrtrace FOLDER`.

torch.distributed.flight_recorder compares the collectives of a group by their numbers, and names
ranks that are missing and calls that differ. It does not know ringcomm, so calls are named as those
of NCCL, which its versions all take. It takes all ranks of a group for the ranks of a message: here
each direction of a pair, and each tag, is a group of its own. So are the calls on devices of a
group, which have their own numbers.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from ringcomm.trace.layout import NUM_EVENTS, Call, Group, Record

# Of torch's format.
_VERSION = "2.10"
# Operations that have a part for each rank in their input, and in their output.
_INPUTS_OF_ALL = ("reduce_scatter", "scatter", "all_to_all")
_OUTPUTS_OF_ALL = ("all_gather", "gather", "all_to_all")
# Names that the analyser of torch 2.11 does not have.
_OTHER_NAMES = {
    "barrier": "all_reduce_barrier",
    "reduce_scatter_update_all_gather": "all_reduce",
}

Entry = dict[str, Any]
# A call, the group that it is listed in, that group's ranks, its number there, and its title.
Listed = tuple[Call, str, list[int], int, str]


@dataclass
class _Group:
    """A group, and what its ranks have called in it."""

    name: str
    unique_name: str  # the same on all of its ranks
    ranks: list[int]  # in the job, by rank in the group
    calls: dict[int, list[Call]] = field(default_factory=dict)  # by rank in the job
    cut: set[int] = field(default_factory=set)  # ranks whose older calls are no longer there


def entries_of(
    own: Record, peers: Iterable[Record], unix_ns: int, stack: Sequence[str]
) -> dict[str, Any]:
    """What torch's analyser reads of the dump of a process: its groups and its calls.

    It does not contain collectives that another rank of the group, as far as `peers` are known, no
    longer has, receives from any rank, and messages of a group in which a rank no longer has all of
    its calls. `unix_ns` makes a time of the record one of Unix; `stack` is of the call that runs.
    """
    config: dict[str, Any] = {}
    listed: list[tuple[int, Entry]] = []  # by number of the call
    for group in _groups([own, *peers]):
        calls = group.calls.get(own.rank, [])
        for call, name, ranks, seq, title in chain(
            _collectives(group, calls), _messages(group, own.rank, calls)
        ):
            config[name] = {"name": name, "desc": group.name, "ranks": str(sorted(ranks))}
            is_in_it = call.state == "running" and call is own.calls[-1]
            entry = {
                "process_group": (name, group.name),
                "profiling_name": f"nccl:{title}",
                "collective_seq_id": seq,
                "p2p_seq_id": seq,
                "is_p2p": call.is_message,
                "frames": _frames(stack) if is_in_it else [],
            }
            listed.append((call.number, entry | _sizes(call, len(ranks)) | _times(call, unix_ns)))
    entries = [entry for _, entry in sorted(listed, key=lambda pair: pair[0])]
    for number, each in enumerate(entries):
        each["record_id"] = each["op_id"] = number
    return {"version": _VERSION, "pg_config": config, "entries": entries}


def _times(call: Call, unix_ns: int) -> Entry:
    created_ns = unix_ns + call.begin_ns
    # Whether and when a call on a device was seen to have ended differs between ranks.
    state = "completed" if call.state == "ended" else "started"
    return {
        "pg_id": call.group,
        "state": "scheduled" if call.on_device else state,
        "time_created_ns": created_ns,
        "time_discovered_started_ns": None if call.on_device else created_ns,
        "time_discovered_completed_ns": None if call.end_ns is None else unix_ns + call.end_ns,
        "retired": call.state == "ended",
    }


def _groups(records: Iterable[Record]) -> list[_Group]:
    """Those of all records. Of groups with the same ranks and name, a rank's last one."""
    found: dict[int, _Group] = {}
    for record in records:
        last: dict[int, int] = {}  # number of a group's last call, by its place
        for call in record.calls:
            last[call.group] = call.number
        by_age = sorted(record.groups, key=lambda place: last.get(place, 0))
        for id_, place in {record.groups[place].id: place for place in by_age}.items():
            own = record.groups[place]
            group = found.setdefault(id_, _Group(own.name, f"{own.name} {id_:x}", _ranks(own)))
            group.calls[record.rank] = [call for call in record.calls if call.group == place]
            if record.num_calls > NUM_EVENTS:
                group.cut.add(record.rank)
    return list(found.values())


def _ranks(group: Group) -> list[int]:
    """A recorder keeps the first 64; those of the default group are known."""
    known = group.global_ranks
    everyone = list(range(group.world_size))
    return everyone if known == everyone[: len(known)] else known


def _collectives(group: _Group, calls: list[Call]) -> Iterator[Listed]:
    for on_device in (False, True):
        left = [
            [c.seq for c in group.calls[rank] if not c.is_message and c.on_device == on_device]
            for rank in group.cut
        ]
        if not all(left):  # a rank may have made any of these calls
            continue
        first = max((seqs[0] for seqs in left), default=0)
        name = f"{group.unique_name} on devices" if on_device else group.unique_name
        for call in calls:
            if not call.is_message and call.on_device == on_device and call.seq >= first:
                yield call, name, group.ranks, call.seq, _OTHER_NAMES.get(call.op, call.op)


def _messages(group: _Group, rank: int, calls: list[Call]) -> Iterator[Listed]:
    numbers: dict[str, int] = defaultdict(int)
    for call in calls if not group.cut else ():
        if not call.is_message or not 0 <= call.peer < len(group.ranks):
            continue
        peer, is_send = group.ranks[call.peer], call.op == "send"
        source, target = (rank, peer) if is_send else (peer, rank)
        where = " on devices" if call.on_device else ""
        name = f"{group.unique_name}{where} {source}->{target} tag {call.seq}"
        pair = sorted((source, target))
        one, two = pair.index(source), pair.index(target)
        title = f"send {one}->{two}" if is_send else f"recv {two}<-{one}"
        yield call, name, pair, numbers[name], title
        numbers[name] += 1


def _sizes(call: Call, world_size: int) -> Entry:
    bits = re.search(r"\d+$", call.dtype)
    elems = call.num_bytes // max(1, int(bits[0]) // 8 if bits else 1)
    sizes = [[[elems * (world_size if call.op in which else 1)]]
             for which in (_INPUTS_OF_ALL, _OUTPUTS_OF_ALL)]  # fmt: skip
    found = {"input_sizes": sizes[0], "output_sizes": sizes[1]}
    return found | {"input_dtypes": [call.dtype], "output_dtypes": [call.dtype]}


def _frames(stack: Sequence[str]) -> list[dict[str, Any]]:
    """A stack of "FILE:LINE FUNCTION", as torch has it."""
    found = [re.fullmatch(r"(.*):(\d+) (.*)", line) for line in stack]
    return [{"filename": f[1], "line": int(f[2]), "name": f[3]} for f in found if f is not None]
