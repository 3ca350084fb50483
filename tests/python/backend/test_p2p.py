"""send and recv over shared memory and over messages: sizes, sources, large batches, the ends.

Matching by source, tag and order, layouts, types and objects: test_collectives.py and
test_random_sequences.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

ENVS: dict[str, dict[str, str]] = {"shm": {}, "p2p": {"RINGCOMM_TRANSPORT": "p2p"}}
# Around a slot of a link (128 KiB, of which a message's first has 64 bytes for a header); all four
# slots; many more.
SIZES = [*(0, 1), *((128 << 10) - 64 + i for i in (-1, 0, 1, 64)), 512 << 10, 3_000_001]


def pattern(source: int, tag: int, num_bytes: int) -> torch.Tensor:
    return oracle.integers(source, num_bytes, torch.uint8, seed=tag)


def received(source: int | None, num_bytes: int, tag: int = 0) -> torch.Tensor:
    tensor = torch.empty(num_bytes, dtype=torch.uint8)
    dist.recv(tensor, source, tag=tag)
    return tensor


def check_sizes(rank: int) -> None:
    for num_bytes in SIZES:
        if rank == 0:
            dist.send(pattern(0, 1, num_bytes), 1)
        elif rank == 1:
            oracle.assert_equal(received(0, num_bytes), pattern(0, 1, num_bytes))


def check_both_ways(rank: int) -> None:
    """Batches of large messages, also with both receives in front."""
    if rank > 1:
        return
    for receive_first, num_bytes in ((0b00, 16 << 20), (0b01, 8), (0b11, 16 << 20)):
        tensor = torch.empty(num_bytes, dtype=torch.uint8)
        ops = [
            dist.P2POp(dist.isend, pattern(rank, 0, num_bytes), 1 - rank),
            dist.P2POp(dist.irecv, tensor, 1 - rank),
        ]
        for work in dist.batch_isend_irecv(ops[::-1] if receive_first >> rank & 1 else ops):
            work.wait()
        oracle.assert_equal(tensor, pattern(1 - rank, 0, num_bytes))


def check_isend_never_blocks(rank: int) -> None:
    """However much is sent to a rank that does not listen before all isends have returned."""
    works: list[Any] = []
    if rank == 0:
        works = [dist.isend(pattern(0, i, 4 << 20), 1, tag=i) for i in range(8)]
        assert not works[-1].is_completed()
    dist.barrier()
    for work in works:
        work.wait()
    for i in range(8 if rank == 1 else 0):
        oracle.assert_equal(received(0, 4 << 20, tag=i), pattern(0, i, 4 << 20))


def check_source_and_futures(rank: int) -> None:
    """Works and futures of messages, which Gloo does not have; who sent to any source."""
    buffer = torch.zeros(3)
    work: Any
    if rank == 0:
        work = dist.irecv(buffer, None)
        doubled = work.get_future().then(lambda future: future.value()[0] * 2).wait()
        assert work._source_rank() == work.source_rank() == 1
        assert doubled.tolist() == [2, 2, 2]
        assert work.is_completed()
    elif rank == 1:
        work = dist.isend(torch.ones(3), 0)
        work.get_future().wait()


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


CHECKS: list[Callable[[int], None]] = [
    *(check_sizes, check_both_ways, check_isend_never_blocks),
    *(check_source_and_futures, check_subgroup),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("env", ENVS)
def test_messages(env: str, check: Callable[[int], None]) -> None:
    run_ranks(3, check, env=ENVS[env])


def check_dropped_sends(rank: int) -> None:
    """Delivered without a wait, while the sender is elsewhere, and when it destroys the group."""
    if rank == 0:
        for i in range(5):
            dist.isend(pattern(0, i, 700_000), 1)
        time.sleep(0.05)
    else:
        for i in range(5):
            oracle.assert_equal(received(0, 700_000), pattern(0, i, 700_000))
    dist.destroy_process_group()


@pytest.mark.parametrize("env", ENVS)
def test_sends_without_wait_arrive(env: str) -> None:
    run_ranks(2, check_dropped_sends, fresh=True, env=ENVS[env])


def check_refused(rank: int, is_p2p: bool) -> None:
    with pytest.raises(ValueError, match=r"one memory location.*clone"):
        dist.recv(torch.zeros(1).expand(4), 1 - rank)
    if is_p2p:
        with pytest.raises(ValueError, match="tags over the p2p transport"):
            dist.send(torch.ones(1), 1 - rank, tag=0x7F000000)
    dist.barrier()


@pytest.mark.parametrize("env", ENVS)
def test_what_is_refused(env: str) -> None:
    run_ranks(2, check_refused, env == "p2p", env=ENVS[env])
