"""Transport "p2p": the collectives and messages of a group over the sends and receives of Gloo.

What the ranks do is taken from the tests of the shm transport; here are the worlds, the sizes at
which these paths change, and what messages do otherwise.
"""

from __future__ import annotations

import datetime
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import test_all_to_all
import test_async
import test_ddp
import test_errors
import test_faults
import test_gather_scatter
import test_groups
import test_monitored_barrier as test_monitored
import test_p2p
import test_rank_order as test_rank_order_of
import test_uneven
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_collectives import ALGORITHMS, check_all_reduce, check_reduce, group_with
from test_errors import caught

import ringcomm
from ringcomm import Options

ENV = {"RINGCOMM_TRANSPORT": "p2p"}
WORLDS = [2, 3, 4, 5]
f32 = torch.float32


def run(world_size: int, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    return run_ranks(world_size, fn, *args, env=ENV, **options)


# ---- collectives


def check_collectives(rank: int) -> None:
    world_size = dist.get_world_size()
    # Nothing; less than a rank each; what an envelope holds (4 KB) and more; two_shot; a ring.
    sizes = [0, 1, world_size + 1, 1000, 1100, 60_001]
    for algorithm in ["auto", *ALGORITHMS]:
        check_all_reduce(rank, "sum", f32, sizes, algorithm)
    for op, dtype in [("avg", torch.bfloat16), ("max", torch.int8), ("bxor", torch.int64)]:
        check_all_reduce(rank, op, dtype, [world_size - 1, 5000], "auto")
    for dtype in (f32, torch.bool):
        test_gather_scatter.check_broadcast(rank, dtype)
        test_gather_scatter.check_all_gather(rank, dtype)
    test_gather_scatter.check_in_place(rank)
    test_gather_scatter.check_reduce_scatter(rank, torch.bfloat16, "avg")
    test_gather_scatter.check_coalesced(rank, True)
    check_reduce(rank, 1001, f32)
    dist.barrier()


@pytest.mark.parametrize("world_size", WORLDS)
def test_collectives(world_size: int) -> None:
    run(world_size, check_collectives)


def check_large(rank: int) -> None:
    """Rings and chains, which start at 1 MiB, in many slices and with chunks that differ."""
    world_size = dist.get_world_size()
    num_elems = (1 << 18) + 3
    check_all_reduce(rank, "sum", f32, [num_elems, 1_500_001], "auto")
    check_reduce(rank, num_elems, f32)
    tensor = oracle.integers(rank, num_elems, f32)
    dist.broadcast(tensor, 1)
    oracle.assert_equal(tensor, oracle.integers(1, num_elems, f32))
    inputs = [oracle.integers(r, 100_001 * world_size, f32) for r in range(world_size)]
    output = torch.empty(100_001)
    dist.reduce_scatter_tensor(output, inputs[rank].clone())
    oracle.assert_equal(output, oracle.reduced(inputs, "sum").chunk(world_size)[rank])
    gathered = torch.empty(100_001 * world_size)
    dist.all_gather_into_tensor(gathered, inputs[rank][:100_001].clone())
    oracle.assert_equal(gathered, torch.cat([values[:100_001] for values in inputs]))


@pytest.mark.parametrize(("world_size", "num_slots"), [(2, 2), (3, 5), (4, 2)])
def test_large(world_size: int, num_slots: int) -> None:
    options = Options(transport="p2p", num_slots=num_slots, slot_bytes=64 << 10)
    run_ranks(world_size, check_large, pg_options=options)


def count_bytes(rank: int) -> dict[str, int]:
    sent_bytes = {}
    for algorithm in ALGORITHMS:
        group = group_with(algorithm)
        before = ringcomm.stats(group).get(("all_reduce", algorithm), {"sent_bytes": 0})
        dist.all_reduce(torch.ones(60_000), group=group)
        after = ringcomm.stats(group)["all_reduce", algorithm]
        sent_bytes[algorithm] = after["sent_bytes"] - before["sent_bytes"]
    return sent_bytes


@pytest.mark.parametrize("world_size", WORLDS)
def test_bytes_are_the_formulas(world_size: int) -> None:
    num_bytes = 240_000
    share = 2 * (world_size - 1) * num_bytes // world_size
    expected = {"one_shot": (world_size - 1) * num_bytes, "two_shot": share, "ring": share}
    assert run(world_size, count_bytes) == [expected] * world_size


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rank_order(algorithm: str) -> None:
    for dtype in (f32, torch.bfloat16):
        run(3, test_rank_order_of.check_algorithm, algorithm, dtype, [0, 2, 129, 5003])


# ---- what the tests of other files do, over messages

OTHERS: list[tuple[int, Callable[..., Any], tuple[Any, ...]]] = [
    (3, test_gather_scatter.check_gather_scatter, (f32,)),
    (3, test_uneven.check_moves, ([3, 0, 7], torch.bool, False)),
    (3, test_uneven.check_moves, ([600_000, 0, 300_001], f32, True)),
    (3, test_uneven.check_reduce_scatter, ([600_000, 0, 300_001], f32, "sum")),
    (3, test_all_to_all.check_even, (f32,)),
    (3, test_all_to_all.check_table, ([[0, 1, 9000], [2, 0, 3], [5, 4000, 1]], f32, 3, True)),
    (2, test_p2p.check_sizes, ()),
    (2, test_p2p.check_tags, ()),
    (2, test_p2p.check_posted_receives, ()),
    (3, test_p2p.check_any_source, ()),
    (3, test_p2p.check_any_source_async, ()),
    (3, test_p2p.check_batch_all, ()),
    (2, test_p2p.check_isend_returns, ()),
    (2, test_p2p.check_with_collectives, ()),
    (2, test_p2p.check_futures, ()),
    (3, test_p2p.check_objects, ()),
    (3, test_p2p.check_subgroup, ()),
    (2, test_async.check_many_in_flight, ()),
    (2, test_async.check_dependent_order, ()),
    (2, test_async.check_chain, ()),
    (2, test_async.check_opposite_orders, ()),
    (4, test_groups.check_ways_to_make_groups, ()),
]


@pytest.mark.parametrize(
    ("world_size", "fn", "args"), OTHERS, ids=lambda value: getattr(value, "__name__", "")
)
def test_others(world_size: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    run(world_size, fn, *args)


def test_monitored_barrier(tmp_path: Any) -> None:
    run(3, test_monitored.check_passes, str(tmp_path / "marks"))


def test_sends_without_wait_arrive() -> None:
    run(2, test_p2p.check_dropped_sends, fresh=True)


def refuse_tag(rank: int) -> None:
    with pytest.raises(ValueError, match="tags over the p2p transport"):
        dist.send(torch.ones(1), 1 - rank, tag=0x7F000000)
    dist.barrier()


def test_tags_that_are_ringcomms_own() -> None:
    run(2, refuse_tag)


def test_ddp_equals_one_process() -> None:
    runs = run(test_ddp.WORLD, test_ddp.train_ddp, {})
    test_ddp.assert_same_run(runs, test_ddp.single_process())


# ---- other backends, groups made again, options


def check_carrier(rank: int) -> None:
    check_all_reduce(rank, "sum", f32, [1, 1000, 300_001], "auto")
    test_p2p.check_tags(rank)
    test_p2p.check_any_source(rank)
    check_reduce(rank, 1001, f32)


def test_over_another_backend() -> None:
    """ringcomm's own shared memory as a stranger: a backend with Backend.abort() only."""
    run_ranks(2, check_carrier, pg_options=Options(transport="p2p", p2p_backend="ringcomm"))


def make_again(rank: int, path: str) -> None:
    store = dist.FileStore(path, 2)
    for turn in range(4):
        dist.init_process_group("ringcomm", store=store, rank=rank, world_size=2)
        tensor = torch.full((5,), float(turn))
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2.0 * turn] * 5
        group: Any = dist.group.WORLD
        if turn % 2 == 1:
            dist.barrier()
            group._get_backend(torch.device("cpu")).abort()
        dist.destroy_process_group()


def test_destroyed_and_made_again(tmp_path: Any) -> None:
    run(2, make_again, str(tmp_path / "store"), backend=None, fresh=True)


def make_group(rank: int, options: list[Any], path: str) -> dict[str, Any]:
    return caught(
        lambda: dist.init_process_group(
            "ringcomm",
            store=dist.FileStore(path, 2),
            rank=rank,
            world_size=2,
            pg_options=options[rank],
            timeout=datetime.timedelta(seconds=10),
        )
    )


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ([Options(p2p_backend="nothing")] * 2, "ValueError", "p2p_backend of ringcomm.Options"),
        ([Options(num_slots=4), Options()], "MismatchError", "num_slots=4"),
        ([Options(p2p_backend="ringcomm"), Options()], "MismatchError", "p2p_backend=gloo"),
        ([Options(transport="tcp")] * 2, "ValueError", "shm or p2p"),  # type: ignore[arg-type]
    ],
)
def test_bad_options(tmp_path: Any, options: list[Any], kind: str, words: str) -> None:
    error = run(2, make_group, options, str(tmp_path / "s"), backend=None, fresh=True)[1]
    assert (error["type"], words in error["text"]) == (kind, True), error


