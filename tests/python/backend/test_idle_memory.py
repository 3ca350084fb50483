"""What groups hold of the machine's memory: before their first call, idle, and destroyed."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from ranks import in_ranks

import ringcomm
from ringcomm.measure.machine import mapped_memory

WORLD = 2
NUM_GROUPS = 4
NUM_ELEMS = 1 << 20


def held_bytes() -> int:
    """By this rank: its share of the pages that ranks share."""
    return mapped_memory()["share_bytes"]


def use(group: Any, rank: int) -> None:
    """Through regions and links."""
    x = torch.arange(NUM_ELEMS, dtype=torch.int32) + rank
    dist.all_reduce(x, group=group)
    assert torch.equal(x, 2 * torch.arange(NUM_ELEMS, dtype=torch.int32) + 1)
    got = torch.zeros(NUM_ELEMS, dtype=torch.int32)
    work = dist.isend(x + rank, 1 - rank, group=group)
    dist.recv(got, 1 - rank, group=group)
    assert work is not None
    work.wait()
    assert torch.equal(got, x + 1 - rank)


def fall_below(most_bytes: int) -> bool:
    """Whether it does within a minute; pages are returned after 10 to 22 s."""
    deadline = time.monotonic() + 60
    while held_bytes() > most_bytes:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


@in_ranks(WORLD, fresh=True)
def test_idle_groups_return_what_they_used(rank: int) -> None:
    """https://github.com/vllm-project/vllm/pull/46234: idle communicators kept their buffers."""
    groups = [dist.new_group(backend="ringcomm") for _ in range(NUM_GROUPS)]
    at_first = held_bytes()
    for group in groups:
        use(group, rank)
    used = held_bytes() - at_first
    assert used > NUM_GROUPS << 20
    # More shared memory than is kept for the next buffers, and free.
    buffer = ringcomm.empty_shared(96 << 20, dtype=torch.uint8).fill_(1)
    assert held_bytes() - at_first >= buffer.nbytes
    del buffer
    assert fall_below(at_first + used // 4)
    for group in groups:
        use(group, rank)


@in_ranks(WORLD)
def test_a_group_that_was_not_used_holds_little(rank: int) -> None:
    """https://github.com/NVIDIA/nccl/issues/2363: buffers of 512 MiB before the first message."""
    before = held_bytes()
    groups = [dist.new_group(backend="ringcomm") for _ in range(10)]
    for group in groups:
        dist.barrier(group)
    assert held_bytes() - before < len(groups) * (128 << 10)
    for group in groups:
        dist.destroy_process_group(group)
    assert rank < WORLD


@in_ranks(WORLD)
def test_memory_does_not_grow_with_destroyed_groups(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/40400, and 107298: it did."""
    held = []
    for _ in range(12):
        group: Any = dist.new_group(backend="ringcomm")
        use(group, rank)
        dist.destroy_process_group(group)
        del group
        dist.barrier()  # the other rank has unmapped it too
        held.append(mapped_memory())
    assert held[-1]["mapped_bytes"] == held[1]["mapped_bytes"]
    assert held[-1]["resident_bytes"] <= held[1]["resident_bytes"] + (1 << 20)
