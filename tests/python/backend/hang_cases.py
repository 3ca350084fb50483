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


# ---- the cases, as ranks run them; a rank that comes back calls all_reduce


def stopped(job: Job) -> None:
    if job.is_last:
        os.kill(os.getpid(), signal.SIGSTOP)


def skips_a_call(job: Job) -> None:
    job.call(job.groups[1] if job.rank == 5 else None)


def other_code(job: Job) -> None:
    if job.rank == 5:
        evaluate()


def other_call(job: Job) -> None:
    """On the same group: an error, which does not end the ranks."""
    with contextlib.suppress(RingcommError):
        dist.barrier() if job.rank == 5 else job.call()
    wait_for_a_thread()


def one_other_order(job: Job) -> None:
    one, two = job.groups
    for group in (two, one) if job.rank == 5 else (one, two):
        job.call(group)


def two_orders(job: Job) -> None:
    one, two = job.groups
    for group in (two, one) if job.rank >= job.world_size // 2 else (one, two):
        job.call(group)


def dies(job: Job) -> None:
    if job.rank == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    job.linger()


def dies_unseen(job: Job) -> None:
    if job.rank == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_a_thread()


def circle(job: Job) -> None:
    """Rank i is in groups i, with rank i + 1, and i - 1, and calls its own first."""
    pairs = [dist.new_group([each, (each + 1) % job.world_size]) for each in range(job.world_size)]
    for group in (job.rank, job.rank - 1):
        job.call(pairs[group])


def loader(job: Job) -> None:

    class Slow(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            time.sleep(HANG_S)
            return index

    if job.is_last:
        next(
            iter(torch.utils.data.DataLoader(Slow(), num_workers=1, worker_init_fn=die_with_parent))
        )


def send_without_recv(job: Job) -> None:
    if job.rank == 0:
        dist.send(torch.ones(1 << 24), 1, tag=7)


def recv_without_send(job: Job) -> None:
    if job.rank == 0:
        dist.recv(job.tensor, 1, tag=7)


def leaves(job: Job) -> None:
    if job.is_last:
        dist.destroy_process_group()
        wait_for_a_thread()
    job.linger()


def exits(job: Job) -> None:
    if job.is_last:
        time.sleep(0.3)
        os._exit(0)
    job.linger()


def uneven_batches(job: Job) -> None:
    for _ in range(4 if job.is_last else 5):
        job.call()
    if job.is_last:
        evaluate()


def uneven_then_barrier(job: Job) -> None:
    for _ in range(4 if job.is_last else 5):
        job.call()
    dist.barrier(job.groups[0])


def slow(job: Job, step_s: float = 0.1) -> None:
    begin = time.monotonic()
    while time.monotonic() < begin + HANG_S:
        if job.is_last:
            compute(step_s)
        job.call()


def slow_steps(job: Job) -> None:
    """The doctor's sample is shorter than a step."""
    slow(job, 1.5)


def compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def computes(job: Job) -> None:
    if job.is_last:
        compute(HANG_S)


def holds_the_gil(job: Job) -> None:
    """In a deadlock of its own: a mutex that it has locked, which no signal interrupts."""
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2 if job.is_last else 0):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def host_gone(job: Job) -> None:
    """The second half of the ranks is on host b, which freezes."""
    if job.rank >= job.world_size // 2:
        os.kill(os.getpid(), signal.SIGSTOP)


def many_calls(job: Job) -> None:
    """The test stops a rank inside one."""
    while True:
        job.call()


def late(job: Job) -> None:
    """The last rank comes after the first line about a wait."""
    if job.is_last:
        time.sleep(14)


def evaluates(job: Job) -> None:
    """The last rank never comes back."""
    if job.is_last:
        evaluate()


def old_receive(job: Job) -> None:
    """Rank 0 waits for a message that it has asked for more calls ago than are recorded."""
    work: Any = dist.irecv(torch.ones(4), 1, tag=5) if job.rank == 0 else None
    for _ in range(1100):
        dist.barrier()
    if job.rank == 0:
        work.wait()
    evaluate()


