"""What is special of some tensors: strided, sparse, or in memory that they share."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from failures import ENVS
from ranks import in_ranks
from torch import Tensor

import ringcomm


@in_ranks(2)
def test_views_with_a_negative_bit_are_refused(rank: int) -> None:
    """torch's dispatcher would hand a backend copies, and drop what it writes there."""
    view, plain = torch.tensor([1 + 2j, 3 - 1j]).conj().imag, torch.zeros(2)
    for call in (
        lambda: dist.all_reduce(view),
        lambda: dist.broadcast(view, rank),
        lambda: dist.all_gather([plain, view], plain),
        lambda: dist.all_gather_into_tensor(torch.zeros(4), view),
        lambda: dist.send(view, 1 - rank),
        lambda: dist.recv(view, 1 - rank),
    ):
        with pytest.raises(NotImplementedError, match=r"negative bit.*resolve_neg"):
            call()
    value = torch.tensor([-2.0, 1.0])
    oracle.assert_equal(view.resolve_neg(), value)
    dist.all_reduce(value)
    oracle.assert_equal(value, torch.tensor([-4.0, 2.0]))


@in_ranks(2)
def test_coalesced_blocks(rank: int) -> None:
    """The work of a block: done when all are, with all results; an exception leaves no block."""
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="without startCoalescing"):
        backend._end_coalescing()
    tensors = [torch.full((n,), rank + 1.0) for n in (2, 70_000)]
    backend._start_coalescing()
    dist.broadcast(tensors[0], 1, async_op=True)
    dist.reduce(tensors[1], 0, async_op=True)
    work = backend._end_coalescing()
    future = work.get_future()
    future.wait()
    assert work.is_completed()
    assert work.is_success()
    assert len(future.value()) == 2
    for result, value in zip(work.result(), (2.0, 3.0 if rank == 0 else 2.0), strict=True):
        assert (result == value).all()
    backend._start_coalescing()
    dist.barrier()
    backend._start_coalescing()
    assert backend._end_coalescing().result() == []
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        received = torch.zeros(1000)
        dist.isend(torch.full((1000,), float(rank)), 1 - rank)
        dist.irecv(received, 1 - rank)
    manager.wait()
    assert (received == 1 - rank).all()
    values = [torch.full((3,), float(rank)), torch.full((2, 2), rank + 10.0)]
    lists = [[torch.empty_like(value) for value in values] for _ in range(2)]
    dist.all_gather_coalesced(lists, values)
    assert [[part.max().item() for part in of_rank] for of_rank in lists] == [[0, 10], [1, 11]]
    with pytest.raises(ValueError, match="all_gather_coalesced"):
        dist.all_gather_coalesced(lists[1:], values)


@in_ranks(2)
def test_results_are_written_to_conjugate_views(rank: int) -> None:
    """torch's dispatcher would hand over a copy."""
    x = torch.full((2,), complex(1 + rank, 10 + rank)).conj()
    dist.reduce(x, 0)
    assert rank > 0 or x.tolist() == [3 - 21j] * 2
    mine = torch.full((2,), complex(1, 1 + rank)).conj()
    for shard in (torch.zeros(1, dtype=torch.cfloat).conj() for _ in range(2)):
        dist.reduce_scatter_tensor(shard, mine)
        assert shard.tolist() == [2 - 3j]


@in_ranks(2)
def test_inputs_that_nobody_keeps(rank: int) -> None:
    """https://github.com/karpathy/nanochat/pull/843: reused before they were sent."""
    size, outs, works = 40_000, [], []
    for turn in range(12):
        outs.append(torch.zeros(2 * size))
        x = torch.full((size,), 10.0 * rank + turn)
        works.append(dist.all_gather_into_tensor(outs[-1], x, async_op=True).get_future())
        del x
        torch.full((size,), -1.0)  # takes the memory that has just been freed
        if rank == 1 and turn == 0:
            time.sleep(0.05)  # the other rank is ahead
    for turn, (out, work) in enumerate(zip(outs, works, strict=True)):
        work.wait()
        assert out.view(2, size).aminmax(dim=1).min.tolist() == [turn, 10.0 + turn]
        assert out.view(2, size).aminmax(dim=1).max.tolist() == [turn, 10.0 + turn]


# ---- sparse tensors

ROWS, COLUMNS = 50, 3
# How many entries each rank has: nobody, somebody or everybody; shares are padded to the largest.
COUNTS = {1: [[6]], 2: [[0, 0], [7, 0], [30, 30]], 4: [[5, 0, 90, 2]]}