def test_rank_that_never_comes(tmp_path: Any) -> None:
    error, _ = run(2, test_faults.miss_rendezvous, str(tmp_path), backend=None, fresh=True)
    assert error["type"] == "CollectiveTimeoutError", error
    assert error["rank"] == 1
    assert "rank 1 did not join" in error["text"]


def make_late(rank: int, fails: bool) -> tuple[float, dict[str, Any]]:
    """When rank 0 has made its end, or any other its group; and the error."""
    make, made_s = dist.ProcessGroupGloo, 0.0

    def make_own(*args: Any, **kwargs: Any) -> Any:
        nonlocal made_s
        backend = make(*args, **kwargs)
        time.sleep(0.2)
        if fails:
            raise OSError("no such network")
        made_s = time.monotonic()
        return backend

    if rank == 0:
        dist.ProcessGroupGloo = make_own  # type: ignore[assignment,misc]
    try:
        error = caught(lambda: dist.destroy_process_group(dist.new_group()))
    finally:
        dist.ProcessGroupGloo = make  # type: ignore[misc]
    return made_s or time.monotonic(), error


def test_no_rank_has_a_group_before_all_have() -> None:
    """A rank that leaves it at once would close connections that others are making."""
    (made_s, _), *others = run(3, make_late, False)
    for had_s, error in others:
        assert not error, error
        assert had_s >= made_s


