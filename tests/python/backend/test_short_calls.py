"""Calls that run without a work (csrc/bindings/start_call.cc), beside the same calls with one."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks, init_group
from short_calls import (
    CALLS,
    WAYS,
    Sub,
    at_once,
    check_all,
    later,
    number,
    plain,
    same,
)
from test_errors import ENVS, caught
from test_flight_dumps import dump_of
from torch import Tensor

import ringcomm
from ringcomm import CollectiveTimeoutError, MismatchError, PeerDiedError, RingcommError, ops
from ringcomm.torch_names import set_timeout

WORLD = 3
# What differs between the records of equal calls: when and where, and what had to be waited for.
PASSING = {"number", "group", "begin_ns", "end_ns", "waits_for"} | {
    *("step", "num_steps", "slice", "num_slices"),
}


@in_ranks(WORLD, ENVS)
def test_every_tensor_and_way(rank: int) -> None:
    check_all(rank, WORLD)
    alone = [dist.new_group([q], backend="ringcomm") for q in range(WORLD)]
    check_all(0, 1, alone[rank], {"at once": at_once, "later": later})


@in_ranks(WORLD, backend=None, fresh=True)
def test_below_torchs_checks(rank: int, tmp_path: Path) -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # the variable is read when torch is imported
    init_group(rank, WORLD, tmp_path / "store")
    check_all(rank, WORLD, ways={"at once": lambda call: call(), "later": later})


@in_ranks(WORLD)
def test_clones_and_their_origin(rank: int) -> None:
    """Tensors that share memory until one is written."""
    origin = plain([0] * WORLD * 2)
    out = torch._lazy_clone(origin)
    dist.all_gather_into_tensor(out, torch._lazy_clone(origin[:2] + rank))
    assert out.tolist() == [float(q) for q in range(WORLD) for _ in range(2)]
    dist.all_to_all_single(other := torch._lazy_clone(origin), torch._lazy_clone(origin))
    dist.broadcast(torch._lazy_clone(origin).add_(1), 1)
    assert not origin.any()
    assert not other.any()


@in_ranks(WORLD, {"shm": None, "messages": {"RINGCOMM_TRANSPORT": "messages"}})
def test_counters_and_the_recorder_see_the_same(rank: int, tmp_path: Path) -> None:
    """Whatever the way; the counters of the process have those of groups that have ended."""
    for name, make in CALLS.items():
        seen = []
        for run in WAYS.values():
            group: Any = dist.new_group(backend="ringcomm")
            whole = ringcomm.stats()
            call, _, _ = make(plain, rank, WORLD, 2)
            run(partial(call, group=group))
            counts = ringcomm.stats(group)
            path = ringcomm.flight_dump(f"{tmp_path}/{name}-")
            recorded = dump_of(path)["processes"][0]["calls"][-1]
            seen.append((counts, {k: v for k, v in recorded.items() if k not in PASSING}))
            dist.destroy_process_group(group)
            ((key, of_group),) = counts.items()
            of_process = ringcomm.stats()[key]
            for what, before in whole.get(key, dict.fromkeys(of_group, 0)).items():
                assert of_process[what] == before + of_group[what], (name, key, what)
        assert seen == [seen[0]] * len(seen), name
        assert seen[0][1]["op"] == name.rpartition(" ")[2]


@in_ranks(2)
def test_operators(rank: int) -> None:
    """ringcomm.ops calls the backend itself; with a profiler, and in a subclass, torch does."""
    x = plain([number(rank, 0), number(rank, 1)])
    calls: dict[str, tuple[Callable[[Tensor], Tensor], list[int]]] = {
        "all_gather": (ops.all_gather, [1, 2, 11, 12]),
        "reduce_scatter": (ops.reduce_scatter, [12 + 2 * rank]),
        "broadcast": (lambda t: ops.broadcast(t, 1), [11, 12]),
        "reduce": (lambda t: ops.reduce(t, 1), [12, 14] if rank == 1 else [0, 0]),
    }
    for name, (call, expected) in calls.items():
        before = ringcomm.stats(dist.group.WORLD).get((name, "direct"), {"num_calls": 0})
        results = [call(x), call(x.as_subclass(Sub)), call(torch.stack([x, x], 1)[:, 0])]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            results.append(call(x))
        assert f"ringcomm::{name}" in {event.key for event in profiler.key_averages()}
        with torch.inference_mode():
            results.append(call(x).clone())
        for result in results:
            assert result.tolist() == expected, name
        after = ringcomm.stats(dist.group.WORLD)[name, "direct"]["num_calls"]
        assert after == before["num_calls"] + len(results)
        assert x.tolist() == [number(rank, 0), number(rank, 1)]


@in_ranks(2)
def test_coalesced(rank: int) -> None:
    outs, sums = [plain([0] * 4) for _ in range(2)], [plain([0]) for _ in range(2)]
    with dist._coalescing_manager():
        for i, out in enumerate(outs):
            dist.all_gather_into_tensor(out, plain([number(rank, i)] * 2))
    with dist._coalescing_manager():
        for i, total in enumerate(sums):
            dist.reduce_scatter_tensor(total, plain([number(rank, i), number(rank, i + 1)]))
    for i in range(2):
        assert outs[i].tolist() == [number(0, i)] * 2 + [number(1, i)] * 2
        assert sums[i].tolist() == [number(0, i + rank) + number(1, i + rank)]


@in_ranks(2)
def test_groups_in_several_threads(rank: int) -> None:
    groups = [dist.new_group(backend="ringcomm") for _ in range(3)]
    wrong: list[Any] = []

    def work(group: Any) -> None:
        for _ in range(30):
            for name, make in CALLS.items():
                call, result, expected = make(plain, rank, 2, 3)
                call(group=group)
                if not same(result, plain(expected)):
                    wrong.append(name)

    threads = [threading.Thread(target=work, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


@in_ranks(2)
def test_behind_an_asynchronous_one(rank: int) -> None:
    """A call that finds another one in the queue comes after it."""
    for name, make in CALLS.items():
        x = torch.full((300_000,), rank + 1.0)
        work = dist.all_reduce(x, async_op=True)
        call, result, expected = make(plain, rank, 2, 2)
        call()
        assert same(result, plain(expected)), name
        assert work is not None
        work.wait()
        assert (x == 3).all()


# ---- failures


@contextmanager
def fresh_group(timeout_s: float | None = None) -> Any:
    """With a timeout of its calls, not of its construction."""
    group: Any = dist.new_group(backend="ringcomm")
    if timeout_s is not None:
        set_timeout(group._get_backend(torch.device("cpu")).options, timedelta(seconds=timeout_s))
    dist.barrier()
    yield group
    dist.barrier()
    dist.destroy_process_group(group)


@in_ranks(WORLD)
def test_failures_are_named(rank: int) -> None:
    """Calls that differ; a rank that does not come; an abort by another thread."""
    for name, make in CALLS.items():
        op = name.rpartition(" ")[2]
        with fresh_group() as group:
            call, _, _ = make(plain, rank, WORLD, 3 if rank == 1 else 2)
            with pytest.raises(MismatchError) as mismatch:
                call(group=group)
            assert op in str(mismatch.value)
            assert mismatch.value.op == op
        with fresh_group(timeout_s=0.3) as group:
            if rank != 1:
                call, _, _ = make(plain, rank, WORLD, 2)
                with pytest.raises(CollectiveTimeoutError) as late:
                    call(group=group)
                assert late.value.op == op
                assert late.value.rank in range(WORLD)
        with fresh_group() as group:
            if rank == 0:
                call, _, _ = make(plain, rank, WORLD, 2)
                abort = threading.Timer(0.1, group._get_backend(torch.device("cpu")).abort)
                abort.start()
                with pytest.raises(RingcommError, match="aborted"):
                    call(group=group)
                abort.join()
                with pytest.raises(RingcommError, match="aborted"):
                    call(group=group)


@in_ranks(WORLD, fresh=True, may_die=[1])
@pytest.mark.parametrize("name", CALLS)
def test_a_dead_rank_is_named(rank: int, name: str) -> None:
    dist.barrier()
    if rank == 1:
        os._exit(1)
    call, _, _ = CALLS[name](plain, rank, WORLD, 2)
    error = caught(call)
    assert (error["type"], error["rank"]) == (PeerDiedError.__name__, 1), error
    assert error["op"] == name.rpartition(" ")[2]


@in_ranks(2)
def test_what_does_not_fit_is_refused(rank: int) -> None:
    """By the errors of all other calls, before anything is exchanged."""
    x, half = plain([1] * 4), plain([1] * 2).half()
    meta = torch.empty(4, device="meta")
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    freed = plain([1] * 4)
    freed.untyped_storage().resize_(0)
    refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, "needs an output of 8", lambda: backend._allgather_base(x, x.clone())),
        (ValueError, "needs an input of 8", lambda: backend._reduce_scatter_base(x, x.clone())),
        (TypeError, "one dtype", lambda: backend._allgather_base(x, half)),
        (ValueError, "a tensor on meta", lambda: backend._allgather_base(meta, x[:2])),
        (Exception, "memory was freed", lambda: dist.broadcast(freed, 0)),
        (ValueError, "3 rows", lambda: backend.alltoall_base(x[:3], x[:3], [], [])),
        (ValueError, "share memory", lambda: backend._allgather_base(x, x[1:3])),
    ]
    for kind, text, call in refused:
        with pytest.raises(kind, match=text):
            call()
    dist.barrier()


# ---- programs that others reported of other backends


@in_ranks(2)
def test_reduce_scatter_of_a_transposed_tensor(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/128066: rows of memory, not of the tensor."""
    x = torch.arange(12.0).reshape(3, 4).t() + rank  # 4 x 3, column by column in memory
    out = torch.zeros(3, 2).t()
    dist.reduce_scatter_tensor(out, x)
    expected = torch.arange(12.0).reshape(3, 4).t()[2 * rank : 2 * rank + 2] * 2 + 1
    assert torch.equal(out, expected)


