"""Ranks that are late, missing or killed, and calls that make no sense, with tensors on GPUs."""

from __future__ import annotations

import datetime
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from failures import caught, timed
from gpu_ranks import (
    CUDA,
    Gpus,
    device,
    in_gpu_ranks,
    kind,
    meet,
    module,
    on_all_gpus,
    on_cuda,
    on_gpus,
    on_one_gpu,
    on_some_gpus,
)
from ranks import RankFailure

import ringcomm

# Of a rank that comes late, of one that never comes, on CUDA's devices and on emulated ones.
LATE_S = {True: 2.0, False: 0.2}
TIMEOUT_S = {True: 4.0, False: 1.0}
# Beyond the time-out: for a machine that is busy.
PATIENCE_S = 60.0
NUM_LATER_CALLS, LATER_CALL_S = 20, 0.1


def ones(num_elems: int = 1000) -> torch.Tensor:
    return torch.ones(num_elems, device=device())


def outcome(call: Callable[[], Any]) -> dict[str, Any]:
    """The error that a call leads to, in it or in what comes after it, as caught() has it."""

    def whole() -> None:
        work = call()
        if work is not None:
            work.wait()
        # Of what small calls have brought the host may learn a moment later.
        for _ in range(NUM_LATER_CALLS):
            module().synchronize()
            time.sleep(LATER_CALL_S)
            dist.all_reduce(ones(2))

    return timed(whole)


def is_gpu_usable() -> bool:
    return (ones() + 1).sum().item() == 2000.0


@in_gpu_ranks(on_some_gpus)
def test_a_late_rank_is_waited_for(rank: int) -> None:
    world_size = dist.get_world_size()
    for num_elems in (1000, 300_007):
        for late in range(world_size):
            tensor = ones(num_elems)
            module().synchronize()
            if rank == late:
                time.sleep(LATE_S[kind() == CUDA])
            dist.all_reduce(tensor)
            assert tensor.tolist() == [world_size] * num_elems


def miss(rank: int, num_elems: int, timeout_s: float) -> dict[str, Any]:
    dist.all_reduce(ones())
    module().synchronize()
    if rank == 1:
        return {"usable": is_gpu_usable()}
    said = outcome(lambda: dist.all_reduce(ones(num_elems), async_op=True))
    return {**said, "usable": is_gpu_usable()}


@on_some_gpus
@pytest.mark.parametrize("num_elems", [100, 300_007])  # packets; a rendezvous
def test_a_rank_that_never_comes_is_named_and_the_gpu_is_usable(gpus: Gpus, num_elems: int) -> None:
    if not gpus.kernels and num_elems > 100:
        pytest.skip("messages have no rendezvous")
    timeout_s = TIMEOUT_S[gpus.is_cuda]
    results = gpus.run(miss, num_elems, timeout_s, group_timeout_s=timeout_s, fresh=True)
    for rank, said in enumerate(results):
        assert said["usable"]
        if rank != 1:
            assert said["type"] == "CollectiveTimeoutError", said
            assert "rank 1" in said["text"]
            assert said["op"] == "all_reduce" or not gpus.kernels  # else of the hosts' comparison
            assert said["seconds"] < timeout_s + PATIENCE_S


def call_after_a_failure(rank: int, later: str) -> dict[str, Any]:
    dist.all_reduce(ones())
    module().synchronize()
    if rank == 1:
        meet()
        return {}
    dist.all_reduce(ones(100), async_op=True)
    module().synchronize()  # the kernel has given up
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(ones(2)),
        "send": lambda: dist.send(ones(2), 1),
        "empty_shared": lambda: ringcomm.empty_shared(2, device=device()),
    }
    said = caught(calls[later])
    meet()
    return said


@on_one_gpu
@pytest.mark.parametrize("later", ["all_reduce", "send", "empty_shared"])
def test_the_call_after_one_that_failed_raises(gpus: Gpus, later: str) -> None:
    """https://github.com/pytorch/pytorch/issues/132696: results that were never written are read.

    The watchdog, which looks every 20 ms, has not told of the failure yet.
    """
    timeout_s = TIMEOUT_S[gpus.is_cuda]
    results = gpus.run(call_after_a_failure, later, group_timeout_s=timeout_s, fresh=True)
    said = results[0]
    assert said["type"] == "CollectiveTimeoutError", said
    assert "rank 1" in said["text"]
    assert said["op"] == "all_reduce"


