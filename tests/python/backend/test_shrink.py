"""ringcomm.shrink(): the ranks that are left, in a group that works; health().

Each letter of `env` is the host of a rank, and two hosts are two identities on this machine. The
agreement with a death at every step: tests/cpp/test_survivors.cc, tests/cpp/checker. Training that
goes on: tests/python/programs/test_examples.py.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import slow
from failures import caught, end_process
from machines import (
    CLONE_NEWNS,
    comes_true,
    enter_namespaces,
    limit_of_descriptors,
    limited,
    make_mounts_private,
    mount,
)
from ranks import in_ranks

import ringcomm
from ringcomm import survivors
from ringcomm.torch_names import backend_of, timeout_of

SOON_S = 20.0  # shrink takes milliseconds, and the group's time-out is 30 s
PATIENCE_S = 3.0  # for a rank that lives and does not answer; the others must be faster
in_new_ranks = partial(in_ranks, fresh=True)


def fail(group: Any = None) -> dict[str, Any]:
    """Calls collectives until the group has failed; the error."""
    for _ in range(100_000):
        if "type" in (error := caught(dist.all_reduce, torch.ones(4), dist.ReduceOp.SUM, group)):
            return error
    raise AssertionError("the group does not fail")


def shrink_to(
    rank: int, left: list[int], least_s: float = 0.0, most_s: float = SOON_S, **options: Any
) -> Any:
    """Shrinks the default group, of which these ranks must be left, and uses what it gets."""
    begin, cpu, world = time.monotonic(), torch.device("cpu"), dist.group.WORLD
    assert world is not None
    own_timeout = timeout_of(backend_of(world, cpu))
    new = ringcomm.shrink(**options)
    assert timeout_of(backend_of(new, cpu)) == own_timeout  # not that of shrink()
    assert least_s <= time.monotonic() - begin < most_s
    ranks = [torch.zeros(1) for _ in range(new.size())]
    dist.all_gather(ranks, torch.tensor([float(rank)]), group=new)
    assert [int(old) for old in ranks] == left
    assert (dist.get_rank(new), dist.get_world_size(new)) == (left.index(rank), len(left))
    assert new is dist.group.WORLD
    return new


def num_calls() -> int:
    return sum(counts["num_calls"] for counts in ringcomm.stats().values())


@in_new_ranks(may_die="victims")
@pytest.mark.parametrize(
    ("world_size", "victims", "at_once"),
    [
        *((4, [victim], True) for victim in (0, 2, 3)),
        *((3, [0, 1], True), (8, [0, 5], True), (5, [3, 0, 2], False)),
    ],
)
def test_a_death(rank: int, world_size: int, victims: list[int], at_once: bool) -> None:
    """Of several ranks at once, or of one after another."""
    dist.barrier()
    left = list(range(world_size))
    for dead in [victims] if at_once else [[victim] for victim in victims]:
        if rank in dead:
            end_process("kill")
        left = [each for each in left if each not in dead]
        fail()
        before = num_calls()
        new = shrink_to(rank, left, timeout=timedelta(seconds=SOON_S))
        assert num_calls() > before > 0
    # What programs do next.
    sub = dist.new_group([0])
    if dist.get_rank() == 0:
        dist.barrier(sub)
    names: list[Any] = [None] * len(left)
    dist.all_gather_object(names, new.group_name)
    assert len(set(names)) == 1
    assert dist.get_process_group_ranks(new) == list(range(len(left)))
    dist.barrier()


@in_new_ranks(3)
@pytest.mark.parametrize("what", ["mismatch", "exception", "abort", "destroy"])
def test_no_rank_dies(rank: int, what: str) -> None:
    """One rank gives up, calls something else, or destroys the group, and is then left out."""
    pending: Any = None
    dist.barrier()
    if what == "exception" and rank != 1:
        pending = dist.all_reduce(torch.ones(3), async_op=True)
    if what == "destroy" and rank == 1:
        dist.destroy_process_group()
        return
    if what == "abort" and rank == 1:
        backend_of(ringcomm.backend.resolve_group(), torch.device("cpu")).abort()
    if what == "mismatch" and rank == 1:
        assert caught(dist.all_reduce, torch.ones(5))["type"] == "MismatchError"
    elif what != "exception" or rank != 1:  # whose exception is its own, between two calls
        kinds = {"mismatch": "MismatchError", "destroy": "PeerDiedError"}
        assert fail()["type"] == kinds.get(what, "RingcommError")
    shrink_to(rank, [0, 2] if what == "destroy" else [0, 1, 2])
    if pending is not None:
        assert caught(pending.wait)["type"] == "RingcommError"


@in_new_ranks(3, may_die=[2])
def test_a_survivor_that_is_out_of_descriptors_says_so(rank: int) -> None:
    if rank == 2:
        end_process("kill")
    fail()
    most = limit_of_descriptors(0 if rank == 0 else 100)
    with limited(resource.RLIMIT_NOFILE, most):
        error = caught(ringcomm.shrink)
    reason = "ulimit -n" if rank == 0 else "rank 0 did not make the new store"
    for words in ("shrink failed 8 times", "the last attempt failed on this rank: ", reason):
        assert words in error["text"], error


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount over /proc")
@in_new_ranks(3, may_die=[2])
@pytest.mark.parametrize("lacking", [0, 1])
def test_a_survivor_without_proc_says_so(rank: int, lacking: int) -> None:
    """At once: torch's FileStore waits for minutes for a path that is not there."""
    if rank == 2:
        end_process("kill")
    fail()
    if rank == lacking:
        enter_namespaces(CLONE_NEWNS)
        make_mounts_private()
        mount("tmpfs", "/proc")
    began = time.monotonic()
    error = caught(ringcomm.shrink)
    assert time.monotonic() - began < SOON_S
    assert "shrink failed 8 times" in error["text"], error
    if rank == lacking:
        assert "on this rank: [Errno 2] ringcomm needs /proc here" in error["text"], error


