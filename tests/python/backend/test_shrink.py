"""ringcomm.shrink() and ringcomm.health(): the ranks that are left, in a group that works.

The agreement with a death at every step: tests/cpp/test_survivors.cc, tests/cpp/checker. Training
that goes on: tests/python/programs/test_examples.py.
"""

from __future__ import annotations

import datetime
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import quick
from ranks import run_ranks
from test_errors import ENVS, caught

import ringcomm
from ringcomm.torch_names import backend_of

SOON_S = 20.0  # shrink takes milliseconds, and the group's time-out is 30 s
PATIENCE_S = 3.0  # for a rank that lives and does not answer; the others must be faster


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(group: Any = None) -> dict[str, Any]:
    """Calls collectives until the group has failed; the error."""
    for _ in range(100_000):
        if "type" in (error := caught(dist.all_reduce, torch.ones(4), dist.ReduceOp.SUM, group)):
            return error
    raise AssertionError("the group does not fail")


def shrunk(rank: int, group: Any = None, **options: Any) -> dict[str, Any]:
    """Shrinks a group and uses what it gets."""
    begin = time.monotonic()
    new = ringcomm.shrink(group, **options)
    seconds = time.monotonic() - begin
    ranks = [torch.zeros(1) for _ in range(new.size())]
    dist.all_gather(ranks, torch.tensor([float(rank)]), group=new)
    return {
        "ranks": [int(old) for old in ranks],
        "rank": dist.get_rank(new),
        "size": dist.get_world_size(new),
        "is_default": new is dist.group.WORLD,
        "seconds": seconds,
        "name": new.group_name,
    }


def num_calls() -> int:
    return sum(counts["num_calls"] for counts in ringcomm.stats().values())


def lose(rank: int, victims: list[int]) -> dict[str, Any]:
    dist.barrier()
    if rank in victims:
        die()
    fail()
    before = num_calls()
    result = shrunk(rank)
    assert num_calls() > before > 0
    # What programs do next.
    sub = dist.new_group([0])
    if result["rank"] == 0:
        dist.barrier(sub)
    names: list[Any] = [None] * result["size"]
    dist.all_gather_object(names, result["name"])
    assert len(set(names)) == 1
    assert dist.get_process_group_ranks(dist.group.WORLD) == list(range(result["size"]))
    dist.barrier()
    return result


@pytest.mark.parametrize(
    ("world_size", "victims"), [(4, [0]), (4, [2]), (3, [0, 1]), (4, [3]), (8, [0, 5])]
)
def test_a_death(world_size: int, victims: list[int]) -> None:
    results = run_ranks(world_size, lose, victims, fresh=True, may_die=victims)
    left = [rank for rank in range(world_size) if rank not in victims]
    for idx, rank in enumerate(left):
        result = results[rank]
        assert (result["ranks"], result["rank"], result["size"]) == (left, idx, len(left))
        assert result["is_default"]
        assert result["seconds"] < SOON_S


def lose_one_by_one(rank: int) -> list[list[int]]:
    seen = []
    for victim in (3, 0, 2):
        if rank == victim:
            die()
        fail()
        seen.append(shrunk(rank)["ranks"])
    return seen


def test_one_death_after_another() -> None:
    results = run_ranks(5, lose_one_by_one, fresh=True, may_die=[3, 0, 2])
    for rank in (1, 4):
        assert results[rank] == [[0, 1, 2, 4], [1, 2, 4], [1, 4]]


def raise_in_one(rank: int, what: str) -> dict[str, Any]:
    """Nothing dies: one rank gives up, or calls something else."""
    pending = None
    if rank == 1 and what == "mismatch":
        error = caught(dist.all_reduce, torch.ones(5))
    elif rank == 1 and what == "exception":
        error = {"type": "ValueError"}  # of its own, between two calls
    elif rank == 1 and what == "abort":
        backend_of(ringcomm.backend.resolve_group(), torch.device("cpu")).abort()
        error = fail()
    else:
        if what == "exception":
            pending = dist.all_reduce(torch.ones(3), async_op=True)
        error = fail()
    result = shrunk(rank)
    if pending is not None:
        assert caught(pending.wait)["type"] == "RingcommError"
    return {**result, "error": error}


