"""Groups in which one rank's system calls fail: a program, with failing_calls.cc preloaded.

Usage: LD_PRELOAD=failing_calls.so python failing_calls.py CASE...   prints a JSON line per case

A case is named as "memory/steady/accept4/EPERM/all/lives on". "5:2" stands for every fifth case
from number 2 on: of all calls that the extension makes in a phase, each errno that the call may
set, and the first, the third and all calls.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from machines import Answers, kill_children, run_in_child
from ranks import hosts, init_group

import ringcomm

PHASES = ("init", "first use", "steady", "destroy")
FAILING_RANK = 1
# Of a group: longer than a case may take, so that what only the timeout ends is a hang.
TIMEOUT_S = 90
LIMIT_S = 60.0
# The errors of a call; EINTR and EAGAIN are those that a caller tries again.
ERRORS = {
    "accept4": (errno.EMFILE, errno.ECONNABORTED, errno.EPERM),
    "bind": (errno.EADDRINUSE, errno.EPERM),
    "connect": (errno.EINTR, errno.EAGAIN, errno.EPERM, errno.ETIMEDOUT),
    "dup": (errno.EMFILE,),
    "eventfd": (errno.EMFILE, errno.ENOMEM),
    "fcntl": (errno.EPERM, errno.EMFILE),
    "fstat": (errno.EIO,),
    "ftruncate": (errno.ENOSPC, errno.EFBIG, errno.EINTR),
    "getrandom": (errno.ENOSYS, errno.EINTR),
    "getsockopt": (errno.EPERM,),
    "ioctl": (errno.ENOTTY,),
    "listen": (errno.EPERM,),
    "madvise": (errno.ENOMEM, errno.EINVAL),
    "memfd_create": (errno.EMFILE, errno.ENOMEM),
    "mmap": (errno.ENOMEM, errno.EPERM),
    "open": (errno.EMFILE, errno.EACCES),
    "poll": (errno.EINTR, errno.ENOMEM),
    "pthread_create": (errno.EAGAIN,),
    "recvmsg": (errno.EINTR, errno.ENOBUFS, errno.EPERM),
    "sched_getaffinity": (errno.EINVAL,),
    "sched_setaffinity": (errno.EPERM,),
    "send": (errno.EPERM, errno.EAGAIN),
    "sendmsg": (errno.EINTR, errno.ENOBUFS, errno.EPERM),
    "socket": (errno.EMFILE, errno.EPERM),
    "stat": (errno.EACCES,),
    "syscall": (errno.EPERM, errno.ENOSYS),
    "write": (errno.EPIPE, errno.ENOSPC),
}
STORMS = {(call, error) for call in ERRORS for error in (errno.EINTR, errno.EAGAIN)}
STORMS.remove(("pthread_create", errno.EAGAIN))
WHEN = {"first": (1, False), "third": (3, False), "all": (1, True)}
ENDS = {"ends": False, "lives on": True}


# Of each, a letter of hosts() for each rank.
TRANSPORTS = {"memory": "aa", "messages": "--", "hosts": "aab"}


@dataclass(frozen=True)
class Fault:
    """One rank's call fails in a phase; its process then ends, or lives on."""

    transport: str
    phase: str
    call: str | None = None
    error: int = 0
    first: int = 1
    onwards: bool = False
    lives_on: bool = False

    @classmethod
    def named(cls, name: str) -> Fault:
        transport, phase, call, error, when, end = name.split("/")
        return cls(transport, phase, call, getattr(errno, error), *WHEN[when], ENDS[end])


# ---- a rank


def use_everything(rank: int, world_size: int, may_lack_memory: bool = False) -> Iterator[str]:
    """Makes calls of all kinds; names each step before it is made.

    Raises AssertionError for a wrong result.
    """
    small, large = torch.ones(256), torch.ones(1 << 20)

    def assert_all(tensor: torch.Tensor, value: float) -> None:
        assert [float(end) for end in tensor.aminmax()] == [value, value], "WRONG result"

    for tensor in (small, large):
        yield f"all_reduce of {tensor.nbytes} bytes"
        dist.all_reduce(tensor)
        assert_all(tensor, world_size)
    for tensor in (small, large):
        yield f"send and recv of {tensor.nbytes} bytes"
        for sender in range(world_size):
            receiver = (sender + 1) % world_size
            if rank == sender:
                dist.send(tensor.fill_(sender), receiver)
            elif rank == receiver:
                dist.recv(tensor, sender)
                assert_all(tensor, sender)
    yield "asynchronous all_reduce"
    work: Any = dist.all_reduce(small.fill_(1), async_op=True)
    work.wait()
    assert_all(small, world_size)
    yield "empty_shared"
    try:
        shared = ringcomm.empty_shared(1 << 20).fill_(1)
    except torch.OutOfMemoryError:
        if not may_lack_memory:
            raise
        shared = torch.ones(1 << 20)  # this rank goes on without
    dist.all_reduce(shared)
    assert_all(shared, world_size)


