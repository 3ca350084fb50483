"""What users of c10d, Gloo and NCCL reported of collectives, messages and groups."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from oracle import all_equal
from ranks import in_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

# Each letter is the host of a rank.
ENVS: dict[str, Any] = {
    "shm": None,
    "messages": {"RINGCOMM_TRANSPORT": "messages"},
    "aaba": [{"RINGCOMM_HOST_ID": host} for host in "aaba"],
}
in_four = partial(in_ranks, 4, ENVS)
WORLD = range(4)


def numbered(rank: int, rows: int = 4, columns: int = 3) -> Tensor:
    """No two elements of any rank are equal."""
    return torch.arange(rows * columns).view(rows, columns) + 1000 * rank


STRIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "column": lambda tensor: tensor.repeat(1, 2)[:, : tensor.shape[1]],
    "transposed": lambda tensor: tensor.t().contiguous().t(),
    "every second": lambda tensor: tensor.repeat_interleave(2, 0)[::2],
    "chunk": lambda tensor: torch.cat([tensor, tensor + 7]).chunk(2)[0],
    "of numpy": lambda tensor: torch.from_numpy(np.asfortranarray(tensor.numpy())),
}


@pytest.mark.parametrize("kind", STRIDED)
@in_four()
def test_strided_tensors(rank: int, kind: str) -> None:
    """Their elements are meant, in their order, and nothing between them is written.

    https://github.com/pytorch/pytorch/issues/192920 https://github.com/pytorch/pytorch/issues/159548
    https://github.com/pytorch/pytorch/issues/74809 https://github.com/pytorch/pytorch/issues/20421
    """
    strided, all_of = STRIDED[kind], [numbered(other) for other in WORLD]
    total = torch.stack(all_of).sum(0)
    mine = strided(numbered(rank))
    assert mine.is_contiguous() == (kind == "chunk")

    def empty() -> Tensor:
        return strided(torch.zeros_like(total))

    tensor = strided(numbered(rank))
    dist.all_reduce(tensor)
    assert tensor.equal(total)
    tensor = strided(numbered(rank))
    dist.broadcast(tensor, 1)
    assert tensor.equal(all_of[1])
    tensor = strided(numbered(rank))
    dist.reduce(tensor, 2)
    assert tensor.equal(total if rank == 2 else all_of[rank])
    found = [empty() for _ in WORLD]
    dist.all_gather(found, mine)
    assert all_equal(found, all_of)
    found = [empty() for _ in WORLD]
    dist.gather(mine, found if rank == 3 else None, 3)
    assert rank != 3 or all_equal(found, all_of)
    given = [strided(numbered(to) + 100 * rank) for to in WORLD]
    tensor = empty()
    dist.scatter(tensor, given if rank == 1 else None, 1)
    assert tensor.equal(numbered(rank) + 100)
    tensor = empty()
    dist.reduce_scatter(tensor, given)
    assert tensor.equal(4 * numbered(rank) + 600)
    found = [empty() for _ in WORLD]
    dist.all_to_all(found, given)
    assert all(found[other].equal(numbered(rank) + 100 * other) for other in WORLD)
    wait = dist.isend(mine, (rank + 1) % 4)
    tensor = empty()
    dist.recv(tensor, (rank - 1) % 4)
    assert wait is not None
    wait.wait()
    assert tensor.equal(all_of[rank - 1])


@in_four(fresh=True)
def test_an_all_to_all_with_another_shape(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/158016"""
    given = torch.zeros(4, 3 if rank == 3 else 4)
    taken = torch.full_like(given, 5)
    with pytest.raises(dist.DistBackendError, match="bytes") as caught:
        dist.all_to_all_single(taken, given)
    assert type(caught.value).__name__ == "MismatchError"
    assert "rank 3" in str(caught.value)


@in_four()
def test_splits_that_do_not_fit(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/101380"""
    for size, splits in ((7, None), (8, [2, 2, 2, 3]), (8, [4, 4]), (8, [-1, 3, 3, 3])):
        with pytest.raises((ValueError, RuntimeError)):
            dist.all_to_all_single(torch.zeros(size), torch.zeros(size), splits, splits)
    dist.barrier()


@in_four()
def test_groups_of_some_ranks_then_of_all(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/145376"""
    for ranks in ([0, 1, 2], [3, 1], [2], list(WORLD), [0, 1, 2]):
        group = dist.new_group(ranks)
        if rank in ranks:
            tensor = torch.tensor([rank])
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == sum(ranks)
            dist.destroy_process_group(group)
    part = dist.new_group([0, 2], use_local_synchronization=True) if rank % 2 == 0 else None
    everyone = dist.new_group()
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=everyone)
    assert tensor.item() == 4
    if part is not None:
        dist.all_reduce(tensor, group=part)
        assert tensor.item() == 8
        dist.destroy_process_group(part)
    dist.destroy_process_group(everyone)