@pytest.mark.parametrize("what", ["mismatch", "exception", "abort"])
def test_no_rank_is_lost(what: str) -> None:
    for rank, result in enumerate(run_ranks(3, raise_in_one, what, fresh=True)):
        assert (result["ranks"], result["rank"]) == ([0, 1, 2], rank)
        kind = {"mismatch": "MismatchError"}.get(what, "RingcommError")
        assert result["error"]["type"] == (
            "ValueError" if what == "exception" and rank == 1 else kind
        )


def shrink_without_descriptors(rank: int) -> dict[str, Any]:
    if rank == 2:
        die()
    fail()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == 0:
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    error = caught(ringcomm.shrink)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return error


def test_a_survivor_that_is_out_of_descriptors_says_so() -> None:
    errors = run_ranks(3, shrink_without_descriptors, fresh=True, may_die=[2])[:2]
    for error, words in zip(
        errors, ("ulimit -n", "rank 0 did not make the new store"), strict=True
    ):
        assert "shrink failed 8 times" in error["text"], errors
        assert "the last attempt failed on this rank: " in error["text"], errors
        assert words in error["text"], errors


def leave(rank: int) -> dict[str, Any]:
    if rank == 1:
        dist.barrier()
        dist.destroy_process_group()
        return {}
    dist.barrier()
    fail()
    return shrunk(rank)


def test_a_rank_that_has_destroyed_the_group_is_left_out() -> None:
    results = run_ranks(3, leave, fresh=True)
    assert results[0]["ranks"] == results[2]["ranks"] == [0, 2]


def sleep(*_: Any) -> None:
    time.sleep(10)


def interrupt_one(rank: int, phase: str) -> dict[str, Any]:
    """Ctrl-C in shrink() on rank 1, which then calls it again: a further attempt has all ranks."""
    if rank == 1:
        module = sys.modules["ringcomm.survivors.shrink"]  # its name is also the function's
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        try:
            if phase == "wait":
                ringcomm.shrink()
            else:
                with mock.patch.object(module, "_make", side_effect=sleep):
                    ringcomm.shrink()
        except KeyboardInterrupt:
            return shrunk(rank)  # while what was interrupted is still referenced
        raise AssertionError("no KeyboardInterrupt")
    if rank == 2 and phase == "wait":
        time.sleep(2)
    fail()
    return shrunk(rank)


@pytest.mark.parametrize("phase", ["wait", "make"])
def test_an_interrupted_rank_may_call_again(phase: str) -> None:
    for result in run_ranks(3, interrupt_one, phase, fresh=True):
        assert result["ranks"] == [0, 1, 2]
        assert result["name"].endswith(".2")  # of the second attempt
        assert result["seconds"] < 2 + SOON_S


def stop_one(rank: int, path: str) -> dict[str, Any]:
    seen = dist.FileStore(path, -1)
    if rank == 1:
        seen.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        # Again: the others have gone on. It may still complete the call that they were in.
        late = fail()
        return {"late": late, "shrink": caught(ringcomm.shrink), "again": caught(ringcomm.shrink)}
    pid = int(seen.get("pid"))
    try:
        error = fail()
        states = ringcomm.health().ranks
        result = shrunk(rank, timeout=datetime.timedelta(seconds=PATIENCE_S))
        dist.barrier()
    finally:
        if rank == 0:
            os.kill(pid, signal.SIGCONT)
    # One rank waits longer for the late one than the other: it follows the other's choice.
    return {**result, "error": error, "states": states}


def test_a_stopped_rank_is_left_out(tmp_path: Path) -> None:
    results = run_ranks(3, stop_one, str(tmp_path / "seen"), fresh=True, group_timeout_s=1.0)
    for rank in (0, 2):
        assert results[rank]["error"]["type"] == "CollectiveTimeoutError"
        assert results[rank]["states"] == ("alive", "stopped", "alive")
        assert results[rank]["ranks"] == [0, 2]
        assert 1 < results[rank]["seconds"] < PATIENCE_S + SOON_S
    late = results[1]
    assert late["late"]["type"] == "CollectiveTimeoutError"
    for error in (late["shrink"], late["again"]):
        assert error["type"] == "RingcommError"
        assert "did not call shrink in time" in error["text"]
        assert "ranks 0, 2" in error["text"]


