"""How the ranks of a group over messages agree on the ranks that go on; docs/design/shrink.md."""

import contextlib
import datetime
import secrets
import select
import socket
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch.distributed as dist

from ringcomm import _C
from ringcomm.contacts import Connection, Contacts
from ringcomm.errors import RingcommError
from ringcomm.survivors.meeting import LEAST_S, LOOK_S, Known, Meeting, left_out, wait

MAX_ATTEMPTS = 8
_CONNECT_S = 5.0  # to the new store, whose process was alive a moment ago


class Proposal(NamedTuple):
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
        self._contacts, self._limit_s = contacts, timeout.total_seconds()
        self._everyone = set(contacts.addresses)
        self._known = Known(contacts, states, self._limit_s, set(self._everyone), gone=set())
        self._proposal: Proposal | None = None
        self._coordinator: Connection | None = None  # of the proposal; None if it is this rank
        self._members: dict[int, Connection] = {}
        self._store: dist.TCPStore | None = None

    @property
    def attempt(self) -> int:
        """The number of the attempt, equal on all of its ranks, from 0 on."""
        return self._contacts.attempt

    def agree(self) -> list[int]:
        """Waits for all ranks that live, and returns the ranks of the new group, ascending.

        Raises RingcommError if the others go on without this rank, too few ranks have joined, or
        all attempts have failed.
        """
        if self._contacts.gone_on is not None:
            raise left_out(self._contacts, self._contacts.gone_on)
        self._proposal = None
        while True:
            with contextlib.closing(Meeting(self._known, made=None)) as meeting:
                message = meeting.run()
                if message is None:
                    if meeting.holders():  # of a group that is not made by all
                        meeting.decide(False)
                        continue
                    self._propose(meeting)
                elif "proposal" in message:
                    self._proposal = Proposal(*message["proposal"])
                    self._coordinator = meeting.keep_coordinator()
                else:
                    continue  # a decision on a group that this rank has given up
            assert self._proposal is not None
            self._contacts.attempt = self._proposal.attempt
            self._known.asked = set(self._proposal.ranks)
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
        store = _tcp_store(*self._proposal.store, seconds)
        store.set_timeout(datetime.timedelta(seconds=self._limit_s))
        return store

    def is_over(self) -> bool:
        """Whether the attempt has failed already, as far as this rank knows; never waits."""
        for connection in self._connections():
            connection.pump()
            last = connection.inbox[-1] if connection.inbox else {}
            if (connection.is_over and "made" not in last) or last.get("made") is False:
                return True
            if last.get("all_made") is False:
                return True
        return False

    def confirm(self, has_made: bool) -> bool:
        """Whether all ranks have made the new group, as the coordinator tells all of them."""
        assert self._proposal is not None
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

    def _propose(self, meeting: Meeting) -> None:
        """As the coordinator, of the ranks that have joined."""
        ranks = sorted({self._contacts.rank, *meeting.joined})
        attempt = max([self.attempt, *(int(x["attempt"]) for x in meeting.joined.values())])
        error = ""
        if attempt + 1 >= MAX_ATTEMPTS:
            error = (
                f"ringcomm: shrink failed {MAX_ATTEMPTS} times, because further ranks ended or did"
                " not answer; restart the job"
            )
        elif not self._may_go_on(ranks):
            silent = sorted(self._everyone - self._known.gone - set(ranks))
            error = (
                f"ringcomm: shrink: of {len(self._everyone)} ranks only {ranks} answer, and"
                f" {silent} may be alive behind a network that is cut, where they would go on as"
                " well; restart the job with the ranks that are left"
            )
        if error:
            for rank in meeting.joined:
                meeting.calls[rank].send(failed=error)
            raise RingcommError(error)
        for rank in self._known.asked - set(ranks) - self._known.gone:
            meeting.calls[rank].send(gone_on=ranks)  # it reads this whenever it comes
        host = self._contacts.addresses[self._contacts.rank].host
        self._store = _tcp_store(host, 0, self._limit_s)
        store = (host, self._store.port)
        self._proposal = Proposal(secrets.token_hex(8), attempt + 1, ranks, store)
        self._coordinator = None
        self._members = meeting.keep_members()
        for member in self._members.values():
            member.send(proposal=self._proposal)

    def _may_go_on(self, ranks: list[int]) -> bool:
        """Whether no other set of ranks may: of those not surely gone it has more than half.

        Half is enough with the lowest of them.
        """
        possible = self._everyone - self._known.gone
        num = 2 * len(ranks)
        return num > len(possible) or (num == len(possible) and min(possible) in ranks)

    def _wait_for_members(self) -> bool:
        deadline = _C.running_s() + self._limit_s
        pinged = 0.0
        waiting = dict(self._members)
        while waiting:
            for rank, member in list(waiting.items()):
                member.pump()
                answers = [message["made"] for message in member.inbox if "made" in message]
                if answers == [True]:
                    del waiting[rank]
                elif answers or member.is_over:
                    return False
            now = _C.running_s()
            if now > deadline:
                return False
            if now >= pinged + self._known.ping_s:
                pinged = now
                for member in self._members.values():
                    member.send(ping=True)
            if waiting:
                wait(waiting.values(), self._known.ping_s)
        return True

    def _wait_for_decision(self, coordinator: Connection) -> bool:
        """As a rank that has made its part of the group."""
        deadline = _C.running_s() + self._limit_s
        while not coordinator.is_over and _C.running_s() < deadline:
            coordinator.pump()
            while coordinator.inbox:
                message = coordinator.inbox.pop(0)
                deadline = _C.running_s() + self._limit_s
                if "all_made" in message:
                    return bool(message["all_made"])
            wait([coordinator], LOOK_S)
        # It has ended, or is silent: the others may know how it has decided.
        coordinator.close()
        assert self._proposal is not None
        with contextlib.closing(Meeting(self._known, made=self._proposal.name)) as meeting:
            decision = meeting.run()
            if decision is None:
                all_made = meeting.may_be_made()
                meeting.decide(all_made)
            else:
                all_made = bool(decision.get("all_made"))
            return all_made


def _tcp_store(host: str, port: int, seconds: float) -> dist.TCPStore:
    """A client of the store at a port; for port 0 a store that this process serves."""
    timeout = datetime.timedelta(seconds=seconds)
    return dist.TCPStore(host, port, None, port == 0, timeout, wait_for_workers=False)


def answer_late_ranks(contacts: Contacts, proposal: Proposal) -> None:
    """Tells ranks that come late that the others have gone on, as long as this process lives."""

    def answer() -> None:
        while True:
            with contextlib.suppress(OSError):
                select.select([contacts.listener], [], [])
                if (connection := contacts.accept()) is None:
                    continue
                deadline = _C.running_s() + LEAST_S
                while connection.rank is None and not connection.is_over:
                    if (left_s := deadline - _C.running_s()) <= 0:
                        break
                    wait([connection], left_s)
                    connection.pump()
                if connection.rank is not None:
                    connection.send(gone_on=proposal.ranks, name=proposal.name)
                connection.close()

    threading.Thread(target=answer, name="ringcomm-late", daemon=True).start()