@in_four(fresh=True)
def test_the_end_after_meshes_of_some_and_all_ranks(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/190396"""
    part = init_device_mesh("cpu", (3,))
    if part.get_coordinate() is not None:
        dist.all_reduce(torch.ones(1), group=part.get_group())
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for dim in range(2):
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=whole.get_group(dim))
        assert tensor.item() == 2
    dist.destroy_process_group()
    assert not dist.is_initialized()


@in_four()
def test_messages_by_their_tags(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/94819 https://github.com/pytorch/pytorch/issues/125079"""
    sizes = {1: 5, 2: 70_000, 3: 1}
    peer = rank ^ 1
    works = [
        dist.isend(torch.full((n,), tag + 10 * rank), peer, tag=tag) for tag, n in sizes.items()
    ]
    for tag in (2, 3, 1):
        tensor = torch.zeros(sizes[tag], dtype=torch.long)
        dist.recv(tensor, peer, tag=tag)
        assert tensor.unique().tolist() == [tag + 10 * peer]
    for work in works:
        assert work is not None
        work.wait()


@in_four()
def test_batches_that_differ_between_ranks(rank: int) -> None:
    """https://github.com/NVIDIA/nccl/issues/2130 https://github.com/pytorch/pytorch/issues/109401"""
    peer = rank ^ 1
    mine, theirs, last = torch.full((9,), rank), torch.zeros(9, dtype=torch.long), torch.zeros(1)
    batch = [dist.P2POp(dist.isend, mine, peer)] if rank % 2 else []
    batch += [dist.P2POp(dist.irecv, theirs, peer)]
    batch += [] if rank % 2 else [dist.P2POp(dist.isend, mine, peer)]
    works = dist.batch_isend_irecv(batch)
    if rank % 2:  # the other rank has no such batch: a send, and later a receive
        works += dist.batch_isend_irecv([dist.P2POp(dist.irecv, last, peer)])
    else:
        dist.send(torch.tensor([4.0]), peer)
    for work in works:
        work.wait()
    assert theirs.unique().tolist() == [peer]
    assert last.item() == (4 if rank % 2 else 0)


@in_four(fresh=True, may_die=(1,))
def test_an_exception_of_a_rank_while_others_gather(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/76760 https://github.com/pytorch/pytorch/issues/132696

    They raise, and destroying the group ends.
    """
    dist.barrier()
    if rank == 1:
        os._exit(3)
    with pytest.raises(dist.DistBackendError, match="rank 1"):
        dist.all_gather([torch.zeros(4) for _ in WORLD], torch.ones(4))
    dist.destroy_process_group()


@in_four(fresh=True)
def test_a_group_is_left_while_others_are_late(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/75097

    The first to leave waits for nobody; a later call of the others says who has left.
    """
    group = dist.new_group(timeout=datetime.timedelta(seconds=30))
    dist.all_reduce(torch.ones(1), group=group)
    if rank == 2:
        dist.destroy_process_group(group)
    dist.barrier()
    if rank != 2:
        with pytest.raises(dist.DistBackendError, match="rank 2"):
            dist.all_reduce(torch.ones(1), group=group)


@in_four()
def test_a_profiler_sees_each_call_once(rank: int) -> None:
    """https://github.com/ROCm/aiter/issues/1946 https://github.com/pytorch/pytorch/pull/46471

    Once also where the call is synchronous, and has no work: torch's profilers know a backend's
    calls by events that are asynchronous.
    """
    tensor = torch.ones(100)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        dist.all_reduce(tensor)
        dist.all_gather([torch.empty(100) for _ in WORLD], tensor)
        dist.broadcast(tensor, 0)
        work: Any = dist.all_reduce(tensor, async_op=True)
        work.wait()
    counts = {event.key: event.count for event in profiler.key_averages()}
    assert counts["ringcomm:all_reduce"] == 2
    assert counts["ringcomm:all_gather"] == counts["ringcomm:broadcast"] == 1
    events = [e for e in profiler.events() or () if e.name.startswith("ringcomm:")]
    assert [event.is_async for event in events] == [True] * 4
