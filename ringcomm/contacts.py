"""How the ranks of a group over messages reach each other without its store; docs/design/shrink.md.

Each rank listens at a TCP port of its own for each such group. The ranks exchange the addresses and
a key of each rank when they make the group. A connection serves only for a rank that knows the key
of the rank that it connects to. On it go lines of JSON, of a limited length.
"""

import contextlib
import errno
import fcntl
import hmac
import json
import os
import secrets
import select
import socket
import struct
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ringcomm.descriptors import above_standard

_PROTOCOL = "ringcomm-contact-1"
_MAX_GREETING_BYTES = 256
_MAX_LINE_BYTES = 1 << 18  # a list of 30,000 ranks
_SIOCGIFADDR = 0x8915

# A forked child must not keep its parent's ports open: peers would take the parent for alive.
_listeners: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    for listener in list(_listeners):
        listener.close()


os.register_at_fork(after_in_child=_close_in_child)


class Address(NamedTuple):
    """Where a rank listens, and the key that a connection to it must have."""

    host: str
    port: int
    key: str


class Contacts:
    """This rank's port of a group, and where the other ranks listen.

    Attributes:
        rank: of this rank in the group.
        addresses: by rank, once the group is made.
        gone_on: the ranks that have gone on without this one, once it knows.
        attempt: the last number of an attempt to agree on the ranks that go on; -1 before.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.listener = _listen(4 * world_size + 16)
        host, port = self.listener.getsockname()[:2]
        self._key = secrets.token_hex(16)
        self.addresses = {rank: Address(host, port, self._key)}
        self.gone_on: list[int] | None = None
        self.attempt = -1

    def __del__(self) -> None:
        if hasattr(self, "listener"):
            self.listener.close()

    def text_of(self, rank: int) -> str:
        """What the other ranks must know of a rank that this one knows."""
        return " ".join(map(str, self.addresses[rank]))

    def add(self, rank: int, text: str) -> None:
        """Stores the text_of() a rank."""
        host, port, key = text.split(" ")
        self.addresses[rank] = Address(host, int(port), key)

    def connect(self, rank: int, purpose: str) -> "Connection":
        """Begins to connect to another rank; never waits."""
        host, port, key = self.addresses[rank]
        made = _above(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
        made.setblocking(False)
        connection = Connection(self, made, rank, purpose)
        connection.begin(made.connect_ex((host, port)))
        connection.send_line(f"{_PROTOCOL} {key} {self.rank} {purpose}")
        return connection

    def accept(self) -> "Connection | None":
        """A connection that has come, of which nothing is known yet; None if there is none."""
        try:
            made = _above(self.listener.accept()[0])
        except OSError:
            return None
        made.setblocking(False)
        return Connection(self, made, None, "")

    def greet(self, line: str) -> tuple[int, str]:
        """The rank and the purpose of a greeting; raises ValueError for one of a stranger."""
        protocol, key, rank, purpose = line.split(" ", 3)
        is_ours = hmac.compare_digest(key.encode(), self._key.encode())
        if protocol != _PROTOCOL or not is_ours or int(rank) not in self.addresses:
            raise ValueError("a stranger")
        return int(rank), purpose


class Connection:
    """A connection to another rank, which never waits.

    Attributes:
        rank: of the other end; None until it has said so.
        purpose: why the connecting rank has made it.
        is_over: the other end has closed it, or it was never made.
        is_refused: no process has the other end's port: the rank has ended, or left the group.
        inbox: what the other end has sent and was not taken yet.
    """

    def __init__(
        self, contacts: Contacts, made: socket.socket, rank: int | None, purpose: str
    ) -> None:
        self._contacts, self._socket = contacts, made
        self.rank, self.purpose = rank, purpose
        self.is_over = self.is_refused = False
        self.inbox: list[dict[str, Any]] = []
        self._is_connecting = False
        self._is_greeted = False  # whether the other end has proved that it is of the group
        self._received, self._to_send = bytearray(), bytearray()
        with contextlib.suppress(OSError):
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def begin(self, error: int) -> None:
        """Takes the result of connect()."""
        self._is_connecting = error == errno.EINPROGRESS
        if error and not self._is_connecting:
            self.is_over, self.is_refused = True, error == errno.ECONNREFUSED

    def send(self, **message: Any) -> None:
        """Sends a message, now or in a later pump()."""
        self.send_line(json.dumps(message))

    def send_line(self, line: str) -> None:
        """Sends a line of text, in the same way."""
        self._to_send += line.encode() + b"\n"
        self._flush()

    def close(self) -> None:
        """Ends the connection; what can be sent at once still arrives."""
        self._flush()
        self.is_over = True
        self._socket.close()

    def events(self) -> tuple[int, int]:
        """The descriptor to poll, and for what."""
        is_writing = self._is_connecting or bool(self._to_send)
        return self._socket.fileno(), select.POLLIN | (select.POLLOUT if is_writing else 0)

    def pump(self) -> None:
        """Moves what can be moved now; full lines go into the inbox."""
        if self.is_over:
            return
        if self._is_connecting:
            poll = select.poll()
            poll.register(self._socket, select.POLLOUT)
            if not poll.poll(0):
                return
            self.begin(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        self._flush()
        try:
            while not self.is_over:
                data = self._socket.recv(1 << 16)
                self._received += data
                self._take_lines()
                self.is_over |= not data
        except BlockingIOError:
            pass
        except OSError:
            self.is_over = True

    def _flush(self) -> None:
        if self.is_over or self._is_connecting:
            return
        try:
            while self._to_send:
                del self._to_send[: self._socket.send(self._to_send)]
        except BlockingIOError:
            pass
        except OSError:
            self._to_send.clear()  # that it is over is read, behind what the other end has sent

    def _take_lines(self) -> None:
        while not self.is_over:
            line, end, rest = self._received.partition(b"\n")
            limit = _MAX_LINE_BYTES if self._is_greeted else _MAX_GREETING_BYTES
            if len(line) > limit:
                self.close()
            if not end:
                return
            self._received = rest
            try:
                self._take_line(line.decode("ascii"))
            except (ValueError, RecursionError):
                self.close()

    def _take_line(self, line: str) -> None:
        if self._is_greeted:
            message = json.loads(line)
            if not isinstance(message, dict):
                raise ValueError("a message must be an object")
            self.inbox.append(message)
            return
        if self.rank is None:
            self.rank, self.purpose = self._contacts.greet(line)
            self.send_line(self._contacts.addresses[self.rank].key)  # this is the right process
        elif not hmac.compare_digest(line, self._contacts.addresses[self._contacts.rank].key):
            raise ValueError("another process has the port")
        self._is_greeted = True


def _above(made: socket.socket) -> socket.socket:
    return socket.socket(fileno=above_standard(made.detach()))


def _listen(backlog: int) -> socket.socket:
    """A port that the system chooses, at the address that Gloo uses."""
    for family, host in _own_addresses():
        made = _above(socket.socket(family))
        try:
            made.bind((host, 0))
            made.listen(backlog)
        except OSError:
            made.close()
            continue
        made.setblocking(False)
        _listeners.add(made)
        return made
    raise OSError("ringcomm: no address of this machine can be listened at, not even 127.0.0.1")


def _own_addresses() -> Iterator[tuple[int, str]]:
    """Those of GLOO_SOCKET_IFNAME, else of the host's name; at last the loopback's."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    for name in names.split(",") if names else ():
        yield from _addresses_of(name.strip())
    if not names:
        with contextlib.suppress(OSError, UnicodeError):  # a name that cannot be resolved, or asked
            for family, _, _, _, place in socket.getaddrinfo(
                socket.gethostname(), None, type=socket.SOCK_STREAM
            ):
                yield int(family), str(place[0])
    yield socket.AF_INET, "127.0.0.1"


def _addresses_of(interface: str) -> Iterator[tuple[int, str]]:
    """The addresses of a network interface; none if there is no such interface."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_one:
        request = struct.pack("256s", interface.encode()[:15])
        answer = fcntl.ioctl(any_one, _SIOCGIFADDR, request)
        yield socket.AF_INET, socket.inet_ntoa(answer[20:24])
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if name == interface and scope != "20":  # an address of a link needs its interface
                yield socket.AF_INET6, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
