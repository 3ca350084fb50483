"""Which rank of a job is the cause of a hang, and why: follows its ranks' waits to their end."""

import statistics
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import ringcomm
from ringcomm.trace.layout import ANY_RANK, NOBODY, Call, Group, Record

BUSY_PERCENT = 30.0
# Frames in these are not the user's.
_LIBRARIES = (f"{Path(ringcomm.__file__).parent}/", "/torch/", "/site-packages/", "/lib/python")
_LOADERS = ("utils/data/dataloader.py", "multiprocessing/queues.py")
# A rank is slow, and does not hang, if it was outside of calls for so much of this time before.
_AS_LONG, _NUM_TIMES = 0.7, 3
_SLOWER_BY = 0.3  # of the time, outside of calls, than the others
_NUM_GAPS = 100  # the last ones count
_NUM_NAMED = 8


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
    def is_stopped(self) -> bool:
        """By SIGSTOP or a debugger."""
        return self.state in "Tt"

    @property
    def call(self) -> Call | None:
        """The call that it is in: of messages only one that it waits for."""
        running = [call for call in _counted(self.record.calls) if call.state == "running"]
        return running[-1] if running else None

    @property
    def last(self) -> Call | None:
        """Its last call that has ended, or is enqueued to a device."""
        over = [call for call in self.record.calls if call.state != "running"]
        return over[-1] if over else None

    def group_of(self, call: Call) -> Group:
        """The group of a call."""
        return self.record.groups[call.group]

    def group_with(self, id_: int) -> Group | None:
        """Its side of a group; the living one if it has had several with this id."""
        found = [group for group in self.record.groups.values() if group.id == id_]
        return min(found, key=lambda group: group.state != "alive", default=None)

    def text(self, call: Call) -> str:
        """A call of it, with its group."""
        return f"{call.text()} of group {self.group_of(call).name}"

    def place(self) -> str:
        """Of the innermost frame of its program, or of a library: "train.py:12 (load_batch)".

        Empty if no stack is known.
        """
        own = [line for line in self.stack if not any(name in line for name in _LIBRARIES)]
        place, _, function = (own or self.stack or [""])[0].rpartition(" ")
        return f"{place} ({function})" if place else function

    def gaps(self) -> list[float]:
        """Seconds outside of calls between its last calls, the oldest first, and since the last."""
        found: list[float] = []
        until = None
        for call in self._last_calls():
            if until is not None:
                found.append(max(0, call.begin_ns - until) / 1e9)
            end_ns = self.record.read_ns if call.end_ns is None else call.end_ns
            ended = call.begin_ns if call.state == "enqueued" else end_ns
            until = ended if until is None else max(until, ended)
        return [*found, 0.0 if until is None else self.record.seconds_since(until)]

    def outside_share(self) -> float:
        """Of the time since it began the first of its last calls, the part outside of calls."""
        calls = self._last_calls()
        if not calls:
            return 1.0
        return sum(self.gaps()) / max(self.record.seconds_since(calls[0].begin_ns), 1e-9)

    def _last_calls(self) -> list[Call]:
        return _counted(self.record.calls[-_NUM_GAPS:])


def _counted(calls: list[Call]) -> list[Call]:
    """Calls without messages that are under way, and that their rank does not wait for."""
    return [
        call
        for call in calls
        if call.state != "running" or not call.is_message or call.waits_for != NOBODY
    ]


def _named(numbers: list[int]) -> str:
    """Ranks: "rank 3", "ranks 1, 2 and 3"."""
    *texts, last = [str(number) for number in sorted(numbers)]
    if len(texts) >= _NUM_NAMED:
        texts = texts[:_NUM_NAMED]
        last = f"{len(numbers) - _NUM_NAMED} more"
    return f"ranks {', '.join(texts)} and {last}" if texts else f"rank {last}"


def number_of(group: Group, member: int) -> int:
    """The rank in the job of a rank of a group."""
    return group.global_ranks[member] if member < len(group.global_ranks) else member


