"""async_op: works and futures, order, callbacks that communicate.

Works that are waited for in any order, and groups in several threads: test_random_sequences.py.
"""

from __future__ import annotations

import datetime
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks
from test_errors import TRANSPORTS
from torch import Tensor

from ringcomm import Options


@in_ranks(2, TRANSPORTS)
def test_order(rank: int) -> None:
    """Calls on one tensor run in their order; two groups may be used in opposite orders."""
    tensor = torch.ones(100_000)
    for _ in range(5):
        dist.all_reduce(tensor, async_op=True)
    work: Any = dist.broadcast(tensor, 0, async_op=True)
    work.wait()
    assert (tensor == 2.0**5).all()
    groups = [
        dist.new_group(backend="ringcomm", pg_options=Options(algorithm=algorithm))
        for algorithm in ("two_shot", "ring")
    ]
    for _ in range(10):
        tensors = [torch.ones(50_000) for _ in groups]
        works: list[Any] = [
            dist.all_reduce(tensors[i], group=groups[i], async_op=True)
            for i in ([0, 1] if rank == 0 else [1, 0])
        ]
        for work in works:
            work.wait()
        assert all((tensor == 2).all() for tensor in tensors)


@in_ranks(2, TRANSPORTS)
def test_chain(rank: int) -> None:
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
        assert (result == 2.0**4).all()
    with pytest.raises(Exception, match="the callback's own"):
        work.get_future().then(fail).wait()
    dist.barrier()


@in_ranks((1, 2))
def test_results(rank: int) -> None:
    """Works and futures give the caller's tensors, also when they are asked late."""
    tensor = torch.full((3,), rank + 1.0)
    work: Any = dist.all_reduce(tensor, async_op=True)
    (value,) = work.get_future().wait()
    assert value.data_ptr() == work.result()[0].data_ptr() == tensor.data_ptr()
    assert torch.equal(work.get_future().then(lambda f: f.value()[0] * 2).wait(), tensor * 2)
    outputs = [torch.empty(3) for _ in range(dist.get_world_size())]
    work = dist.all_gather(outputs, tensor, async_op=True)
    for output, given in zip(outputs, work.get_future().wait(), strict=True):
        assert output.data_ptr() == given.data_ptr()
    barrier: Any = dist.barrier(async_op=True)
    assert barrier.get_future().wait() is not None
    assert work.wait(datetime.timedelta(seconds=5))


@in_ranks(2)
def test_waiting_releases_the_gil(rank: int) -> None:
    ticks = [0]
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0.005)

    thread = threading.Thread(target=tick)
    thread.start()
    if rank == 0:
        time.sleep(0.3)
    dist.barrier()
    stop.set()
    thread.join()
    assert ticks[0] > 10
