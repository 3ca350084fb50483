"""Jobs of eight ranks that hang, and what `ringcomm doctor --job` has to say of each.

staged_hangs.py starts them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ringcomm import RingcommError

HANG_S = 100
PR_SET_PDEATHSIG = 1


@dataclass
class Job:
    """What a rank has when its case begins."""

    rank: int
    world_size: int
    tensor: Any
    groups: list[Any]  # two, of all ranks

    def call(self, group: Any = None) -> None:
        """An all_reduce."""
        dist.all_reduce(self.tensor, group=group)

    def linger(self, group: Any = None) -> None:
        """A call whose error does not end the process."""
        with contextlib.suppress(RingcommError):
            self.call(group)
        wait_for_a_thread()

    @property
    def is_last(self) -> bool:
        return self.rank == self.world_size - 1


def die_with_parent(*_: object) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def wait_for_a_thread() -> None:
    time.sleep(HANG_S)


def evaluate() -> None:
    time.sleep(HANG_S)


@dataclass(frozen=True)
class Case:
    """A job that hangs, and its verdict: the rank that is the cause, and words of the reason."""

    body: Callable[[Job], None]
    cause: int | None
    words: tuple[str, ...]
    settle_s: float = 1.0  # until all ranks have come to where they wait

    def is_right(self, report: dict[str, Any]) -> bool:
        has_words = all(words in report["verdict"] for words in self.words)
        return report["cause"] == self.cause and has_words


CASES: dict[str, Case] = {}
FAILED = "is the cause: group 0 has failed"


def hangs(cause: int | None, *words: str, **more: Any) -> Callable[[Any], Any]:
    """Adds a case that is named for its function, which ranks run; then they call all_reduce.

    Args:
        words: the first may be "" for that of a rank that is the cause.
    """

    def add(body: Callable[[Job], None]) -> Callable[[Job], None]:
        said = tuple(text or f"rank {cause} is the cause" for text in words)
        CASES[body.__name__.replace("_", " ")] = Case(body, cause, said, **more)
        return body

    return add


# ---- the cases


@hangs(7, "", "is stopped", "kill -CONT")
def stopped(job: Job) -> None:
    if job.is_last:
        os.kill(os.getpid(), signal.SIGSTOP)


@hangs(5, "", "it is in all_reduce #0 of group 2", "while ranks 0, 1", "has left out a call")
def skips(job: Job) -> None:
    job.call(job.groups[1] if job.rank == 5 else None)


@hangs(5, "", "slept outside any collective", "(evaluate)", ", since all_reduce #0")
def other_code(job: Job) -> None:
    if job.rank == 5:
        evaluate()


@hangs(5, FAILED, "barrier #1", "all_reduce #1")
def other_call(job: Job) -> None:
    """On the same group: an error, which does not end the ranks."""
    with contextlib.suppress(RingcommError):
        dist.barrier() if job.rank == 5 else job.call()
    wait_for_a_thread()


@hangs(5, "", "it is in all_reduce #0 of group 2", "another order")
def other_order(job: Job) -> None:
    one, two = job.groups
    for group in (two, one) if job.rank == 5 else (one, two):
        job.call(group)


@hangs(5, FAILED, "all_reduce #1", "rank 5 (pid ", "died")
def dies(job: Job) -> None:
    if job.rank == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    job.linger()


@hangs(None, "ranks wait for each other", "rank 3 waits for 4 in", "rank 7 waits for 0 in")
def circle(job: Job) -> None:
    """Rank i is in groups i, with rank i + 1, and i - 1, and calls its own first."""
    pairs = [dist.new_group([each, (each + 1) % job.world_size]) for each in range(job.world_size)]
    for group in (job.rank, job.rank - 1):
        job.call(pairs[group])


class SlowData(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        time.sleep(HANG_S)
        return index


@hangs(7, "", "in the data loader")
def loader(job: Job) -> None:
    if job.is_last:
        options: dict[str, Any] = {"num_workers": 1, "worker_init_fn": die_with_parent}
        next(iter(torch.utils.data.DataLoader(SlowData(), **options)))


@hangs(0, "", "it is in send with tag 7", "for which rank 1 has no recv")
def send(job: Job) -> None:
    if job.rank == 0:
        dist.send(torch.ones(1 << 24), 1, tag=7)


@hangs(0, "", "it is in recv with tag 7", "rank 1 has no send")
def recv(job: Job) -> None:
    if job.rank == 0:
        dist.recv(job.tensor, 1, tag=7)


@hangs(7, "no hang: every rank makes calls; rank 7 is slow", settle_s=2.0)
def slow(job: Job) -> None:
    begin = time.monotonic()
    while time.monotonic() < begin + HANG_S:
        if job.is_last:
            compute(0.1)
        job.call()


def compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@hangs(7, "", "it has computed (", "(compute)")
def computes(job: Job) -> None:
    if job.is_last:
        compute(HANG_S)


@hangs(7, "", "holds_the_GIL")
def holds_the_GIL(job: Job) -> None:  # noqa: N802
    """In a deadlock of its own: a mutex that it has locked, which no signal interrupts."""
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2 if job.is_last else 0):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


@hangs(
    4,
    "ranks 4, 5, 6 and 7 are the cause: they do not answer",
    *("another host", "waits in all_reduce #1"),
)
def host_gone(job: Job) -> None:
    """The second half of the ranks is on host b, which freezes."""
    if job.rank >= job.world_size // 2:
        os.kill(os.getpid(), signal.SIGSTOP)


@hangs(2)
def late(job: Job) -> None:
    """The last rank comes after the first line about a wait."""
    if job.is_last:
        time.sleep(14)


@hangs(2)
def evaluates(job: Job) -> None:
    if job.is_last:
        evaluate()


@hangs(1, "", "evaluate", "Rank 0 waits for it in recv with tag 5", settle_s=6.0)
def old_receive(job: Job) -> None:
    """Rank 0 waits for a message that it has asked for more calls ago than are recorded."""
    work: Any = dist.irecv(torch.ones(4), 1, tag=5) if job.rank == 0 else None
    for _ in range(1100):
        dist.barrier()
    if job.rank == 0:
        work.wait()
    evaluate()


@hangs(2, "", "is stopped")
def many_calls(job: Job) -> None:
    """The test stops a rank inside one."""
    while True:
        job.call()