def test_a_rank_that_cannot_make_its_end_is_named() -> None:
    for rank, (_, error) in enumerate(run(3, make_late, True, fresh=True)):
        assert error["type"] == "RingcommError", error
        assert ("rank 0: " if rank > 0 else "") + "no such network" in error["text"], error


# ---- faults


@pytest.mark.parametrize("name", sorted(test_faults.waits()))
def test_killed_rank(name: str) -> None:
    """With 3 ranks also those hear of it that wait for another one."""
    world_size = 2 if name == "recv_any" else 3
    results = run(world_size, test_faults.lose_rank_1, name, "kill", fresh=True, may_die=[1])
    test_faults.check_loss(results, name)


@pytest.mark.parametrize("how", ["exit", "destroy"])
def test_rank_that_goes(how: str) -> None:
    may_die = [1] if how == "exit" else []
    results = run(3, test_faults.lose_rank_1, "all_reduce", how, fresh=True, may_die=may_die)
    test_faults.check_loss(results, "all_reduce")


def die_in_a_ring(rank: int) -> dict[str, Any]:
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return test_faults.timed(lambda: dist.all_reduce(torch.ones(3_000_000)))


def test_killed_in_a_ring_of_five() -> None:
    for rank, error in enumerate(run(5, die_in_a_ring, fresh=True, may_die=[2])):
        if rank != 2:
            assert (error["type"], error["rank"]) == ("PeerDiedError", 2), (rank, error)