def peer_of(ranks: list[Rank], rank: Rank, call: Call) -> Rank | None:
    """The rank that a call waits for; None if it has no record here, or is no certain one."""
    id_ = rank.group_of(call).id
    for other in ranks:
        theirs = other.group_with(id_)
        if theirs is not None and theirs.rank == call.waits_for:
            return other
    return None


def _key(rank: Rank, call: Call) -> tuple[object, ...]:
    """The same on the ranks that make the same call."""
    return rank.group_of(call).id, call.op, call.seq, call.num_bytes, call.dtype, call.reduction


def _why_outside(rank: Rank, how_long: str = "") -> str:
    """What a rank does that others wait for, and that is in no call; and for how long."""
    if any(name in line for line in rank.stack for name in _LOADERS):
        what = "has been in the data loader" if how_long else "is in the data loader"
    elif rank.cpu_percent >= BUSY_PERCENT or rank.state == "R":  # which may wait for a core
        what = "has computed" if how_long else "computes"
        what += f" ({rank.cpu_percent:.0f} % of a core)"
    else:
        what = f"{'has slept' if how_long else 'sleeps'} outside any collective"
    at = f", at {rank.place()}" if rank.stack else ""
    return f"{what}{how_long}{at}"


def _wait_text(ranks: list[Rank], rank: Rank, call: Call) -> str:
    """A call that waits: with its step, or of a message whether the other rank takes part."""
    text = rank.text(call)
    if not call.is_message:
        step = call.step_text()
        return f"{text}, {step}" if step else text
    peer = peer_of(ranks, rank, call)
    if peer is None:
        return text
    other = "recv" if call.op == "send" else "send"
    group = rank.group_of(call)
    theirs = [
        each
        for each in peer.record.calls
        if (each.op, each.seq, each.state) == (other, call.seq, "running")
        and peer.group_of(each).id == group.id
        and each.peer in (group.rank, -1)
    ]
    return text if theirs else f"{text}, for which rank {peer.number} has no {other}"


def _blame(rank: Rank, what: str) -> str:
    return f"rank {rank.number} is the cause: {what}"


def _end(end: Rank, group: Group | None) -> str:
    """Of a rank that is stopped, or in no call.

    `group` is that of the call that waits for it, as it knows it.
    """
    if end.is_stopped:
        why = f"its process {end.pid} is stopped (SIGSTOP or a debugger)"
        return _blame(end, f"{why}; kill -CONT {end.pid} continues it")
    why = _why_outside(end)
    if group is not None and group.state == "left":
        return _blame(end, f"it has left group {group.name}, and {why}")
    if group is not None and group.state == "failed":
        return _blame(end, f"its group {group.name} has failed, and it {why}: {group.failure}")
    gaps = end.gaps()
    num_before = sum(gap >= _AS_LONG * gaps[-1] > 0 for gap in gaps[:-1])
    if num_before >= _NUM_TIMES:
        how_long = f" for {gaps[-1]:.1f} s, since its last call, as {num_before} times before"
        return f"no hang so far: rank {end.number} is slow: it {_why_outside(end, how_long)}"
    last = end.last
    how_long = ""
    if last is not None and last.end_ns is not None:
        ago_s = end.record.seconds_since(last.end_ns)
        how_long = f" for {ago_s:.0f} s, since {last.text()}"
    return _blame(end, f"it {_why_outside(end, how_long)}")


