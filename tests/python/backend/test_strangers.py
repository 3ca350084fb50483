"""Processes that are not of the group: they get nothing, change nothing, and stop nothing.

Each stranger finds the ranks' sockets in /proc/net/unix, asks for memory, connects without end, and
keeps connections. SECURITY.md has the table. Reported for other programs whose sockets have such
names at https://github.com/golang/vulndb/issues/1306 and
https://github.com/systemd/systemd/issues/37963, and users that look like one another at
https://github.com/DeusData/codebase-memory-mcp/issues/2103.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import machines
import pytest
import torch.distributed as dist
from machines import CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWUSER, Unavailable
from ranks import in_ranks, init_group

import ringcomm

WORLD_SIZE = 2
TIMEOUT_S = 30
LIMIT_S = 60
PR_SET_PDEATHSIG = 1
OWNER, OTHER = 1001, 1002
ADDRESS = re.compile(rb"(ringcomm-[0-9a-f]{32}) ([0-9a-f]{32}) ([0-9a-f]{32})")


def become(uid: int) -> None:
    os.setgid(uid)
    os.setuid(uid)


def enter_unmapped_namespace() -> None:
    """As `unshare --user`: this user and all others look like 65534."""
    become(OWNER)
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER) != 0:
        raise Unavailable("this user may not make a user namespace")


def enter_other_container() -> None:
    machines.enter_namespaces(CLONE_NEWPID | CLONE_NEWNS)
    pid = os.fork()
    if pid > 0:  # the first of the PID namespace is the stranger
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    machines.make_mounts_private()
    machines.mount("proc", "/proc")
    become(OWNER)
    # It ends with its parent, which is killed; a limit in time is not inherited.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.alarm(LIMIT_S)


@dataclass(frozen=True)
class Case:
    enter_rank: Callable[[], None] = lambda: become(OWNER)
    enter_stranger: Callable[[], None] = lambda: become(OTHER)
    can_read_store: bool = True


CASES = {
    "another user that can read the store": Case(),
    "another user of ranks whose user is not mapped": Case(enter_rank=enter_unmapped_namespace),
    "the same user in another container": Case(
        enter_stranger=enter_other_container, can_read_store=False
    ),
}

# ---- the ranks


def run_rank(rank: int, case: Case, folder: Path, says: int, go: int) -> None:
    case.enter_rank()
    init_group(rank, WORLD_SIZE, folder / "store", TIMEOUT_S)
    data = ringcomm.empty_shared(1 << 16).fill_(rank)
    dist.broadcast(data, 0)
    os.write(says, b"ready\n")
    os.read(go, 1)
    begin = time.monotonic()
    group = dist.new_group(list(range(WORLD_SIZE)))
    more = ringcomm.empty_shared(1 << 25).fill_(1)  # another region of memory
    dist.all_reduce(more, group=group)
    ends = [value.item() for tensor in (data, more) for value in tensor.aminmax()]
    dist.destroy_process_group()
    os.write(says, json.dumps([ends, time.monotonic() - begin]).encode() + b"\n")


# ---- the stranger


def names() -> list[str]:
    text = Path("/proc/net/unix").read_text()
    return sorted(set(re.findall(r"@(ringcomm-[0-9a-f]{32})", text)))


def connect(name: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setblocking(False)
    made.connect(f"\0{name}")
    return made


def ask(name: str, request: str) -> tuple[str, int]:
    """The answer, and the number of descriptors in it."""
    with contextlib.suppress(OSError), connect(name) as made:
        made.setblocking(True)
        made.settimeout(2)
        with contextlib.suppress(OSError):
            made.send(request.encode())
        for _ in range(2):  # an error may come before the answer
            with contextlib.suppress(ConnectionResetError):
                text, ancillary, _, _ = made.recvmsg(512, socket.CMSG_LEN(4))
                kind = socket.SCM_RIGHTS
                return text.decode(), sum(
                    len(array.array("i", a[2])) for a in ancillary if a[1] == kind
                )
    return "", 0


def attack(case: Case, stolen: dict[str, str], says: int) -> None:
    """Until it is killed."""
    case.enter_stranger()
    texts, num_files = set(), 0
    for name in names():
        secret = stolen.get(name, "0" * 32) if case.can_read_store else "0" * 32
        keys = ["watch", *(f"arena/{i}" for i in range(4)), *(f"survivors/{i}" for i in range(2))]
        for key in (*keys, f"{name}/0"):
            for request in (key, f"{secret} {key}"):
                text, num = ask(name, request)
                texts.add(text)
                num_files += num
    os.write(says, json.dumps([sorted(texts), num_files, len(names())]).encode() + b"\n")
    held: list[socket.socket] = []
    while True:
        for name in names():
            with contextlib.suppress(OSError):
                for _ in range(50):
                    connect(name).close()
                if len(held) < 500:
                    held.append(connect(name))


# ---- both


def lines_of(fd: int, number: int) -> list[str]:
    lines = machines.read_lines(fd, number, LIMIT_S)
    assert len(lines) == number, f"said in time: {lines}"
    return lines


@pytest.fixture
def open_folder(tmp_path: Path) -> Path:
    if os.geteuid() != 0:
        pytest.skip("only root can become two other users")
    for folder in tmp_path.parents:  # pytest's are its user's alone
        if folder.stat().st_mode & 0o005 != 0o005:
            folder.chmod(0o755)
    tmp_path.chmod(0o777)
    return tmp_path


@in_ranks(1, backend=None, fresh=True)
@pytest.mark.parametrize("name", CASES)
def test_a_stranger_gets_nothing_and_stops_nothing(rank: int, name: str, open_folder: Path) -> None:
    case, folder = CASES[name], open_folder
    (ranks_say, says), (gone, go), (heard, hears) = os.pipe(), os.pipe(), os.pipe()
    pids = [
        machines.run_in_child(LIMIT_S, run_rank, rank, case, folder, says, gone)
        for rank in range(WORLD_SIZE)
    ]
    os.close(says)
    try:
        lines_of(ranks_say, WORLD_SIZE)
        found = ADDRESS.findall((folder / "store").read_bytes())
        stolen = {socket.decode(): secret.decode() for socket, secret, _ in found}
        pids.append(machines.run_in_child(LIMIT_S, attack, case, stolen, hears))
        os.close(hears)
        texts, num_files, num_names = json.loads(*lines_of(heard, 1))
        os.write(go, b"g" * WORLD_SIZE)
        ends = [json.loads(line) for line in lines_of(ranks_say, WORLD_SIZE)]
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert min(len(stolen), num_names) >= WORLD_SIZE
    assert num_files == 0
    assert all(text == "" or text.startswith("refused runs as") for text in texts), texts
    for values, seconds in ends:
        assert values == [0, 0, WORLD_SIZE, WORLD_SIZE]
        assert seconds < TIMEOUT_S / 2