@pytest.mark.parametrize("name", ["all_reduce", "barrier", "recv", "recv_any", "async"])
def test_late_rank(name: str) -> None:
    results = run(3, test_faults.be_late, name, fresh=True, group_timeout_s=0.6)
    for rank in (0, 2):
        assert results[rank]["type"] == "CollectiveTimeoutError", results[rank]
        assert results[rank]["seconds"] < 0.6 + test_faults.SOON_S
        assert "600 ms" in results[rank]["text"]


@pytest.mark.parametrize("name", ["all_reduce", "recv"])
def test_ctrl_c(name: str) -> None:
    test_faults.check_interrupt(run(2, test_faults.interrupt, name, fresh=True))


@pytest.mark.parametrize("name", ["size_large", "dtype", "collective", "barrier", "gather_size"])
def test_different_calls(name: str) -> None:
    for rank, errors in enumerate(run(3, test_errors.differ, name, False, fresh=True)):
        for error in errors:
            assert error["type"] == "MismatchError", (rank, error)
            assert test_errors.DIFFERENT[name][2] in error["text"]
            assert test_errors.DIFFERENT[name][3] in error["text"]


@pytest.mark.parametrize("name", ["gather", "reduce_scatter"])
def test_shares_that_do_not_fit(name: str) -> None:
    """A rank whose own part fitted hears of it in its next call."""
    for errors in run(3, test_uneven.check_misfit, name, False, fresh=True):
        assert errors[-1]["type"] == "MismatchError", errors
        assert test_uneven.MISFITS[name][1] in errors[-1]["text"]


def lose_the_store(rank: int, port: int) -> dict[str, Any]:
    """The store dies with rank 0; with 5 ranks some are no neighbours of its."""
    store = dist.TCPStore("127.0.0.1", port, 5, is_master=rank == 0)
    dist.init_process_group("ringcomm", store=store, rank=rank, world_size=5)
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return test_faults.timed(lambda: dist.all_reduce(torch.ones(2_000_000)))


def test_killed_with_the_store() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    errors = run(5, lose_the_store, port, backend=None, fresh=True, may_die=[0])[1:]
    kinds = {error["type"] for error in errors}
    assert "PeerDiedError" in kinds
    assert kinds <= {"PeerDiedError", "RingcommError"}, errors
    assert all(error["seconds"] < 5.0 for error in errors), errors


def test_receive_of_another_size() -> None:
    _, error = run(2, test_errors.differ_in_p2p, fresh=True)
    assert error["type"] == "MismatchError", error


def test_group_in_a_forked_child() -> None:
    for texts in run(2, test_faults.use_in_child, fresh=True):
        assert all("fork" in line for line in texts.splitlines()[:3]), texts


def test_destroy_with_work_in_flight() -> None:
    run(2, test_faults.destroy_in_flight, fresh=True)


# ---- deaths at whatever step (at every message: tests/cpp/test_message_aborts.cc)


def calls_without_end() -> None:
    """Collectives of all sizes and patterns, one after another, until one raises."""
    world_size = dist.get_world_size()
    tensors = [torch.ones(num_elems) for num_elems in (10, 5000, 300_001)]
    while True:
        for turn, tensor in enumerate(tensors):
            dist.all_reduce(tensor)
            tensor.fill_(1.0)
            dist.broadcast(tensor, turn % world_size)
            dist.all_gather([torch.empty_like(tensor) for _ in range(world_size)], tensor)
        dist.barrier()


def die_in_the_middle(rank: int, victim: int, delay_s: float) -> dict[str, Any]:
    """The victim ends in the middle of some collective; what the others are told, and when."""
    dist.barrier()
    begin = time.monotonic()
    if rank == victim:
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    error = caught(calls_without_end)
    return {**error, "seconds": time.monotonic() - begin - delay_s}


def test_killed_in_the_middle() -> None:
    for victim, delay_s in [(1, 0.05), (2, 0.081), (3, 0.133)]:
        errors = run(4, die_in_the_middle, victim, delay_s, fresh=True, may_die=[victim])
        for rank, error in enumerate(errors):
            if rank != victim:
                assert (error["type"], error["rank"]) == ("PeerDiedError", victim), (rank, error)
                assert error["seconds"] < test_faults.SOON_S, (rank, error)