def miss_after_set_timeout(rank: int, num_elems: int, timeout_s: float) -> dict[str, Any]:
    group: Any = dist.group.WORLD
    dist.all_reduce(ones(num_elems))  # a call that the later one repeats
    module().synchronize()
    meet()
    group.set_timeout(datetime.timedelta(seconds=timeout_s))
    if rank == 1:
        meet()
        return {}
    said = outcome(lambda: dist.all_reduce(ones(num_elems), async_op=True))
    meet()
    return said


@on_all_gpus
@pytest.mark.parametrize("num_elems", [100, 300_007])  # packets; a rendezvous
def test_set_timeout_counts_for_later_calls(gpus: Gpus, num_elems: int) -> None:
    """https://github.com/pytorch/pytorch/issues/187693: a timeout that is set later is ignored."""
    timeout_s = TIMEOUT_S[gpus.is_cuda]
    results = gpus.run(
        miss_after_set_timeout, num_elems, timeout_s, group_timeout_s=4 * PATIENCE_S, fresh=True
    )
    for rank, said in enumerate(results):
        if rank == 1:
            continue
        assert said["type"] == "CollectiveTimeoutError", said
        assert f"{timeout_s * 1000:.0f} ms" in said["text"]
        assert said["seconds"] < timeout_s + PATIENCE_S


def be_killed(rank: int, op: str) -> dict[str, Any]:
    dist.all_reduce(ones())
    module().synchronize()
    meet()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if op == "barrier":  # in which the host waits, and must not take what has given up for done
        said = caught(lambda: dist.barrier(device_ids=[device().index]))
        return {**said, "seconds": 0.0, "usable": is_gpu_usable()}
    said = outcome(lambda: dist.all_reduce(ones(300_007), async_op=True))
    return {**said, "usable": is_gpu_usable()}


@on_some_gpus
@pytest.mark.parametrize("op", ["all_reduce", "barrier"])
def test_a_killed_rank_is_named(gpus: Gpus, op: str) -> None:
    if gpus.is_cuda and "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        pytest.skip("a client that is killed in a kernel ends MPS, and the other ranks with it")
    results = gpus.run(be_killed, op, may_die=[1])
    for rank, said in enumerate(results):
        if rank != 1:
            assert said["type"] == "PeerDiedError", said
            assert said["rank"] == 1
            assert said["seconds"] < PATIENCE_S
            assert said["usable"]


@in_gpu_ranks(on_some_gpus, group_timeout_s=10.0, fresh=True)
@pytest.mark.parametrize("named", [("4000", "4004"), ("all_reduce", "broadcast")], ids=str)
def test_calls_that_differ_are_both_named(rank: int, named: tuple[str, ...]) -> None:
    def call() -> Any:
        if rank == 1 and "broadcast" in named:
            return dist.broadcast(ones(), 0, async_op=True)
        return dist.all_reduce(ones(1000 + (rank == 1)), async_op=True)

    dist.all_reduce(ones())
    said = outcome(call)
    assert said["type"] == "MismatchError", said
    assert all(name in said["text"] for name in named), said
    assert is_gpu_usable()


def exchange_shares(op: str, rank: int, world_size: int) -> Any:
    """Rank 0 sends 1000 elements to rank 1, which expects 1001; all other sizes fit."""
    sent = [ones(1000 if (rank, to) == (0, 1) else 10 + rank + to) for to in range(world_size)]
    expected = [
        ones(1001 if (sender, rank) == (0, 1) else 10 + sender + rank)
        for sender in range(world_size)
    ]
    if op == "all_to_all":
        return dist.all_to_all(expected, sent, async_op=True)
    if op == "gather":
        parts = expected if rank == 1 else None
        return dist.gather(sent[1], parts, dst=1, async_op=True)
    if op == "scatter":
        return dist.scatter(expected[0], sent if rank == 0 else None, src=0, async_op=True)
    if op == "all_gather":
        lengths = [1001 if rank == 1 else 1000, *(10 + r for r in range(1, world_size))]
        own = ones(1000 if rank == 0 else 10 + rank)
        return dist.all_gather([ones(n) for n in lengths], own, async_op=True)
    lengths = [10, 1000 if rank == 0 else 1001, *(10 + r for r in range(2, world_size))]
    own = ones(1001 if rank == 1 else lengths[rank])
    return dist.reduce_scatter(own, [ones(n) for n in lengths], async_op=True)


@in_gpu_ranks(on_some_gpus, group_timeout_s=10.0, fresh=True)
@pytest.mark.parametrize("op", ["all_to_all", "gather", "scatter", "all_gather", "reduce_scatter"])
def test_shares_that_do_not_fit_are_named(rank: int, op: str) -> None:
    dist.all_reduce(ones())
    said = outcome(lambda: exchange_shares(op, rank, dist.get_world_size()))
    assert said["type"] == "MismatchError", said
    # Kernels that reduce or gather compare a digest of all sizes.
    sizes = ("rank 0 has 4000 bytes for rank 1, which", "4004")
    assert all(size in said["text"] for size in sizes) or "uneven) instead" in said["text"], said
    assert is_gpu_usable()


