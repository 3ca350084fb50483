"""Flight recorders as torch's analyser reads them: `torchfrtrace FOLDER`, one pickle for each rank.

torch.distributed.flight_recorder compares the collectives of a group by their numbers, and names
ranks that are missing and calls that differ. It does not know ringcomm, so calls are named as those
of NCCL, which its versions all take. It takes all ranks of a group for the ranks of a message: here
each direction of a pair, and each tag, is a group of its own. So are the calls on devices of a
group, which have their own numbers.
"""

import pickle
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from ringcomm.trace.dumps import Known
from ringcomm.trace.layout import NUM_EVENTS, Call, Group

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
    ranks: list[int]  # in the job, by rank in the group
    calls: dict[int, list[Call]] = field(default_factory=dict)  # by rank in the job
    cut: set[int] = field(default_factory=set)  # ranks whose older calls are no longer there


@dataclass
class _Dump:
    """What the pickle of a rank will have."""

    known: Known
    config: dict[str, Any] = field(default_factory=dict)
    entries: list[tuple[int, Entry]] = field(default_factory=list)  # by number of the call

    def add(self, call: Call, name: str, ranks: list[int], seq: int, title: str) -> None:
        """Adds a call as one of the group `name`; `seq` is its number there."""
        about = {"name": name, "desc": name, "ranks": str(sorted(ranks))}
        self.config[name] = about
        entry: Entry = {"process_group": (name, name), "profiling_name": f"nccl:{title}"}
        entry |= {"collective_seq_id": seq, "p2p_seq_id": seq, "is_p2p": call.is_message}
        self.entries.append(
            (call.number, {**entry, **_sizes(call, len(ranks)), **self._about(call)})
        )

    def _about(self, call: Call) -> Entry:
        created_ns = self.known.unix_ns + call.begin_ns
        ended_ns = None if call.end_ns is None else self.known.unix_ns + call.end_ns
        # Whether and when a call on a device was seen to have ended differs between ranks.
        state = "completed" if call.state == "ended" else "started"
        is_in_it = call.state == "running" and call is self.known.record.calls[-1]
        return {
            "pg_id": call.group,
            "state": "scheduled" if call.on_device else state,
            "time_created_ns": created_ns,
            "time_discovered_started_ns": None if call.on_device else created_ns,
            "time_discovered_completed_ns": ended_ns,
            "retired": call.state == "ended",
            "frames": _frames(self.known.stacks.get("MainThread", [])) if is_in_it else [],
        }


def write(folder: Path, processes: Sequence[Known]) -> str:
    """Writes FOLDER/rank0 and so on, for each process; returns a note for the user, or "".

    The dumps do not contain collectives that a rank of the group no longer has, receives from any
    rank, and messages of a group in which a rank no longer has all of its calls. Raises ValueError
    if the folder has other files.
    """
    made = {known.record.rank: _Dump(known) for known in processes}
    unknown: set[int] = set()
    for group in _groups(processes):
        unknown |= set(group.ranks) - made.keys()
        for rank, calls in group.calls.items():
            for entry in chain(_collectives(group, calls), _messages(group, rank, calls)):
                made[rank].add(*entry)
    paths = {rank: folder / f"rank{rank}" for rank in made}
    folder.mkdir(parents=True, exist_ok=True)
    if others := sorted(set(folder.iterdir()) - set(paths.values())):
        raise ValueError(
            f"torch's analyser would take {others[0]} for one of these dumps: give a new folder"
        )
    for rank, dump in made.items():
        entries = [entry for _, entry in sorted(dump.entries, key=lambda pair: pair[0])]
        for number, each in enumerate(entries):
            each["record_id"] = each["op_id"] = number
        found = {"version": _VERSION, "pg_config": dump.config, "entries": entries}
        paths[rank].write_bytes(pickle.dumps(found))
    note = f"nothing is known of the ranks {sorted(unknown)}: give torchfrtrace the option "
    return note + "--allow-incomplete-ranks" if unknown else ""


def _groups(processes: Sequence[Known]) -> list[_Group]:
    """Those of all processes. Of groups with the same ranks and name, a rank's last one."""
    found: dict[int, _Group] = {}
    for known in processes:
        record = known.record
        last: dict[int, int] = {}  # number of a group's last call, by its place
        for call in record.calls:
            last[call.group] = call.number
        by_age = sorted(record.groups, key=lambda place: last.get(place, 0))
        for id_, place in {record.groups[place].id: place for place in by_age}.items():
            own = record.groups[place]
            group = found.setdefault(id_, _Group(own.name, _ranks(own)))
            group.calls[record.rank] = [call for call in record.calls if call.group == place]
            if record.num_calls > NUM_EVENTS:
                group.cut.add(record.rank)
    numbers = Counter(group.name for group in found.values())
    for id_, group in found.items():
        if numbers[group.name] > 1:
            group.name = f"{group.name} {id_:x}"
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
        name = f"{group.name} on devices" if on_device else group.name
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
        name = f"{group.name}{where} {source}->{target} tag {call.seq}"
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


def _frames(stack: list[str]) -> list[dict[str, Any]]:
    """A stack of "FILE:LINE FUNCTION", as torch has it."""
    found = [re.fullmatch(r"(.*):(\d+) (.*)", line) for line in stack]
    return [{"filename": f[1], "line": int(f[2]), "name": f[3]} for f in found if f is not None]