def shrink_with_unequal_patience(rank: int, path: str) -> float:
    seen = dist.FileStore(path, -1)
    if rank == 1:
        for key in ("done 0", "done 2"):
            seen.wait([key], datetime.timedelta(seconds=40))
        return 0.0
    limit = datetime.timedelta(seconds=PATIENCE_S if rank == 0 else 60)
    begin = time.monotonic()
    assert ringcomm.shrink(timeout=limit).size() == 2
    seconds = time.monotonic() - begin
    dist.barrier()
    seen.set(f"done {rank}", "")
    return seconds


def test_the_first_choice_ends_all_waits(tmp_path: Path) -> None:
    results = run_ranks(3, shrink_with_unequal_patience, str(tmp_path / "seen"), fresh=True)
    assert max(results) < PATIENCE_S + SOON_S


def groups_after_a_death(rank: int) -> dict[str, Any]:
    """World of 4, of which rank 0 dies; {0, 1}, {1, 3} and {2, 3, 1} existed before."""
    ours = {
        name: dist.new_group(ranks)
        for name, ranks in {"01": [0, 1], "13": [1, 3], "123": [1, 2, 3]}.items()
    }
    dist.barrier()
    if rank == 0:
        die()
    fail()
    new = shrunk(rank)
    assert new["ranks"] == [1, 2, 3]
    result: dict[str, Any] = {"new": new}
    if rank == 1:
        result["01"] = caught(dist.all_reduce, torch.ones(2), dist.ReduceOp.SUM, ours["01"])
        alone = ringcomm.shrink(ours["01"])
        assert (alone.size(), dist.get_process_group_ranks(alone)) == (1, [0])
        dist.all_reduce(torch.ones(2), group=alone)
    if rank in (1, 3):
        # By global rank, in the new numbering: 3 is 2 now.
        tensor = torch.full((2,), float(rank))
        dist.broadcast(tensor, 2, ours["13"])
        result["13"] = tensor.tolist()
        assert dist.get_process_group_ranks(ours["13"]) == [0, 2]
    total = torch.ones(2)
    dist.all_reduce(total, group=ours["123"])
    result["123"] = total.tolist()
    dist.destroy_process_group(ours["123"])
    return result


def test_other_groups() -> None:
    results = run_ranks(4, groups_after_a_death, fresh=True, may_die=[0])
    assert results[1]["01"]["type"] == "PeerDiedError"
    for rank in (1, 2, 3):
        assert results[rank]["123"] == [3.0, 3.0]
    for rank in (1, 3):
        assert results[rank]["13"] == [3.0, 3.0]


def shrink_a_subgroup(rank: int) -> dict[str, Any]:
    group = dist.new_group([1, 2, 3])
    dist.barrier()
    if rank == 0:
        return {}
    if rank == 2:
        error = caught(dist.all_reduce, torch.ones(5), dist.ReduceOp.SUM, group)
    else:
        error = fail(group)
    new = ringcomm.shrink(group)
    ranks = dist.get_process_group_ranks(new)
    tensor = torch.tensor([float(rank)])
    dist.broadcast(tensor, 3, new)  # global ranks are as before
    assert caught(dist.all_reduce, tensor, dist.ReduceOp.SUM, group)["type"] == "ValueError"
    return {"error": error, "ranks": ranks, "value": tensor.item(), "world": dist.get_world_size()}


def and_the_world_works(rank: int) -> dict[str, Any]:
    result = shrink_a_subgroup(rank)
    total = torch.ones(1)
    dist.all_reduce(total)
    return {**result, "total": total.item()}


def test_a_subgroup() -> None:
    results = run_ranks(4, and_the_world_works, fresh=True)
    assert [result["total"] for result in results] == [4.0] * 4
    for result in results[1:]:
        assert (result["ranks"], result["value"], result["world"]) == ([1, 2, 3], 3.0, 4)


def die_in_shrink(rank: int, delay_s: float) -> list[int]:
    """Rank 0 dies at once, and rank 2 somewhere in shrink()."""
    if rank == 0:
        die()
    fail()
    if rank == 2:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, wherever it is
        signal.setitimer(signal.ITIMER_REAL, delay_s)
        ringcomm.shrink()
        time.sleep(10)
    new = shrunk_or_again(rank)
    dist.barrier()
    return new


