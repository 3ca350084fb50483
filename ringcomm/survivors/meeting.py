"""How the ranks of a group over messages meet: each joins a coordinator, or coordinates."""

import select
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ringcomm import _C
from ringcomm.contacts import Connection, Contacts
from ringcomm.errors import RingcommError

LOOK_S = 0.05  # between two looks at signals, at processes of this machine, and at the time
# A rank that has come in time has this long to answer a coordinator that comes late.
LEAST_S = 1.0
_AGAIN_S = 0.02  # before a connection that has ended is made again
_PING_S = 0.25  # between two signs of life, at most


@dataclass
class Known:
    """What a rank knows of the ranks of its group.

    Attributes:
        states: what is known of the ranks without asking, as ringcomm.Health.
        limit_s: how long to wait for a rank that lives.
        asked: the ranks that may go on.
        gone: the ranks whose processes have ended, or that have left. That is sure.
    """

    contacts: Contacts
    states: Callable[[], Iterable[str]]
    limit_s: float
    asked: set[int]
    gone: set[int]

    @property
    def ping_s(self) -> float:
        """Between two signs of life."""
        return min(_PING_S, self.limit_s / 4)


class Meeting:
    """The first part of an attempt: this rank joins a coordinator, or coordinates.

    Each rank watches the lower ones by a connection. One that is refused is gone; one that sends
    nothing for the timeout is silent. A rank with no other rank below it coordinates: it calls all
    others, which join the first that calls. Of two that coordinate, the higher joins the lower.

    Attributes:
        joined: as the coordinator, what the ranks that have joined have said.
        calls: the coordinator's connections, by rank.
    """

    def __init__(self, known: Known, made: str | None) -> None:
        self._own, self._made = known, made
        self._rank = known.contacts.rank
        self.joined: dict[int, dict[str, Any]] = {}
        self.calls: dict[int, Connection] = {}
        self._watches: dict[int, Connection] = {}
        self._incoming: list[Connection] = []
        self._coordinator: Connection | None = None
        self._silent: set[int] = set()
        self._is_coordinator = False
        self._ends_at = 0.0  # the coordinator's wait
        self._begin = self._pinged = self._looked = _C.running_s()
        self._heard = dict.fromkeys(known.asked, self._begin)  # when last, by rank
        self._may_connect: dict[int, float] = {}

    def close(self) -> None:
        """Ends the connections that are not kept."""
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
        asked, gone = self._own.asked - {self._rank}, self._own.gone
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
        """The connection to the coordinator, which stays open."""
        assert self._coordinator is not None
        kept, self._coordinator = self._coordinator, None
        self._incoming.remove(kept)
        return kept

    def run(self) -> dict[str, Any] | None:
        """The coordinator's message; None if this rank coordinates, and all that answer joined."""
        while True:
            now = _C.running_s()
            self._look_at_processes(now)
            self._connect(now)
            while (connection := self._own.contacts.accept()) is not None:
                self._incoming.append(connection)
            if (message := self._read(now)) is not None:
                return message
            self._find_coordinator(now)
            if self._is_coordinator and self._has_all(now):
                return None
            self._ping(now)
            pause_s = _AGAIN_S if self._may_connect else LOOK_S
            wait(self._connections(), pause_s, self._own.contacts.listener)

    def _connections(self) -> list[Connection]:
        return [*self._incoming, *self._watches.values(), *self.calls.values()]

    def _look_at_processes(self, now: float) -> None:
        if now < self._looked:
            return
        self._looked = now + LOOK_S
        for rank, state in enumerate(self._own.states()):
            if state in ("dead", "left"):
                self._own.gone.add(rank)

    def _connect(self, now: float) -> None:
        """Makes the connections that are missing."""
        wanted: list[Any] = [(self._watches, "watch", range(self._rank))]
        if self._is_coordinator:
            wanted.append((self.calls, "call", sorted(self._own.asked)))
        for connections, purpose, ranks in wanted:
            for rank in ranks:
                if rank == self._rank or rank not in self._own.asked or rank in self._own.gone:
                    continue
                known = connections.get(rank)
                if known is not None and not known.is_over:
                    continue
                if known is None or now >= self._may_connect.get(rank, now):
                    self._may_connect.pop(rank, None)
                    connections[rank] = self._own.contacts.connect(rank, purpose)

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
                    raise left_out(self._own.contacts, ranks)
                if connection is self._coordinator:
                    if "failed" in message:
                        raise RingcommError(message["failed"])
                    if "proposal" in message or "all_made" in message:
                        return message
                elif connection is self.calls.get(rank) and "attempt" in message:
                    self.joined[rank] = message
                    left_s = max(float(message["left_s"]), min(LEAST_S, self._own.limit_s))
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
                self._own.gone.add(rank)
            if connection is self.calls.get(rank):
                self.joined.pop(rank, None)
            self._may_connect.setdefault(rank, now + _AGAIN_S)

    def _find_coordinator(self, now: float) -> None:
        """Joins a rank that calls, or begins to coordinate."""
        own = self._own
        if self._coordinator is not None:
            rank = self._coordinator.rank
            assert rank is not None
            if now < self._heard[rank] + own.limit_s:
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
            left_s = self._begin + own.limit_s - now
            caller.send(attempt=own.contacts.attempt, made=self._made, left_s=left_s)
            return
        for rank in range(self._rank):
            if now >= self._heard.get(rank, now) + own.limit_s:
                self._silent.add(rank)
        lower = (own.asked & set(range(self._rank))) - own.gone - self._silent
        if not lower and not self._is_coordinator:
            self._is_coordinator = True
            self._ends_at = now + own.limit_s

    def _stop_coordinating(self) -> None:
        self._is_coordinator = False
        self.joined = {}
        for call in self.calls.values():
            call.close()
        self.calls = {}

    def _has_all(self, now: float) -> bool:
        own = self._own
        missing = own.asked - {self._rank} - own.gone - self._silent - self.joined.keys()
        return self.calls.keys() >= own.asked - {self._rank} - own.gone and (
            not missing or now >= self._ends_at
        )

    def _ping(self, now: float) -> None:
        """Tells the ranks that wait for this one that it is there."""
        if now < self._pinged + self._own.ping_s:
            return
        self._pinged = now
        for connection in self._incoming:
            if connection is not self._coordinator and connection.rank is not None:
                connection.send(ping=True)
        for rank in self.joined:
            self.calls[rank].send(ping=True)


def left_out(contacts: Contacts, ranks: list[int]) -> RingcommError:
    """The error of a rank that the others go on without, now and in later calls."""
    contacts.gone_on, rank = ranks, contacts.rank
    if rank in ranks:
        return RingcommError(
            f"ringcomm: shrink was interrupted on rank {rank} when all ranks had made the new"
            " group, and the others use it; end this process, and shrink again on the others",
            rank=rank,
        )
    return RingcommError(
        f"ringcomm: rank {rank} did not call shrink in time, and the other ranks go on without it"
        f" (ranks {', '.join(map(str, ranks))}); end this process, or raise the timeout of shrink",
        rank=rank,
    )


def wait(
    connections: Iterable[Connection], seconds: float, listener: socket.socket | None = None
) -> None:
    """Until something can be read, written or accepted, and `seconds` at most."""
    poll = select.poll()
    for connection in connections:
        if not connection.is_over:
            poll.register(*connection.events())
    if listener is not None:
        poll.register(listener, select.POLLIN)
    poll.poll(seconds * 1000)