@in_new_ranks(3)
@pytest.mark.parametrize("phase", ["wait", "make"])
def test_an_interrupted_rank_may_call_again(rank: int, phase: str) -> None:
    """Ctrl-C in shrink() on rank 1, which then calls it again: a further attempt has all ranks."""
    interrupt: Any = None  # keeps what was interrupted referenced
    if rank == 1:
        module = sys.modules["ringcomm.survivors"]
        sleeps = mock.patch.object(module, "_make", side_effect=lambda *_: time.sleep(10))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with (
            pytest.raises(KeyboardInterrupt) as interrupt,
            sleeps if phase == "make" else contextlib.nullcontext(),
        ):
            ringcomm.shrink()
    else:
        time.sleep(2 if rank == 2 and phase == "wait" else 0)
        fail()
    new = shrink_to(rank, [0, 1, 2], most_s=2 + SOON_S)
    assert new.group_name.endswith(".2")  # of the second attempt
    del interrupt


@in_new_ranks(3, group_timeout_s=1.0)
def test_a_stopped_rank_is_left_out(rank: int, tmp_path: Path) -> None:
    """The others go on without it, and it is told so when it comes."""
    seen = dist.FileStore(str(tmp_path / "seen"), -1)
    if rank == 1:
        seen.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        # It may still complete the call that the others were in.
        assert fail()["type"] == "CollectiveTimeoutError"
        for _ in range(2):
            error = caught(ringcomm.shrink)
            assert error["type"] == "RingcommError"
            assert "did not call shrink in time" in error["text"], error
            assert "ranks 0, 2" in error["text"], error
        return
    pid = int(seen.get("pid"))
    try:
        assert fail()["type"] == "CollectiveTimeoutError"
        assert ringcomm.health().ranks == ("alive", "stopped", "alive")
        # One rank waits longer for the late one than the other: it follows the other's choice.
        limit = timedelta(seconds=PATIENCE_S)
        shrink_to(rank, [0, 2], 1, PATIENCE_S + SOON_S, timeout=limit)
        dist.barrier()
    finally:
        if rank == 2:
            os.kill(pid, signal.SIGCONT)
    dist.barrier()


@pytest.mark.slow
@in_new_ranks(3)
def test_the_first_choice_ends_all_waits(rank: int, tmp_path: Path) -> None:
    """The least patience counts."""
    seen = dist.FileStore(str(tmp_path / "seen"), -1)
    if rank == 1:
        seen.wait(["done 0", "done 2"], timedelta(seconds=40))
        return
    limit = timedelta(seconds=PATIENCE_S if rank == 0 else 60)
    shrink_to(rank, [0, 2], most_s=PATIENCE_S + SOON_S, timeout=limit)
    dist.barrier()
    seen.set(f"done {rank}", "")


@in_new_ranks(4, may_die=[0])
def test_other_groups(rank: int) -> None:
    """World of 4, of which rank 0 dies; {0, 1}, {1, 3} and {1, 2, 3} existed before."""
    first, pair, three = (dist.new_group(ranks) for ranks in ([0, 1], [1, 3], [1, 2, 3]))
    dist.barrier()
    if rank == 0:
        end_process("kill")
    fail()
    shrink_to(rank, [1, 2, 3])
    if rank == 1:
        error = caught(dist.all_reduce, torch.ones(2), dist.ReduceOp.SUM, first)
        assert error["type"] == "PeerDiedError"
        alone = ringcomm.shrink(first)
        assert (alone.size(), dist.get_process_group_ranks(alone)) == (1, [0])
        dist.all_reduce(torch.ones(2), group=alone)
    if rank in (1, 3):
        # By global rank, in the new numbering: 3 is 2 now.
        tensor = torch.full((2,), float(rank))
        dist.broadcast(tensor, 2, pair)
        assert tensor.tolist() == [3, 3]
        assert dist.get_process_group_ranks(pair) == [0, 2]
    total = torch.ones(2)
    dist.all_reduce(total, group=three)
    assert total.tolist() == [3, 3]
    dist.destroy_process_group(three)