@in_gpu_ranks(on_some_gpus, group_timeout_s=10.0, fresh=True)
def test_a_difference_found_while_later_calls_are_made_is_named(rank: int) -> None:
    dist.all_reduce(ones())
    tensors = [ones(1000 + (rank == 1)), *(ones() for _ in range(300))]
    said = outcome(lambda: dist.all_reduce_coalesced(tensors, async_op=True))
    assert said["type"] == "MismatchError", said
    assert "4000" in said["text"] or "4004" in said["text"], said


def fail_on_1(rank: int) -> None:
    """The others' kernels wait for rank 1, in a group beside the default one."""
    group = dist.new_group()
    dist.all_reduce(ones(300_007), group=group)
    module().synchronize()
    if rank == 1:
        raise ZeroDivisionError("while the others wait")
    dist.all_reduce(ones(300_007), group=group)
    module().synchronize()
    time.sleep(LATER_CALL_S)
    dist.all_reduce(ones(300_007), group=group)
    raise RuntimeError("nothing told this rank")


@on_gpus
def test_a_test_that_fails_on_one_rank_ends_on_all(gpus: Gpus) -> None:
    """By themselves: a process killed in a kernel would take MPS with it, and the tests after it.

    The group's own time-out is too long to be what ends them.
    """
    with pytest.raises(RankFailure) as error:
        gpus.run(fail_on_1, group_timeout_s=60.0, fresh=True)
    said = str(error.value)
    assert all(f"rank {rank}: Traceback" in said for rank in range(gpus.world_size)), said
    assert "did not finish" not in said
    assert "nothing told" not in said


@in_gpu_ranks(on_all_gpus)
def test_wrong_arguments(rank: int) -> None:
    world_size = dist.get_world_size()
    own, indices = ones(4), range(module().device_count())
    devices = [torch.device(kind(), i) for i in indices if i != own.get_device()]
    others = [torch.ones(4, device=device) for device in devices]
    for other in (torch.ones(4), *others):
        parts = [own, *(torch.empty_like(other) for _ in range(world_size - 1))]
        with pytest.raises(ValueError, match=rf"on {kind()}:\d and on (cpu|{kind()}:\d); .*device"):
            dist.all_gather(parts, own)
    for wrong, message in (
        (lambda: dist.broadcast(own, world_size), "not|rank"),
        (lambda: dist.all_reduce(own.bool(), dist.ReduceOp.AVG), "avg .*bool"),
        (lambda: dist.all_reduce(own, dist.ReduceOp.BOR), "bor .*float32"),
        (lambda: dist.reduce_scatter_tensor(own, own), "needs an input of"),
        (lambda: dist.all_reduce(own[:1].expand(3)), "one memory location"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
    dist.all_reduce(own)  # which has ended nothing
    assert own.tolist() == [world_size] * 4


@in_gpu_ranks(on_cuda, env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
def test_expandable_segments(rank: int) -> None:
    world_size = dist.get_world_size()
    for num_elems in (1, 1000, 3_000_001):
        tensor = ones(num_elems)
        dist.all_reduce(tensor)
        assert (tensor == world_size).all()
    # Segments grow, and shrink, under tensors that were used before.
    grown = [ones(10_000_000) for _ in range(4)]
    for turn in range(4):
        for tensor in grown:
            dist.all_reduce(tensor)
            assert (tensor == world_size ** (turn + 1)).all()
    counts = [each for (name, _), each in ringcomm.stats().items() if name == "all_reduce"]
    in_place, staged = (sum(each[key] for each in counts) for key in ("num_in_place", "num_staged"))
    assert in_place > 0 or staged == 0  # no ranks that go by messages


@in_gpu_ranks(on_cuda, fresh=True)
def test_little_memory_is_enough_or_an_error(rank: int) -> None:
    """One rank takes what its device has left before the group first needs some."""
    tensor = ones(3_000_001)
    module().synchronize()
    if rank == 0:
        free, _ = torch.cuda.mem_get_info()
        taken = torch.empty(max(0, free - (8 << 20)), dtype=torch.uint8, device=device())
    dist.all_reduce(torch.ones(1))  # of the host
    error = caught(lambda: dist.all_reduce(tensor))
    if rank == 0:
        del taken
    assert not error or "memory" in f"{error['type']} {error['text']}", error
