"""How the ranks of a group over messages agree on the ranks that go on; docs/design/shrink.md."""

from __future__ import annotations

import contextlib
import datetime
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ringcomm.contacts import Connection, Contacts
from ringcomm.errors import RingcommError

MAX_ATTEMPTS = 8
_LOOK_S = 0.05  # between two looks at signals, at processes of this machine, and at the time
_AGAIN_S = 0.02  # before a connection that has ended is made again
_PING_S = 0.25  # between two signs of life, at most
_CONNECT_S = 5.0  # to the new store, whose process was alive a moment ago
# A rank that has come in time has this long to answer a coordinator that comes late.
_LEAST_S = 1.0


@dataclass(frozen=True)
class Proposal:
    """The ranks that are to make a group; `name` is random."""

    name: str
    attempt: int
    ranks: list[int]
    store: tuple[str, int]


class Agreement:
    """One rank's part: agree(), take_store(), confirm(), again while confirm() returns false.

    One rank coordinates, the lowest that answers. It asks all others, proposes the set of those
    that have joined, and decides that the group is made when all of the set have made it. If it
    ends or falls silent, another one asks, and the group counts as made if all that it reaches
    have made it: nobody can have returned otherwise.
    """

    def __init__(
        self,
        contacts: Contacts,
        states: Callable[[], Iterable[str]],
        timeout: datetime.timedelta,
    ) -> None:
        """`states` returns what is known of the ranks without asking, as ringcomm.Health."""
        self._contacts, self._states = contacts, states
        self._rank, self._limit_s = contacts.rank, timeout.total_seconds()
        self._ping_s = min(_PING_S, self._limit_s / 4)
        self._size = len(contacts.addresses)
        self._asked = set(range(self._size))
        self._gone: set[int] = set()  # surely: their processes have ended, or they have left
        self._proposal: Proposal | None = None
        self._has_made = False
        self._coordinator: Connection | None = None  # of the proposal; None if it is this rank
        self._members: dict[int, Connection] = {}
        self._store: dist.TCPStore | None = None

    @property
    def attempt(self) -> int:
        """The number of the attempt, equal on all of its ranks, from 0 on."""
        return self._contacts.attempt

    def agree(self) -> list[int]:
        """Waits for all ranks that live, and returns the ranks of the new group, ascending.

        Raises:
            RingcommError: the others go on without this rank, too few ranks have joined, or all
                attempts have failed.
        """
        if self._contacts.gone_on is not None:
            raise self._left_out(self._contacts.gone_on)
        self._proposal, self._has_made = None, False
        while True:
            with _Meeting(self, made=None) as meeting:
                message = meeting.run()
                if message is None:
                    if meeting.holders():  # of a group that is not made by all
                        meeting.decide(False)
                        continue
                    self._propose(meeting)
                elif "proposal" in message:
                    name, attempt, ranks, store = message["proposal"]
                    self._proposal = Proposal(name, attempt, ranks, tuple(store))
                    self._coordinator = meeting.keep_coordinator()
                else:
                    continue  # a decision on a group that this rank has given up
            assert self._proposal is not None
            self._contacts.attempt = self._proposal.attempt
            self._asked = set(self._proposal.ranks)
            return list(self._proposal.ranks)

    def take_store(self) -> dist.Store:
        """The store of the new group, in the coordinator's process."""
        assert self._proposal is not None
        if self._store is not None:
            store, self._store = self._store, None
            return store
        seconds = min(self._limit_s, _CONNECT_S)
        # A client of torch's store would try again for all that time.
        with socket.create_connection(self._proposal.store, timeout=seconds):
            pass
        store = dist.TCPStore(
            *self._proposal.store,
            is_master=False,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=seconds),
        )
        store.set_timeout(datetime.timedelta(seconds=self._limit_s))
        return store

    def is_over(self) -> bool:
        """Whether the attempt has failed already, as far as this rank knows; never waits."""
        for connection in self._connections():
            connection.pump()
            told = connection.inbox[-1] if connection.inbox else {}
            if (connection.is_over and "made" not in told) or told.get("made") is False:
                return True
            if told.get("all_made") is False:
                return True
        return False

    def confirm(self, has_made: bool) -> bool:
        """Whether all ranks have made the new group, as all of them are told."""
        assert self._proposal is not None
        self._has_made = has_made
        try:
            if self._coordinator is None:
                all_made = has_made and self._wait_for_members()
                for member in self._members.values():
                    member.send(all_made=all_made)
            else:
                self._coordinator.send(made=has_made)
                all_made = has_made and self._wait_for_decision(self._coordinator)
        finally:
            for connection in self._connections():
                connection.close()
            self._coordinator, self._members, self._store = None, {}, None
        if all_made:
            answer_late_ranks(self._contacts, self._proposal)
        return all_made

    def _connections(self) -> list[Connection]:
        return [self._coordinator] if self._coordinator is not None else [*self._members.values()]

    def _propose(self, meeting: _Meeting) -> None:
        """As the coordinator, of the ranks that have joined."""
        ranks = sorted({self._rank, *meeting.joined})
        attempt = max(
            self.attempt, *(int(other["attempt"]) for other in meeting.joined.values()), -1
        )
        error = ""
        if attempt + 1 >= MAX_ATTEMPTS:
            error = (
                f"ringcomm: shrink failed {MAX_ATTEMPTS} times, because further ranks ended or did"
                " not answer; restart the job"
            )
        elif not self._may_go_on(ranks):
            silent = sorted(set(range(self._size)) - self._gone - set(ranks))
            error = (
                f"ringcomm: shrink: of {self._size} ranks only {ranks} answer, and {silent} may be"
                " alive behind a network that is cut, where they would go on as well; restart the"
                " job with the ranks that are left"
            )
        if error:
            for rank in meeting.joined:
                meeting.calls[rank].send(failed=error)
            raise RingcommError(error)
        for rank in self._asked - set(ranks) - self._gone:
            meeting.calls[rank].send(gone_on=ranks)  # it reads this whenever it comes
        host = self._contacts.addresses[self._rank].host
        self._store = dist.TCPStore(
            host,
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=self._limit_s),
        )
        store = (host, self._store.port)
        self._proposal = Proposal(secrets.token_hex(8), attempt + 1, ranks, store)
        self._coordinator = None
        self._members = meeting.keep_members()
        for member in self._members.values():
            member.send(proposal=[self._proposal.name, attempt + 1, ranks, store])

    def _may_go_on(self, ranks: list[int]) -> bool:
        """Whether no other set of ranks may: of those not surely gone it has more than half.

        Half is enough with the lowest of them.
        """
        possible = set(range(self._size)) - self._gone
        num = 2 * len(ranks)
        return num > len(possible) or (num == len(possible) and min(possible) in ranks)

    def _wait_for_members(self) -> bool:
        deadline = time.monotonic() + self._limit_s
        pinged = 0.0
        waiting = dict(self._members)
        while waiting:
            for rank, member in list(waiting.items()):
                member.pump()
                told = [message["made"] for message in member.inbox if "made" in message]
                if told == [True]:
                    del waiting[rank]
                elif told or member.is_over:
                    return False
            now = time.monotonic()
            if now > deadline:
                return False
            if now >= pinged + self._ping_s:
                pinged = now
                for member in self._members.values():
                    member.send(ping=True)
            if waiting:
                _wait(waiting.values(), self._ping_s)
        return True

    def _wait_for_decision(self, coordinator: Connection) -> bool:
        """As a rank that has made its part of the group."""
        deadline = time.monotonic() + self._limit_s
        while not coordinator.is_over and time.monotonic() < deadline:
            coordinator.pump()
            while coordinator.inbox:
                message = coordinator.inbox.pop(0)
                deadline = time.monotonic() + self._limit_s
                if "all_made" in message:
                    return bool(message["all_made"])
            _wait([coordinator], _LOOK_S)
        # It has ended, or is silent: the others may know how it has decided.
        coordinator.close()
        assert self._proposal is not None
        with _Meeting(self, made=self._proposal.name) as meeting:
            decision = meeting.run()
            if decision is None:
                all_made = meeting.may_be_made()
                meeting.decide(all_made)
            else:
                all_made = bool(decision.get("all_made"))
            return all_made

    def _left_out(self, ranks: list[int]) -> RingcommError:
        self._contacts.gone_on = ranks
        if self._rank in ranks:
            return RingcommError(
                f"ringcomm: shrink was interrupted on rank {self._rank} when all ranks had made the"
                " new group, and the others use it; end this process, and shrink again on the"
                " others",
                rank=self._rank,
            )
        return RingcommError(
            f"ringcomm: rank {self._rank} did not call shrink in time, and the other ranks go on"
            f" without it (ranks {', '.join(map(str, ranks))}); end this process, or raise the"
            " timeout of shrink",
            rank=self._rank,
        )