def shrunk_or_again(rank: int) -> list[int]:
    """As a program does it: a rank may die after it has joined the new group."""
    ringcomm.shrink()
    while True:
        try:
            ranks = [torch.zeros(1) for _ in range(dist.get_world_size())]
            while len(ranks) > 2:  # until rank 2 has died
                dist.all_gather(ranks, torch.tensor([float(rank)]))
            dist.all_gather(ranks, torch.tensor([float(rank)]))
            return [int(old) for old in ranks]
        except ringcomm.RingcommError:
            ringcomm.shrink()


@pytest.mark.parametrize("delay_ms", quick((0.05, 0.5, 1, 1.5, 2, 3, 5, 10), 0.5, 2, 5))
def test_a_death_in_shrink(delay_ms: float) -> None:
    results = run_ranks(4, die_in_shrink, delay_ms / 1000, fresh=True, may_die=[0, 2])
    assert results[1] == results[3] == [1, 3]


def refusals(rank: int) -> dict[str, dict[str, Any]]:
    one = dist.new_group([rank], use_local_synchronization=True)
    return {
        "one": caught(ringcomm.shrink, one),
        "health": {"ranks": ringcomm.health().ranks},
    }


def test_refusals() -> None:
    for found in run_ranks(2, refusals, fresh=True, env=ENVS["messages"]):
        assert found["one"]["type"] == "ValueError"
        assert found["health"]["ranks"] == ("alive", "alive")


# ---- health, and a death that is known to a rank that computes


def compute_while_one_dies(rank: int) -> dict[str, Any]:
    dist.all_reduce(torch.ones(4))
    assert ringcomm.health() == ringcomm.Health(("alive",) * 3, None)
    if rank == 1:
        die()
    deadline = time.monotonic() + 20
    while ringcomm.health().ranks[1] != "dead":  # computes
        assert time.monotonic() < deadline
        time.sleep(0.001)
    before = ringcomm.health()
    begin = time.monotonic()
    error = caught(dist.all_reduce, torch.ones(4))
    after = ringcomm.health()
    # The other rank sees the death, or that this one has.
    return {
        "error": error,
        "seconds": time.monotonic() - begin,
        "failure": after.failure,
        "before": before.failure,
    }


def test_health() -> None:
    for result in run_ranks(3, compute_while_one_dies, fresh=True, may_die=[1])[::2]:
        assert result["error"]["type"] == "PeerDiedError"
        assert result["error"]["rank"] == 1
        assert result["failure"] is not None
        assert "rank 1" in result["failure"]


def end_after_the_last_call(rank: int) -> float:
    """Rank 0 gives its part of a broadcast, and ends before the others begin the call."""
    tensor = torch.full((4,), float(rank))
    dist.barrier()
    if rank == 0:
        dist.all_reduce(torch.ones(4), async_op=True)  # begun, and published by the queue's thread
        time.sleep(0.5)
        die()
    deadline = time.monotonic() + 20
    while ringcomm.health().ranks[0] != "dead":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    dist.all_reduce(tensor)
    return tensor[0].item()


def test_a_rank_that_ends_after_its_last_call() -> None:
    results = run_ranks(3, end_after_the_last_call, fresh=True, may_die=[0])
    assert results[1:] == [4.0, 4.0]


# ---- what tensors hold after a failed collective


def fail_on_tensors(rank: int) -> dict[str, bool]:
    if rank == 1:
        dist.barrier()
        die()
    world = dist.get_world_size()
    inputs = {
        name: torch.arange(12 * world, dtype=torch.float32) + rank
        for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")
    }
    kept = {name: tensor.clone() for name, tensor in inputs.items()}
    dist.barrier()
    for name, tensor in inputs.items():
        options = {"broadcast": (0,), "reduce": (0,)}.get(name, ())
        error = caught(getattr(ringcomm.ops, name), tensor, *options)
        assert error["type"] == "PeerDiedError", error
    return {name: torch.equal(kept[name], inputs[name]) for name in inputs}


def test_inputs_are_unchanged_by_a_failed_call() -> None:
    for result in run_ranks(3, fail_on_tensors, fresh=True, may_die=[1])[::2]:
        assert all(result.values()), result