@dataclass(frozen=True)
class Case:
    """A job that hangs, and its verdict: the rank that is the cause, and words of the reason."""

    body: Callable[[Job], None]
    cause: int | None
    words: tuple[str, ...]
    about: str = ""  # in the table of docs/how-to/hang.md; others are not in it
    settle_s: float = 1.0  # until all ranks have come to where they wait

    def is_right(self, report: dict[str, Any]) -> bool:
        """Whether a report has this verdict."""
        has_words = all(words in report["verdict"] for words in self.words)
        return report["cause"] == self.cause and has_words


def _of(rank: int, *words: str) -> tuple[str, ...]:
    return (f"rank {rank} is the cause", *words)


FAILED = "is the cause: group 0 has failed"
CASES = {
    "stopped": Case(stopped, 7, _of(7, "is stopped", "kill -CONT"), "a stopped rank"),
    "skips": Case(
        skips_a_call,
        5,
        _of(5, "it is in all_reduce #0 of group 2", "while ranks 0, 1", "has left out a call"),
        "a rank that leaves out a call",
    ),
    "other code": Case(other_code, 5, _of(5, "is in no call", "evaluate", "all_reduce #0 ended")),
    "other call": Case(other_call, 5, (FAILED, "barrier #1", "all_reduce #1")),
    "other order": Case(
        one_other_order,
        5,
        _of(5, "it is in all_reduce #0 of group 2", "another order"),
        "a rank that calls two groups in another order",
    ),
    "two orders": Case(two_orders, None, ("ranks wait for each other", "one order on all ranks")),
    "dies": Case(
        dies,
        5,
        (FAILED, "all_reduce #1", "rank 5 (pid ", "died"),
        "a rank that died, while the others caught the error",
    ),
    "dies unseen": Case(dies_unseen, 5, _of(5, "its process ", "has ended", "wait_for_a_thread")),
    "circle": Case(
        circle,
        None,
        ("ranks wait for each other", "rank 3 waits for 4 in", "rank 7 waits for 0 in"),
        "groups that wait for each other",
    ),
    "loader": Case(loader, 7, _of(7, "in the data loader"), "a rank in its data loader"),
    "send": Case(
        send_without_recv,
        0,
        _of(0, "it is in send with tag 7", "for which rank 1 has no recv"),
        "a send without a receive",
    ),
    "recv": Case(recv_without_send, 0, _of(0, "it is in recv with tag 7", "rank 1 has no send")),
    "leaves": Case(
        leaves,
        7,
        (FAILED, "has destroyed the group", "all_reduce #1"),
        "a rank that left the group",
    ),
    "exits": Case(exits, 7, (FAILED, "has exited", "all_reduce #1")),
    "uneven": Case(
        uneven_batches,
        7,
        _of(7, "evaluate", "all_reduce #4 ended", "waits for it in all_reduce #5"),
        "a rank with one batch less",
    ),
    "uneven, barrier": Case(
        uneven_then_barrier, 7, _of(7, "it is in barrier #0", "all_reduce #5 of group 0")
    ),
    "slow": Case(
        slow,
        7,
        ("no hang: every rank makes calls; rank 7 is slow",),
        "a slow rank: no hang",
        settle_s=2.0,
    ),
    "slow steps": Case(slow_steps, 7, ("no hang", "rank 7 is slow"), settle_s=9.0),
    "computes": Case(computes, 7, _of(7, "it computes", " compute")),
    "holds the GIL": Case(
        holds_the_gil, 7, _of(7, "holds_the_gil"), "a rank in an extension that holds the GIL"
    ),
    "host gone": Case(
        host_gone,
        4,
        (
            "ranks 4, 5, 6 and 7 are the cause: they do not answer",
            "another host",
            "waits in all_reduce #1",
        ),
        "a host that is gone",
    ),
    "late": Case(late, 2, ()),
    "evaluates": Case(evaluates, 2, ()),
    "old receive": Case(
        old_receive, 1, _of(1, "evaluate", "Rank 0 waits for it in recv with tag 5"), settle_s=6.0
    ),
    "many calls": Case(many_calls, 2, _of(2, "is stopped")),
}