def entries(rank: int, num_entries: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers at places of which some are there twice; not coalesced."""
    generator = torch.Generator().manual_seed(rank)
    places = torch.randint(0, ROWS, (1, num_entries), generator=generator)
    numbers = torch.randint(0, 9, (num_entries, COLUMNS), generator=generator)
    return torch.sparse_coo_tensor(places, numbers.to(dtype), (ROWS, COLUMNS))


@in_ranks(tuple(COUNTS))
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_sum(rank: int, dtype: torch.dtype, is_async: bool) -> None:
    for counts in COUNTS[dist.get_world_size()]:
        all_entries = [entries(r, count, dtype) for r, count in enumerate(counts)]
        total = torch.stack([own.to_dense().double() for own in all_entries]).sum(0)
        tensor = all_entries[rank].clone()
        ahead, behind = torch.ones(5), torch.ones(7)
        works = [dist.all_reduce(each, async_op=is_async) for each in (ahead, tensor, behind)]
        for work in works:
            if work is not None:
                work.wait()
        assert ahead.eq(len(counts)).all()
        assert behind.eq(len(counts)).all()
        assert tensor.is_coalesced()
        assert tensor.dtype == dtype
        assert torch.equal(tensor.to_dense().double(), total)


@in_ranks(2)
def test_sparse_dimensions_and_reductions(rank: int) -> None:
    """Several sparse dimensions; another reduction is refused, and nothing was exchanged."""
    dense = torch.arange(24.0).reshape(2, 3, 4) * (torch.arange(24).reshape(2, 3, 4) % 2 == rank)
    tensor = dense.to_sparse()
    dist.all_reduce(tensor)
    assert torch.equal(tensor.to_dense(), torch.arange(24.0).reshape(2, 3, 4))
    with pytest.raises(NotImplementedError, match="SUM only"):
        dist.all_reduce(entries(rank, 5, torch.float32), dist.ReduceOp.MAX)
    dist.barrier()


# ---- inputs and outputs that share memory: right in place (sequence_calls.py), refused otherwise
#
# On every transport. Gloo copies most inputs, and so accepts more forms.

RANKS = 3
# In an envelope, in one message, and with a share above every limit for messages.
OVERLAP_SIZES = (8, 20_000, 300_000)


def refused(fn: Callable[..., object], *args: object) -> None:
    with pytest.raises(ValueError, match="share memory"):
        fn(*args)


def overlapping(rank: int, make: Callable[[int], Tensor], size: int) -> None:
    """On every rank alike, so that no rank waits; only the root of a gather or scatter has both."""
    x = make(RANKS * size + 1).zero_()
    head, tail = x[:-1], x[1:]
    other = (rank + 1) % RANKS
    slots = list(head.split(size))
    for begin in (other * size, rank * size + 1):
        refused(dist.all_gather_into_tensor, head, x[begin : begin + size])
        refused(dist.reduce_scatter_tensor, x[begin : begin + size], head)
        refused(dist.all_gather, slots, x[begin : begin + size])
        refused(dist.reduce_scatter, x[begin : begin + size], slots)
        if rank == 1:
            refused(dist.gather, x[begin : begin + size], slots, 1)
            refused(dist.scatter, x[begin : begin + size], slots, 1)
    refused(dist.all_to_all_single, tail, head)
    refused(dist.all_to_all, slots[1:] + slots[:1], slots)
    # In place a share begins where its input does; here only the first one does.
    given, taken = [size] * RANKS, [size] * RANKS
    for sizes, more in ((given, 1), (taken, -1)):
        sizes[other] += more
        sizes[(rank + 2) % RANKS] -= more
    refused(dist.all_to_all_single, head, head, taken, given)
    assert not bool(x.any())


@in_ranks(RANKS, ENVS)
def test_other_overlaps_than_in_place_are_refused(rank: int) -> None:
    for make in (torch.empty, ringcomm.empty_shared):
        for size in OVERLAP_SIZES:
            overlapping(rank, make, size)
    # Inputs that share memory with each other are no results.
    same = torch.full((4,), float(rank))
    out = torch.empty(RANKS, 4)
    dist.all_to_all(list(out), [same] * RANKS)
    assert out.tolist() == [[float(q)] * 4 for q in range(RANKS)]
    columns = torch.full((4, RANKS), float(rank))
    dist.all_to_all(list(columns.T), list(columns.T))
    assert columns.T.tolist() == out.tolist()
