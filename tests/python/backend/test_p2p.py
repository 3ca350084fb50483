"""send and recv: matching by source and tag, any source, batches, large messages, objects."""

from __future__ import annotations

import time
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

# 0; 1; around a slot of a link (128 KiB, of which a message's first has 64 bytes for a header); all
# four slots; many more.
SIZES = [
    0,
    1,
    (128 << 10) - 65,
    (128 << 10) - 64,
    (128 << 10) - 63,
    128 << 10,
    512 << 10,
    3_000_001,
]


def pattern(source: int, tag: int, num_bytes: int) -> torch.Tensor:
    return oracle.integers(source, num_bytes, torch.uint8, seed=tag)


def check_sizes(rank: int) -> None:
    for num_bytes in SIZES:
        if rank == 0:
            dist.send(pattern(0, 1, num_bytes), 1)
            received = torch.empty(num_bytes, dtype=torch.uint8)
            assert dist.recv(received, 1) == 1
            oracle.assert_equal(received, pattern(1, 2, num_bytes))
        else:
            received = torch.empty(num_bytes, dtype=torch.uint8)
            dist.recv(received, 0)
            oracle.assert_equal(received, pattern(0, 1, num_bytes))
            dist.send(pattern(1, 2, num_bytes), 0)


def test_sizes() -> None:
    run_ranks(2, check_sizes)


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64])
def test_types_and_layouts(dtype: torch.dtype) -> None:
    run_ranks(2, check_layout, dtype)


def check_layout(rank: int, dtype: torch.dtype) -> None:
    raw = pattern(0, 3, 30 * dtype.itemsize)
    value = raw.bitwise_and(1).bool() if dtype == torch.bool else raw.view(dtype)
    if rank == 0:
        dist.send(value.view(5, 6).t(), 1)
    else:
        base = torch.zeros(6, 10).to(dtype)
        dist.recv(base[:, ::2], 0)
        assert oracle.bits(base[:, ::2]) == oracle.bits(value.view(5, 6).t())
        assert not base[:, 1::2].to(torch.float32).any()


