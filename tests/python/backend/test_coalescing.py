"""startCoalescing and endCoalescing: what torch's manager makes of them on the CPU."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_gather_scatter import finish

CPU = torch.device("cpu")


def check_collectives(rank: int, is_async: bool) -> None:
    """Of one kind, gathered by torch; and of several, which reach the backend one by one."""
    world_size = dist.get_world_size()
    total = world_size * (world_size + 1) / 2
    sums = [torch.full((n,), rank + 1.0) for n in (1, 1000, 100_000)]
    with dist._coalescing_manager(device=CPU, async_ops=is_async) as manager:
        for tensor in sums:
            dist.all_reduce(tensor)
    finish(manager if is_async else None)
    assert all((tensor == total).all() for tensor in sums)

    sent = torch.full((3,), float(rank))
    reduced, shared = torch.full((2,), rank + 1.0), torch.full((4,), float(rank))
    gathered = [torch.empty(3) for _ in range(world_size)]
    with dist._coalescing_manager(device=CPU, async_ops=is_async) as manager:
        dist.broadcast(shared, 1, async_op=is_async)
        dist.reduce(reduced, 0, async_op=is_async)
        dist.all_gather(gathered, sent, async_op=is_async)
    finish(manager if is_async else None)
    assert (shared == 1).all()
    assert (reduced == (total if rank == 0 else rank + 1)).all()
    assert [share[0].item() for share in gathered] == list(range(world_size))


@pytest.mark.parametrize("is_async", [False, True])
def test_collectives(is_async: bool) -> None:
    run_ranks(2, check_empty, is_async)
    for world_size in (2, 3):
        run_ranks(world_size, check_collectives, is_async)


def check_empty(rank: int, is_async: bool) -> None:
    with dist._coalescing_manager(device=CPU, async_ops=is_async) as manager:
        pass
    finish(manager if is_async else None)
    dist.barrier()


def check_messages(rank: int, large: bool) -> None:
    """In any order, however large: both ranks send first, or both receive first."""
    peer, num_elems = 1 - rank, 1_000_000 if large else 10
    assert not dist.group.WORLD._get_backend(CPU).supports_coalescing  # type: ignore[union-attr]
    for turn in range(2):
        received = [torch.empty(num_elems) for _ in range(2)]
        sent = [torch.full((num_elems,), 10.0 * rank + tag) for tag in range(2)]
        ops = [dist.P2POp(dist.isend, sent[tag], peer, tag=tag) for tag in range(2)]
        ops += [dist.P2POp(dist.irecv, received[tag], peer, tag=tag) for tag in (1, 0)]
        works = dist.batch_isend_irecv(ops if turn == 0 else ops[::-1])
        assert len(works) == 4
        for work in works:
            work.wait()
        assert [each[-1].item() for each in received] == [10.0 * peer, 10.0 * peer + 1]
    with dist._coalescing_manager(device=CPU, async_ops=True) as manager:
        dist.isend(sent[0], peer)
        dist.irecv(received[0].zero_(), peer)
    manager.wait()
    assert (received[0] == 10.0 * peer).all()


@pytest.mark.parametrize("large", [False, True])
def test_messages(large: bool) -> None:
    run_ranks(2, check_messages, large)


def check_work(rank: int) -> None:
    """The work of a block: done when all are, with all results; futures too."""
    backend: Any = dist.group.WORLD._get_backend(CPU)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="without startCoalescing"):
        backend._end_coalescing()
    tensors = [torch.full((n,), rank + 1.0) for n in (2, 70_000)]
    backend._start_coalescing()
    for tensor in tensors:
        dist.distributed_c10d.broadcast(tensor, 1, async_op=True)
    work = backend._end_coalescing()
    future = work.get_future()
    future.wait()
    assert work.is_completed()
    assert work.is_success()
    for result, tensor in zip(work.result(), tensors, strict=True):
        oracle.assert_equal(result, torch.full_like(tensor, 2.0))
    assert len(future.value()) == 2
    # A block that an exception left is forgotten by the next one.
    backend._start_coalescing()
    dist.barrier()
    backend._start_coalescing()
    assert backend._end_coalescing().result() == []


def test_work_of_a_block() -> None:
    run_ranks(2, check_work)