def use(rank: int, world_size: int) -> None:
    for _ in use_everything(rank, world_size, may_lack_memory=True):
        pass
    dist.barrier()  # a rank that failed says so in this group, and not in the next one
    group = dist.new_group(list(range(world_size)))
    dist.all_reduce(torch.ones(1 << 16), group=group)
    if rank == 0:
        time.sleep(0.05)  # the others wait long enough to sleep
    dist.barrier()
    dist.destroy_process_group(group)


def run_phase(phase: str, rank: int, places: str, store: str) -> None:
    if phase == "init":
        os.environ.update(hosts(places)[rank])
        options = ringcomm.Options(log_waits=False)
        init_group(rank, len(places), store, TIMEOUT_S, options)
    elif phase == "destroy":
        dist.destroy_process_group()
    else:
        use(rank, len(places))


def run_rank(rank: int, fault: Fault, store: str) -> dict[str, Any]:
    """The phase that raised and what it said; how often the phase makes each call."""
    shim = ctypes.CDLL(None)
    said: dict[str, Any] = {"phase": "the end", "text": "", "counts": {}}
    for phase in PHASES:
        if rank == FAILING_RANK:
            name = fault.call.encode() if fault.call and phase == fault.phase else None
            shim.fail_calls(name, fault.error, fault.first, fault.onwards)
        try:
            run_phase(phase, rank, TRANSPORTS[fault.transport], store)
        except BaseException as error:
            said |= {"phase": phase, "text": f"{type(error).__name__}: {error}".partition("\n")[0]}
            break
        finally:
            said["counts"][phase] = {name: shim.count_calls(name.encode()) for name in ERRORS}
    return {**said, "at": time.monotonic()}


# ---- the ranks of a case


def answer(rank: int, fault: Fault, folder: str, answers: Answers) -> None:
    log = os.open(f"{folder}/log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    answers.say([rank, run_rank(rank, fault, f"{folder}/store")])
    if fault.lives_on:
        signal.pause()


def run_case(fault: Fault) -> tuple[list[dict[str, Any] | None], str]:
    """What each rank says, None of one that is silent; and what all wrote."""
    world_size = len(TRANSPORTS[fault.transport])
    found: list[dict[str, Any] | None] = [None] * world_size
    with tempfile.TemporaryDirectory(prefix="ringcomm-failing-") as folder:
        rest = (fault, folder, answers := Answers())
        pids = [run_in_child(int(LIMIT_S) + 5, answer, r, *rest) for r in range(world_size)]
        for rank, said in answers.read(world_size, LIMIT_S):
            found[rank] = said
        kill_children(pids)
        with open(f"{folder}/log", errors="replace") as log:
            return found, log.read()


def problem_of(fault: Fault, found: list[dict[str, Any] | None], log: str) -> str:
    """What is wrong with the case; empty if nothing is."""
    silent = [rank for rank, said in enumerate(found) if said is None]
    if silent:
        return f"ranks {silent} hang or were killed; {log[-300:]}"
    texts = [said["text"] for said in found if said is not None]
    if any("WRONG" in text for text in texts):
        return "a wrong result"
    if any("Timeout" in text for text in texts):
        return "found by a time-out only"
    if any(texts) and not all(texts) and fault.phase != "destroy":
        return "one rank goes on and another raises"
    if any(text and os.strerror(fault.error) not in text for text in texts):
        return "a rank does not say the reason"
    return ""


def calls_in(fault: Fault, found: list[dict[str, Any] | None]) -> int:
    said = found[FAILING_RANK]
    return said["counts"].get(fault.phase, {}).get(fault.call, 0) if said else 0


def all_cases() -> Iterator[str]:
    """Of each transport and phase: of the calls that the phase makes."""
    for transport in TRANSPORTS:
        found, log = run_case(Fault(transport, "init"))
        said = found[FAILING_RANK]
        assert said is not None, log
        assert not said["text"], (found, log)
        for phase, call in itertools.product(PHASES, ERRORS):
            count = said["counts"][phase][call]
            for number, when, end in itertools.product(ERRORS[call], WHEN, ENDS):
                first, onwards = WHEN[when]
                # Storms of signals and of connections end.
                is_storm = onwards and (call, number) in STORMS
                if count >= first and not is_storm:
                    error = errno.errorcode[number]
                    yield "/".join((transport, phase, call, error, when, end))


def chosen_cases(text: str) -> Iterator[str]:
    """The case of that name, or every N-th from number k on of "N:k"."""
    if "/" in text:
        return iter((text,))
    step, _, first = text.partition(":")
    return itertools.islice(all_cases(), int(first or 0), None, int(step))


def main(texts: list[str]) -> None:
    torch.set_num_threads(1)
    for name in itertools.chain.from_iterable(map(chosen_cases, texts)):
        fault = Fault.named(name)
        found, log = run_case(fault)
        times = [said["at"] for said in found if said is not None]
        row = {
            "case": name,
            "problem": problem_of(fault, found, log),
            "calls": calls_in(fault, found),
            "apart_s": round(max(times, default=0.0) - min(times, default=0.0), 2),
            "said": [f"{one['phase']}: {one['text']}" if one else "-" for one in found],
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