@in_ranks(2)
def test_broadcast_of_a_column_leaves_its_neighbours(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/192920: written one after another in memory."""
    table = torch.full((3, 3), float(rank))
    dist.broadcast(table[:, 1], 1)
    dist.broadcast(table.t()[2, ::2], 0)
    middle = [[float(rank), 1.0, 0.0], [float(rank), 1.0, float(rank)], [float(rank), 1.0, 0.0]]
    assert table.tolist() == middle


@in_ranks(2, fresh=True)
def test_broadcast_of_another_type_is_an_error(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/91535: floats arrived as whole numbers."""
    x = torch.zeros(4, dtype=torch.int64) if rank == 1 else torch.zeros(8)
    with pytest.raises(MismatchError, match=r"int64.*float32|float32.*int64"):
        dist.broadcast(x, 0)


@in_ranks(WORLD)
def test_all_to_all_where_some_send_nothing(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/146468: it hung."""
    for sender in (0, 2):
        given = [2 * (rank == sender)] * WORLD
        taken = [2 * (q == sender) for q in range(WORLD)]
        x = torch.full((sum(given), 4), float(sender + 1))
        out = torch.zeros(2, 4)
        dist.all_to_all_single(out, x, taken, given)
        assert bool((out == sender + 1).all())
    nothing = torch.zeros(0, 4)
    dist.all_to_all_single(nothing, nothing, [0] * WORLD, [0] * WORLD)


@in_ranks(2)
def test_inputs_that_nobody_keeps(rank: int) -> None:
    """https://github.com/karpathy/nanochat/pull/843: reused before they were sent."""
    size, outs, works = 40_000, [], []
    for turn in range(12):
        outs.append(torch.zeros(2 * size))
        x = torch.full((size,), float(number(rank, turn)))
        works.append(dist.all_gather_into_tensor(outs[-1], x, async_op=True).get_future())
        del x
        torch.full((size,), -1.0)  # takes the memory that has just been freed
        if rank == 1 and turn == 0:
            time.sleep(0.05)  # the other rank is ahead
    for turn, (out, work) in enumerate(zip(outs, works, strict=True)):
        work.wait()
        assert bool((out[:size] == number(0, turn)).all())
        assert bool((out[size:] == number(1, turn)).all())