def check_tags(rank: int) -> None:
    """Received in the opposite order of tags; messages of one tag stay in their order."""
    num_bytes = 100_000
    if rank == 0:
        works = [dist.isend(pattern(0, i, num_bytes), 1, tag=i // 2) for i in range(8)]
        for work in works:
            assert work is not None
            work.wait()
    else:
        for tag in reversed(range(4)):
            for i in (2 * tag, 2 * tag + 1):
                received = torch.empty(num_bytes, dtype=torch.uint8)
                dist.recv(received, 0, tag=tag)
                oracle.assert_equal(received, pattern(0, i, num_bytes))


def test_tags_in_any_order() -> None:
    run_ranks(2, check_tags)


def check_posted_receives(rank: int) -> None:
    """Receives posted before anything is sent are matched in the order of their posting."""
    if rank == 1:
        buffers = [torch.empty(10, dtype=torch.uint8) for _ in range(6)]
        works: list[Any] = [dist.irecv(b, 0, tag=i % 2) for i, b in enumerate(buffers)]
        dist.barrier()
        for work in works:
            work.wait()
        for i, buffer in enumerate(buffers):
            oracle.assert_equal(buffer, pattern(0, i, 10))
    else:
        dist.barrier()
        for i in (0, 2, 4, 1, 3, 5):
            dist.send(pattern(0, i, 10), 1, tag=i % 2)


def test_receives_posted_early() -> None:
    run_ranks(2, check_posted_receives)


def check_any_source(rank: int) -> None:
    world_size = dist.get_world_size()
    if rank == 0:
        seen: list[int] = []
        for _ in range(2 * (world_size - 1)):
            received = torch.empty(50_000, dtype=torch.uint8)
            source = dist.recv(received, None, tag=5)
            oracle.assert_equal(received, pattern(source, seen.count(source), 50_000))
            seen.append(source)
        assert sorted(seen) == sorted(2 * list(range(1, world_size)))
    else:
        for turn in range(2):
            dist.send(pattern(rank, turn, 50_000), 0, tag=5)
    dist.barrier()


def test_any_source() -> None:
    run_ranks(4, check_any_source)


def check_any_source_async(rank: int) -> None:
    if rank == 0:
        buffer = torch.zeros(3)
        work: Any = dist.irecv(buffer, None)
        work.wait()
        assert work._source_rank() == 1
        assert work.source_rank() == 1
        assert buffer.tolist() == [1, 1, 1]
    elif rank == 1:
        dist.send(torch.ones(3), 0)


def test_any_source_async() -> None:
    run_ranks(3, check_any_source_async)


def check_exchange(rank: int, receive_first: tuple[bool, bool], num_bytes: int) -> None:
    """Both ways at once, also both with the receive in front."""
    other = 1 - rank
    received = torch.empty(num_bytes, dtype=torch.uint8)
    send = dist.P2POp(dist.isend, pattern(rank, 0, num_bytes), other)
    recv = dist.P2POp(dist.irecv, received, other)
    ops = [recv, send] if receive_first[rank] else [send, recv]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    oracle.assert_equal(received, pattern(other, 0, num_bytes))


@pytest.mark.parametrize(
    ("receive_first", "num_bytes"),
    [((False, False), 16 << 20), ((False, True), 8), ((True, True), 16 << 20)],
)
def test_batch_both_ways(receive_first: tuple[bool, bool], num_bytes: int) -> None:
    run_ranks(2, check_exchange, receive_first, num_bytes)


def check_batch_all(rank: int) -> None:
    """Everybody with everybody, several tensors per pair, waited for in another order."""
    world_size = dist.get_world_size()
    peers = [peer for peer in range(world_size) if peer != rank]
    buffers = {
        (p, i): torch.empty(1000 * i + 1, dtype=torch.uint8) for p in peers for i in range(3)
    }
    ops = [dist.P2POp(dist.irecv, buffer, p, tag=i) for (p, i), buffer in buffers.items()]
    ops += [
        dist.P2POp(dist.isend, pattern(rank, i, 1000 * i + 1), p, tag=i)
        for i in (2, 0, 1)
        for p in peers
    ]
    for work in reversed(dist.batch_isend_irecv(ops)):
        work.wait()
    for (p, i), buffer in buffers.items():
        oracle.assert_equal(buffer, pattern(p, i, 1000 * i + 1))


def test_batch_with_all() -> None:
    run_ranks(4, check_batch_all)


def check_isend_returns(rank: int) -> None:
    """However much is sent to a rank that does not listen before all isends have returned."""
    if rank == 0:
        works: list[Any] = [dist.isend(pattern(0, i, 4 << 20), 1, tag=i) for i in range(8)]
        assert not works[-1].is_completed()
        dist.barrier()
        for work in works:
            work.wait()
    else:
        dist.barrier()
        for i in range(8):
            received = torch.empty(4 << 20, dtype=torch.uint8)
            dist.recv(received, 0, tag=i)
            oracle.assert_equal(received, pattern(0, i, 4 << 20))


def test_isend_never_blocks() -> None:
    run_ranks(2, check_isend_returns)


def check_dropped_sends(rank: int) -> None:
    """Delivered without a wait, while the sender is elsewhere, and when it destroys the group."""
    if rank == 0:
        for i in range(5):
            dist.isend(pattern(0, i, 700_000), 1)
        time.sleep(0.05)
    else:
        for i in range(5):
            received = torch.empty(700_000, dtype=torch.uint8)
            dist.recv(received, 0)
            oracle.assert_equal(received, pattern(0, i, 700_000))
    dist.destroy_process_group()


def test_sends_without_wait_arrive() -> None:
    run_ranks(2, check_dropped_sends, fresh=True)


def check_with_collectives(rank: int) -> None:
    """Messages and collectives do not wait for each other."""
    received = torch.empty(2 << 20, dtype=torch.uint8)
    work: Any
    if rank == 0:
        work = dist.irecv(received, 1)
        dist.all_reduce(torch.ones(1000))
        dist.all_reduce(torch.ones(300_000))
    else:
        dist.all_reduce(torch.ones(1000))
        work = dist.isend(pattern(1, 0, 2 << 20), 0)
        dist.all_reduce(torch.ones(300_000))
    work.wait()
    if rank == 0:
        oracle.assert_equal(received, pattern(1, 0, 2 << 20))


def test_beside_collectives() -> None:
    run_ranks(2, check_with_collectives)


def check_futures(rank: int) -> None:
    """of sends and receives, which Gloo does not have."""
    if rank == 0:
        work: Any = dist.isend(torch.arange(5), 1)
        work.get_future().wait()
    else:
        buffer = torch.zeros(5, dtype=torch.int64)
        work = dist.irecv(buffer, 0)
        doubled = work.get_future().then(lambda future: future.value()[0] * 2).wait()
        assert doubled.tolist() == [0, 2, 4, 6, 8]
        assert work.is_completed()


def test_futures() -> None:
    run_ranks(2, check_futures)


def check_objects(rank: int) -> None:
    if rank == 0:
        dist.send_object_list([{"a": 1}, "b" * 10_000, None], 1)
    elif rank == 1:
        items: list[Any] = [0, 0, 0]
        assert dist.recv_object_list(items, 0) == 0
        assert items == [{"a": 1}, "b" * 10_000, None]
        dist.send_object_list([3.5], 2)
    else:
        items = [None]
        assert dist.recv_object_list(items, 1) == 1
        assert items == [3.5]


def test_object_lists() -> None:
    run_ranks(3, check_objects)


def check_subgroup(rank: int) -> None:
    """dst and src are global ranks, group_dst and group_src the group's."""
    group = dist.new_group([1, 2], backend="ringcomm")
    if rank == 2:
        dist.send(torch.tensor([7]), 1, group=group)
        dist.send(torch.tensor([8]), group=group, group_dst=0)
    elif rank == 1:
        value = torch.tensor([0])
        dist.recv(value, 2, group=group)
        assert value.item() == 7
        assert dist.recv(value, group=group) == 2
        assert value.item() == 8
    dist.barrier()


def test_in_a_subgroup() -> None:
    run_ranks(3, check_subgroup)
