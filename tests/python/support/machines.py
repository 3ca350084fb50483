"""Machines that have or allow little: what a process does to itself to be on one.

A child inherits all of it, and nothing of it lasts longer than the process and its children.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import re
import resource
import select
import signal
import struct
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWUSER = 0x00020000, 0x04000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
F_ADD_SEALS = 1033

_libc = ctypes.CDLL(None, use_errno=True)

# Numbers of system calls: on x86-64, and on arm64.
_NUMBERS = {
    "eventfd": (290, 19),
    "fcntl": (72, 25),
    "futex_waitv": (449, 449),
    "getcpu": (309, 168),
    "io_uring_setup": (425, 425),
    "madvise": (28, 233),
    "mbind": (237, 235),
    "membarrier": (324, 283),
    "memfd_create": (319, 279),
    "pidfd_getfd": (438, 438),
    "pidfd_open": (434, 434),
    "process_vm_readv": (310, 270),
    "sched_getaffinity": (204, 123),
    "sched_setaffinity": (203, 122),
    "userfaultfd": (323, 282),
}


class Unavailable(Exception):
    """This system cannot be made such a machine; says why."""


def needs_programs(*names: str) -> None:
    """Skips the test, and names them, where one of these programs is not installed."""
    import pytest  # neither is there for the programs of staged_hangs.py
    from programs import missing_programs

    if missing := missing_programs(*names):
        pytest.skip(f"not installed: {', '.join(missing)}")


def comes_true(condition: Callable[[], object], limit_s: float) -> bool:
    """Waits until a condition holds, or for so long; whether it holds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def read_lines(fd: int, number: int, limit_s: float) -> list[str]:
    """So many lines of a pipe, or what there is when all writers have closed it or at the limit."""
    text, deadline = b"", time.monotonic() + limit_s
    while text.count(b"\n") < number:
        if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            break
        part = os.read(fd, 1 << 16)
        if not part:
            break
        text += part
    return text.decode().splitlines()


class Answers:
    """A pipe by which children say things to the process that has made it."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()

    def say(self, value: Any) -> None:
        os.write(self._writer, json.dumps(value).encode() + b"\n")

    def read(self, number: int, limit_s: float) -> list[Any]:
        """So many values, or those of children that have not ended or been too late."""
        os.close(self._writer)
        try:
            return [json.loads(line) for line in read_lines(self._reader, number, limit_s)]
        finally:
            os.close(self._reader)


def kill_children(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _check(code: int, what: str) -> None:
    if code != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def run_in_child(limit_s: int, body: Callable[..., None], *args: Any) -> int:
    """Forks a process that calls body(*args) and ends, at the latest after the limit; its pid."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(limit_s)
        try:
            body(*args)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    return pid


def enter_namespaces(flags: int) -> None:
    """Moves the caller, and its children from now on, into new namespaces, as root of them."""
    uid, gid = os.geteuid(), os.getegid()
    if uid != 0:
        flags |= CLONE_NEWUSER
    try:
        _check(_libc.unshare(flags), "unshare")
        if uid != 0:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
            Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    except OSError as error:
        raise Unavailable(f"this user may not make namespaces: {error}") from None


def mount(kind: str, target: str, flags: int = 0, data: str = "") -> None:
    """Mounts a new file system, or changes a mount by `flags`. Needs CLONE_NEWNS."""
    args = (kind.encode(), target.encode(), kind.encode(), flags, data.encode())
    try:
        _check(_libc.mount(*args), f"mount of {target}")
    except PermissionError as error:  # /proc, in a container that hides parts of its own
        raise Unavailable(f"this user may not mount {target}: {error}") from None


def make_mounts_private() -> None:
    mount("none", "/", MS_REC | MS_PRIVATE)


def make_all_read_only() -> None:
    """Every mount but /proc and /sys, so that no folder can be written."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    targets = {line.split()[4].encode().decode("unicode_escape") for line in lines}
    for target in sorted(targets):
        if target.split("/")[1] not in ("proc", "sys"):
            mount("none", target, MS_REMOUNT | MS_BIND | MS_RDONLY)


@contextlib.contextmanager
def limited(which: int, most: int) -> Iterator[None]:
    """With a resource limit of this process."""
    limits = resource.getrlimit(which)
    resource.setrlimit(which, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, limits)


def used_bytes() -> int:
    """This process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def limit_of_descriptors(more: int) -> int:
    """RLIMIT_NOFILE for so many more descriptors than the process has: it limits their numbers."""
    free = (number for number in range(1 << 20) if not Path(f"/proc/self/fd/{number}").is_symlink())
    return next(islice(free, more, None))


def refuse_calls(error: int, *names: str) -> None:
    """System calls fail with this errno from now on, as by a container's seccomp filter.

    Args:
        names: of system calls; "fcntl(F_ADD_SEALS)" is one command of fcntl.
    """
    column = ["x86_64", "aarch64"].index(platform.machine())
    load_number, load_command = (0x20, 0, 0, 0), (0x20, 0, 0, 24)
    refuse, allow = (0x06, 0, 0, 0x00050000 | error), (0x06, 0, 0, 0x7FFF0000)
    rules = []
    for name in names:
        call, is_command, _ = name.partition("(")
        rules += [load_number, (0x15, 0, 3 if is_command else 1, _NUMBERS[call][column])]
        if is_command:
            rules += [load_command, (0x15, 0, 1, F_ADD_SEALS)]
        rules.append(refuse)
    rules.append(allow)
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *rule) for rule in rules))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(rules), ctypes.addressof(code)))
    try:
        _check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
        _check(_libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0), "prctl(seccomp)")
    except OSError as problem:
        raise Unavailable(f"no seccomp filters here: {problem}") from None


@contextlib.contextmanager
def cpu_quota(cores: float) -> Iterator[Path]:
    """A cgroup, of version 2, whose processes together get this much CPU time per time.

    Returns:
        Its file of processes, into which a process that joins writes its pid.
    """
    found = re.search(r"^0::/?(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    folder = Path("/sys/fs/cgroup", found[1] if found else "", f"ringcomm-test-{os.getpid()}")
    if not (folder.parent / "cgroup.controllers").exists():
        raise Unavailable("no cgroups of version 2")
    with contextlib.suppress(OSError):
        folder.mkdir()
    try:
        (folder / "cpu.max").write_text(f"{round(cores * 100_000)} 100000")
    except OSError:  # no such controller, or not allowed
        with contextlib.suppress(OSError):
            folder.rmdir()
        raise Unavailable("this user can make no cgroup with a CPU quota") from None
    try:
        yield folder / "cgroup.procs"
    finally:
        _remove_empty(folder)


def _remove_empty(cgroup: Path) -> None:
    """Once the processes that were killed have left it."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return cgroup.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