def _end_of_missing(ranks: list[Rank], rank: Rank, call: Call) -> tuple[str, int]:
    """Of the rank that a call waits for, which has no record here."""
    group = rank.group_of(call)
    pid = group.pids[call.waits_for] if call.waits_for < len(group.pids) else -1
    if pid > 0:
        number = number_of(group, call.waits_for)
        return f"rank {number} is the cause: its process {pid} has ended, or has no record", number
    # Of a host that is gone, each rank here waits for another one.
    awaited = {call.waits_for}
    for each in ranks:
        other = each.call
        if other is not None and each.group_of(other).id == group.id and other.waits_for >= 0:
            awaited |= {other.waits_for} if peer_of(ranks, each, other) is None else set()
    numbers = sorted(number_of(group, each) for each in awaited)
    texts = ("is", "it does") if len(numbers) == 1 else ("are", "they do")
    return (
        f"{_named(numbers)} {texts[0]} the cause: {texts[1]} not answer, on another host or in "
        "another PID namespace; run `ringcomm doctor --job` there"
    ), numbers[0]


def _behind(ranks: list[Rank], calls: dict[int, Call]) -> str:
    """Which of the ranks in one call are behind; empty if it is none, or not known."""
    at = {rank.number: calls[rank.pid] for rank in ranks}
    # Several slices may be under way: who is behind is in no later slice and in no later step.
    least = min(call.slice for call in at.values()), min(call.step for call in at.values())
    behind = [number for number, call in at.items() if (call.slice, call.step) == least]
    if not behind or len(behind) == len(at) or 0 in least:
        return ""
    verb = "is" if len(behind) == 1 else "are"
    return f", and {_named(behind)} {verb} behind, in {at[behind[0]].step_text()}"


def _of_circle(ranks: list[Rank], circle: list[Rank]) -> tuple[str, int | None]:
    """Of ranks that wait for each other; the first one is the last one, too."""
    calls = {rank.pid: call for rank in ranks if (call := rank.call) is not None}
    keys = {rank.pid: _key(rank, calls[rank.pid]) for rank in ranks if rank.pid in calls}
    (common, num_common), *_ = Counter(keys.values()).most_common(1)
    if all(keys[rank.pid] == common for rank in circle):
        first = circle[0]
        return (
            f"{_named([rank.number for rank in circle[:-1]])} exchange data in "
            f"{first.text(calls[first.pid])}: it takes long{_behind(circle, calls)}. Ask again",
            None,
        )
    odd = {rank.pid: rank for rank in circle if keys[rank.pid] != common}
    if len(odd) == 1 and 2 * num_common > len(ranks):
        (rank,) = odd.values()
        others = [each for each in ranks if keys.get(each.pid) == common]
        at = f", at {rank.place()}" if rank.stack else ""
        text = _blame(
            rank,
            f"it is in {_wait_text(ranks, rank, calls[rank.pid])}{at}, while "
            f"{_named([each.number for each in others])} wait in "
            f"{others[0].text(calls[others[0].pid])}: it has left out a call, or makes calls in "
            "another order",
        )
        return text, rank.number
    texts = [
        f"rank {one.number} waits for {two.number} in {_wait_text(ranks, one, calls[one.pid])}"
        for one, two in pairwise(circle)
    ]
    if any(calls[rank.pid].is_message for rank in circle):
        advice = "Start receives before sends (irecv, batch_isend_irecv), in one order on all ranks"
    else:
        advice = "Call groups in one order on all ranks"
    return f"ranks wait for each other: {'; '.join(texts)}. {advice}", None


def _of_wait(ranks: list[Rank], rank: Rank) -> tuple[str, int | None]:
    """Follows a wait from rank to rank: what is at its end, and which rank that is."""
    path = [rank]
    while (call := path[-1].call) is not None and not path[-1].is_stopped:
        last = path[-1]
        if call.waits_for < 0:
            whom = "any rank" if call.waits_for == ANY_RANK else "no rank yet"
            return f"rank {last.number} is in {last.text(call)} and waits for {whom}", last.number
        peer = peer_of(ranks, last, call)
        if peer is None:
            text, cause = _end_of_missing(ranks, last, call)
            return f"{text}. Rank {last.number} waits in {last.text(call)}", cause
        if peer in path:
            return _of_circle(ranks, [*path[path.index(peer) :], peer])
        path.append(peer)
    end = path[-1]
    if len(path) == 1:
        return _end(end, None), end.number
    before = path[-2]
    call = before.call
    assert call is not None
    waits = f"Rank {before.number} waits for it in {_wait_text(ranks, before, call)}"
    return f"{_end(end, end.group_with(before.group_of(call).id))}. {waits}", end.number