class _Meeting:
    """The first part of an attempt: this rank joins a coordinator, or coordinates.

    Each rank watches the lower ones by a connection. One that is refused is gone; one that sends
    nothing for the timeout is silent. A rank with no other rank below it coordinates: it calls all
    others, which join the first that calls. Of two that coordinate, the higher joins the lower.

    Attributes:
        joined: as the coordinator, what the ranks that have joined have said.
        calls: the coordinator's connections, by rank.
    """

    def __init__(self, agreement: Agreement, made: str | None) -> None:
        self._own, self._made = agreement, made
        self._rank = agreement._rank
        self.joined: dict[int, dict[str, Any]] = {}
        self.calls: dict[int, Connection] = {}
        self._watches: dict[int, Connection] = {}
        self._incoming: list[Connection] = []
        self._coordinator: Connection | None = None
        self._silent: set[int] = set()
        self._is_coordinator = False
        self._ends_at = 0.0  # the coordinator's wait
        self._begin = self._pinged = self._looked = time.monotonic()
        self._heard = dict.fromkeys(agreement._asked, self._begin)  # when last, by rank
        self._may_connect: dict[int, float] = {}

    def __enter__(self) -> _Meeting:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections():
            connection.close()

    def holders(self) -> list[int]:
        """The ranks that have joined with a made group: that of this rank, if it has one."""
        return [
            rank
            for rank, other in self.joined.items()
            if other["made"] is not None and other["made"] == (self._made or other["made"])
        ]

    def may_be_made(self) -> bool:
        """Whether a rank may have returned with the group that this rank has made.

        All that have joined have made it. If none is silent, such a rank has ended since, and
        there is no use in a group that has lost it.
        """
        asked, gone = self._own._asked - {self._rank}, self._own._gone
        is_lost = bool(asked & gone) and asked <= gone | self.joined.keys()
        return len(self.holders()) == len(self.joined) and not is_lost

    def decide(self, all_made: bool) -> None:
        """Tells the ranks that have joined with a made group whether it is made by all."""
        for rank in self.holders():
            self.calls[rank].send(all_made=all_made)

    def keep_members(self) -> dict[int, Connection]:
        """The connections to the ranks that have joined, which stay open."""
        return {rank: self.calls.pop(rank) for rank in self.joined}

    def keep_coordinator(self) -> Connection:
        assert self._coordinator is not None
        kept, self._coordinator = self._coordinator, None
        self._incoming.remove(kept)
        return kept

    def run(self) -> dict[str, Any] | None:
        """The coordinator's message; None if this rank coordinates, and all that answer joined."""
        while True:
            now = time.monotonic()
            self._look_at_processes(now)
            self._connect(now)
            self._accept()
            if (message := self._read(now)) is not None:
                return message
            self._find_coordinator(now)
            if self._is_coordinator and self._has_all(now):
                return None
            self._ping(now)
            _wait(self._connections(), _LOOK_S if not self._may_connect else _AGAIN_S, self._own)

    def _connections(self) -> list[Connection]:
        return [*self._incoming, *self._watches.values(), *self.calls.values()]

    def _look_at_processes(self, now: float) -> None:
        if now < self._looked:
            return
        self._looked = now + _LOOK_S
        for rank, state in enumerate(self._own._states()):
            if state in ("dead", "left"):
                self._own._gone.add(rank)

    def _connect(self, now: float) -> None:
        """Makes the connections that are missing."""
        wanted = [(self._watches, "watch", range(self._rank))]
        if self._is_coordinator:
            wanted.append((self.calls, "call", range(self._own._size)))
        for connections, purpose, ranks in wanted:
            for rank in ranks:
                if rank == self._rank or rank not in self._own._asked or rank in self._own._gone:
                    continue
                known = connections.get(rank)
                if known is not None and not known.is_over:
                    continue
                if known is None or now >= self._may_connect.get(rank, now):
                    self._may_connect.pop(rank, None)
                    connections[rank] = self._own._contacts.connect(rank, purpose)

    def _accept(self) -> None:
        while (connection := self._own._contacts.accept()) is not None:
            self._incoming.append(connection)

    def _read(self, now: float) -> dict[str, Any] | None:
        for connection in self._connections():
            connection.pump()
            rank = connection.rank
            while connection.inbox and rank is not None:
                message = connection.inbox.pop(0)
                self._heard[rank] = now
                if (ranks := message.get("gone_on")) is not None:
                    if self._made is not None and message.get("name") == self._made:
                        return {"all_made": True}
                    raise self._own._left_out(ranks)
                if connection is self._coordinator:
                    if "failed" in message:
                        raise RingcommError(message["failed"])
                    if "proposal" in message or "all_made" in message:
                        return message
                elif connection is self.calls.get(rank) and "attempt" in message:
                    self.joined[rank] = message
                    left_s = max(float(message["left_s"]), min(_LEAST_S, self._own._limit_s))
                    self._ends_at = min(self._ends_at, now + left_s)
            if connection.is_over:
                self._lose(connection, now)
        return None

    def _lose(self, connection: Connection, now: float) -> None:
        rank = connection.rank
        if connection in self._incoming:
            self._incoming.remove(connection)
            if connection is self._coordinator:
                self._coordinator = None
        elif rank is not None:
            if connection.is_refused:
                self._own._gone.add(rank)
            if connection is self.calls.get(rank):
                self.joined.pop(rank, None)
            self._may_connect.setdefault(rank, now + _AGAIN_S)

    def _find_coordinator(self, now: float) -> None:
        """Joins a rank that calls, or begins to coordinate."""
        own = self._own
        if self._coordinator is not None:
            rank = self._coordinator.rank
            assert rank is not None
            if now < self._heard[rank] + own._limit_s:
                return
            self._silent.add(rank)
            self._coordinator.close()
            self._lose(self._coordinator, now)
        callers = [one for one in self._incoming if one.purpose == "call" and one.rank is not None]
        if self._is_coordinator:
            callers = [one for one in callers if (one.rank or 0) < self._rank]
        if callers:
            caller = min(callers, key=lambda one: one.rank or 0)
            self._stop_coordinating()
            self._coordinator = caller
            self._heard[caller.rank or 0] = now
            left_s = self._begin + own._limit_s - now
            caller.send(attempt=own.attempt, made=self._made, left_s=left_s)
            return
        for rank in range(self._rank):
            if now >= self._heard.get(rank, now) + own._limit_s:
                self._silent.add(rank)
        lower = (own._asked & set(range(self._rank))) - own._gone - self._silent
        if not lower and not self._is_coordinator:
            self._is_coordinator = True
            self._ends_at = now + own._limit_s

    def _stop_coordinating(self) -> None:
        self._is_coordinator = False
        self.joined = {}
        for call in self.calls.values():
            call.close()
        self.calls = {}

    def _has_all(self, now: float) -> bool:
        own = self._own
        missing = own._asked - {self._rank} - own._gone - self._silent - self.joined.keys()
        return self.calls.keys() >= own._asked - {self._rank} - own._gone and (
            not missing or now >= self._ends_at
        )

    def _ping(self, now: float) -> None:
        """Tells the ranks that wait for this one that it is there."""
        if now < self._pinged + self._own._ping_s:
            return
        self._pinged = now
        for connection in self._incoming:
            if connection is not self._coordinator and connection.rank is not None:
                connection.send(ping=True)
        for rank in self.joined:
            self.calls[rank].send(ping=True)


def _wait(
    connections: Iterable[Connection], seconds: float, agreement: Agreement | None = None
) -> None:
    """Until something can be read, written or accepted, and `seconds` at most."""
    poll = select.poll()
    for connection in connections:
        if not connection.is_over:
            poll.register(*connection.events())
    if agreement is not None:
        poll.register(agreement._contacts.listener, select.POLLIN)
    poll.poll(seconds * 1000)


def answer_late_ranks(contacts: Contacts, proposal: Proposal) -> None:
    """Tells ranks that come late that the others have gone on, as long as this process lives."""

    def answer() -> None:
        while True:
            with contextlib.suppress(OSError):
                select.select([contacts.listener], [], [])
                if (connection := contacts.accept()) is None:
                    continue
                deadline = time.monotonic() + _LEAST_S
                while connection.rank is None and not connection.is_over:
                    if (left_s := deadline - time.monotonic()) <= 0:
                        break
                    _wait([connection], left_s)
                    connection.pump()
                if connection.rank is not None:
                    connection.send(gone_on=proposal.ranks, name=proposal.name)
                connection.close()

    threading.Thread(target=answer, name="ringcomm-late", daemon=True).start()