@in_new_ranks(4)
def test_a_subgroup(rank: int) -> None:
    group = dist.new_group([1, 2, 3])
    dist.barrier()
    if rank > 0:
        if rank == 2:
            caught(dist.all_reduce, torch.ones(5), dist.ReduceOp.SUM, group)
        else:
            fail(group)
        new = ringcomm.shrink(group)
        assert dist.get_process_group_ranks(new) == [1, 2, 3]
        tensor = torch.tensor([float(rank)])
        dist.broadcast(tensor, 3, new)  # global ranks are as before
        assert tensor.item() == 3
        assert caught(dist.all_reduce, tensor, dist.ReduceOp.SUM, group)["type"] == "ValueError"
    total = torch.ones(1)
    dist.all_reduce(total)
    assert (total.item(), dist.get_world_size()) == (4, 4)


@in_new_ranks(4, may_die=[0, 2])
@pytest.mark.parametrize("delay_ms", [slow(0.05), 0.5, slow(1), slow(1.5), 2, slow(3), 5, slow(10)])
def test_a_death_in_shrink(rank: int, delay_ms: float) -> None:
    """Rank 0 dies at once, and rank 2 somewhere in shrink()."""
    if rank == 0:
        end_process("kill")
    fail()
    if rank == 2:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, wherever it is
        signal.setitimer(signal.ITIMER_REAL, delay_ms / 1000)
        ringcomm.shrink()
        time.sleep(10)
    assert shrink_until(rank, 2) == [1, 3]
    dist.barrier()


def shrink_until(rank: int, num_left: int) -> list[int]:
    """As a program does it, for a rank may die after it has joined the new group; who is left."""
    ringcomm.shrink()
    while True:
        try:
            ranks = [torch.zeros(1) for _ in range(dist.get_world_size())]
            dist.all_gather(ranks, torch.tensor([float(rank)]))
            if len(ranks) == num_left:
                return [int(old) for old in ranks]
        except ringcomm.RingcommError:
            ringcomm.shrink()


@in_new_ranks(2)
def test_a_group_of_one_rank_is_refused(rank: int) -> None:
    one = dist.new_group([rank], use_local_synchronization=True)
    assert caught(ringcomm.shrink, one)["type"] == "ValueError"
    assert ringcomm.health().ranks == ("alive", "alive")


@in_new_ranks(envs=("----", "aabb"), may_die=[3])
def test_a_group_that_does_not_share_memory_is_refused(rank: int, env: str, tmp_path: Path) -> None:
    """On each rank alone, before a failure and after it; nothing is changed."""
    seen = dist.FileStore(str(tmp_path / "seen"), -1)
    world = dist.group.WORLD
    pair = dist.new_group([0, 1])

    def refuse() -> None:
        before = ringcomm.health().failure
        error = caught(ringcomm.shrink)
        assert error["type"] == "NotImplementedError"
        for words in ("ranks all share memory", "messages over gloo", "torchrun --max-restarts"):
            assert words in error["text"], error
        assert (ringcomm.health().failure, dist.group.WORLD) == (before, world)

    for caller in range(4):
        if rank == caller:
            refuse()  # the others are in the barrier
        dist.barrier()
    assert ringcomm.health() == survivors.Health(("alive",) * 4, None)
    if rank == 3:
        end_process("kill")
    error = fail()
    assert (error["type"], error["rank"]) == ("PeerDiedError", 3)
    refuse()
    if rank < 2:  # with two hosts these two share memory
        dist.barrier(pair if env == "----" else ringcomm.shrink(pair))
    seen.set(f"done {rank}", "")
    seen.wait(["done 0", "done 1", "done 2"], timedelta(seconds=40))


# ---- health, and a death that is known to a rank that computes


def wait_for_death(victim: int) -> None:
    assert comes_true(lambda: ringcomm.health().ranks[victim] == "dead", 20)


@in_new_ranks(3, may_die=[1])
def test_health(rank: int) -> None:
    dist.all_reduce(torch.ones(4))
    assert ringcomm.health() == survivors.Health(("alive",) * 3, None)
    if rank == 1:
        end_process("kill")
    wait_for_death(1)
    # The other rank sees the death, or that this one has.
    error = caught(dist.all_reduce, torch.ones(4))
    assert (error["type"], error["rank"]) == ("PeerDiedError", 1)
    assert "rank 1" in str(ringcomm.health().failure)


@in_new_ranks(3, may_die=[0])
def test_a_rank_that_ends_after_its_last_call(rank: int) -> None:
    """Rank 0 gives its part of a call, and ends before the others begin the call."""
    tensor = torch.full((4,), float(rank))
    dist.barrier()
    if rank == 0:
        dist.all_reduce(torch.ones(4), async_op=True)  # begun, and published by the queue's thread
        time.sleep(0.5)
        end_process("kill")
    wait_for_death(0)
    dist.all_reduce(tensor)
    assert tensor[0].item() == 4
