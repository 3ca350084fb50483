"""async_op: works and futures, order, callbacks that communicate, groups side by side."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks, run_ranks
from torch import Tensor

from ringcomm import Options


def check_many_in_flight(rank: int) -> None:
    """Waited for in any order and twice; some are dropped at once, with their tensors."""
    world_size = dist.get_world_size()
    inputs = [
        [oracle.integers(r, 1000 * (i % 7) + i, torch.float32, i) for r in range(world_size)]
        for i in range(60)
    ]
    tensors = [own[rank].clone() for own in inputs]
    works: list[Any] = []
    for tensor in tensors:
        works.append(dist.all_reduce(tensor, async_op=True))
        dist.all_reduce(torch.zeros(4, 6).t(), async_op=True)
    later = torch.ones(3)
    dist.all_reduce(later)  # a synchronous one runs after those in flight
    assert all(work.is_completed() for work in works)
    for work in reversed(works):
        assert work.wait()
        assert work.wait()
        assert work.is_success()
    for tensor, own in zip(tensors, inputs, strict=True):
        oracle.assert_equal(tensor, oracle.reduced(own, "sum"))
    assert later.tolist() == [world_size] * 3


def check_order(rank: int) -> None:
    """Without a wait between them, collectives on one tensor run in the order of their calls."""
    tensor = torch.ones(100_000)
    for _ in range(5):
        dist.all_reduce(tensor, async_op=True)
    work: Any = dist.broadcast(tensor, 0, async_op=True)
    work.wait()
    assert (tensor == float(dist.get_world_size()) ** 5).all()


def check_chain(rank: int) -> None:
    """PowerSGD's way: a callback issues the next collective and waits for it, three deep."""

    def next_one(future: Any) -> Tensor:
        value = future.value()
        tensor = value[0] if isinstance(value, list) else value
        dist.all_reduce(tensor)
        return tensor

    def next_async(future: Any) -> Tensor:
        (tensor,) = dist.all_reduce(future.value(), async_op=True).get_future().wait()
        return tensor

    def fail(future: Any) -> None:
        raise ZeroDivisionError("the callback's own")

    for _ in range(20):
        work: Any = dist.all_reduce(torch.ones(1000), async_op=True)
        result = work.get_future().then(next_one).then(next_async).then(next_one).wait()
        assert (result == float(dist.get_world_size()) ** 4).all()
    with pytest.raises(Exception, match="the callback's own"):
        work.get_future().then(fail).wait()
    dist.barrier()


def check_opposite_orders(rank: int) -> None:
    """Groups are independent: ranks may use two in opposite orders, and from two threads."""
    groups = [
        dist.new_group(backend="ringcomm", pg_options=Options(algorithm=algorithm))
        for algorithm in ("two_shot", "ring")
    ]
    order = [0, 1] if rank == 0 else [1, 0]
    for _ in range(10):
        tensors = [torch.ones(50_000) for _ in groups]
        works: list[Any] = [
            dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order
        ]
        for work in works:
            work.wait()
        assert all((tensor == 2).all() for tensor in tensors)

    def use(i: int) -> None:
        for _ in range(30):
            tensor = torch.ones(1000)
            dist.all_reduce(tensor, group=groups[i])
            results[i] += float(tensor[0])

    results = [0.0, 0.0]
    threads = [threading.Thread(target=use, args=(i,)) for i in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results == [60.0, 60.0]
    for group in groups:
        dist.destroy_process_group(group)


def check_results(rank: int) -> None:
    world_size = dist.get_world_size()
    tensor = torch.full((3,), rank + 1.0)
    work: Any = dist.all_reduce(tensor, async_op=True)
    (value,) = work.get_future().wait()
    assert value.data_ptr() == work.result()[0].data_ptr() == tensor.data_ptr()
    # The future of a work that is over, asked for late.
    late = work.get_future().then(lambda future: future.value()[0] * 2).wait()
    oracle.assert_equal(late, tensor * 2)
    outputs = [torch.empty(3) for _ in range(world_size)]
    work = dist.all_gather(outputs, tensor, async_op=True)
    for output, given in zip(outputs, work.get_future().wait(), strict=True):
        assert output.data_ptr() == given.data_ptr()
        oracle.assert_equal(output, tensor)
    barrier: Any = dist.barrier(async_op=True)
    assert barrier.get_future().wait() is not None
    assert work.wait(datetime.timedelta(seconds=5))


CHECKS: list[Callable[[int], None]] = [
    *(check_many_in_flight, check_order, check_chain, check_opposite_orders, check_results)
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("transport", ["shm", "p2p"])
def test_asynchronous_calls(check: Callable[[int], None], transport: str) -> None:
    run_ranks(2, check, env={"RINGCOMM_TRANSPORT": transport})


def test_results_of_one_rank_alone() -> None:
    run_ranks(1, check_results)


@in_ranks(2)
def test_waiting_releases_the_gil(rank: int) -> None:
    """A rank that waits leaves the interpreter to its other threads."""
    ticks = [0]
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0.005)

    thread = threading.Thread(target=tick)
    thread.start()
    if rank == 0:
        time.sleep(0.4)
    dist.barrier()
    stop.set()
    thread.join()
    assert ticks[0] > 10