def _of_progress(ranks: list[Rank]) -> tuple[str, int | None]:
    """Of a job whose ranks all make calls."""
    shares = sorted((rank.outside_share(), rank.number) for rank in ranks)
    share, slowest = shares.pop()
    others = statistics.median(other for other, _ in shares) if shares else share
    if share - others < _SLOWER_BY:
        return "no hang: every rank makes calls", None
    return (
        f"no hang: every rank makes calls; rank {slowest} is slow: it spends {share:.0%} of "
        f"its time outside collectives, the others {others:.0%}, and they wait for it",
        slowest,
    )


def _of_failures(ranks: list[Rank]) -> tuple[str, int | None] | None:
    """Of groups that have ended with an error while their ranks are still there."""
    failed = [(r, g) for r in ranks for g in r.record.groups.values() if g.state == "failed"]
    if not failed:
        return None
    # The error of a rank that heard of it from another quotes the other's.
    group = min((group for _, group in failed), key=lambda group: len(group.failure))
    sides = [(r, g) for r, g in failed if g.id == group.id]
    calls = {}
    for each, side in sides:
        own = [c for c in each.record.calls if each.group_of(c) is side and not c.is_message]
        if own:
            calls[each.number] = _key(each, own[-1])
    # A rank that has made another call than most.
    (common, num_common), *_ = Counter(calls.values()).most_common(1) or [((), 0)]
    odd = [n for n, key in calls.items() if key != common and key[2] == common[2]]
    if odd:
        cause = odd[0] if len(odd) == 1 and num_common > 1 else None
    else:
        blamed = Counter(g.culprit for _, g in sides if g.culprit >= 0).most_common(1)
        cause = number_of(group, blamed[0][0]) if blamed else None
    who = "" if cause is None else f"rank {cause} is the cause: "
    return f"{who}group {group.name} has failed: {group.failure}", cause


def _of_lost(ranks: list[Rank]) -> tuple[str, int | None] | None:
    """Of processes that have ended while their groups' other ranks are in no call."""
    pids = {pid for rank in ranks for pid in (rank.pid, rank.record.pid)}
    for rank in ranks:
        for group in rank.record.groups.values():
            members = zip(group.global_ranks, group.pids, strict=True)
            lost = [(n, pid) for n, pid in members if pid > 0 and pid not in pids]
            if group.state == "alive" and lost:
                number, pid = lost[0]
                return (
                    f"rank {number} is the cause: its process {pid} has ended; the others are in "
                    f"no call of ringcomm: rank {rank.number} {_why_outside(rank)}",
                    number,
                )
    return None


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
            return _blame(late, f"{text}{_why_outside(late)}"), late.number
    return None


def verdict(ranks: list[Rank], num_lost: int) -> tuple[str, int | None]:
    """One sentence or two, and the rank that is the cause; `num_lost` ended during the sample."""
    if all(rank.num_calls > 0 for rank in ranks) and not num_lost:
        return _of_progress(ranks)
    waiting = [(call.begin_ns, rank, call) for rank in ranks if (call := rank.call)]
    waiting.sort(key=lambda each: each[0])
    for _, rank, call in waiting:
        if call.waits_for >= 0:
            return _of_wait(ranks, rank)
    found = _of_failures(ranks) or _of_lost(ranks)
    if found is None and waiting:  # for any rank, or for no long time
        return _of_wait(ranks, waiting[0][1])
    nothing = "no rank is in a call of ringcomm: the job does not wait for a collective"
    return found or _behind_on_devices(ranks) or (nothing, None)
