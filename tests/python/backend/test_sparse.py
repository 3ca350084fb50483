"""all_reduce of sparse tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks
from torch import Tensor

import ringcomm

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
    """In order with calls before and after it."""
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


@in_ranks(2)
@pytest.mark.parametrize("kind", ["dtype", "shape", "layout"])
def test_mismatch_is_told_to_every_rank(rank: int, kind: str) -> None:
    group = dist.new_group()
    tensor = entries(rank, 5, torch.float64 if (kind, rank) == ("dtype", 1) else torch.float32)
    if rank == 1 and kind == "shape":
        tensor = torch.sparse_coo_tensor(tensor._indices(), tensor._values(), (ROWS + 1, COLUMNS))
    if rank == 1 and kind == "layout":
        tensor = tensor.to_dense()
    with pytest.raises(ringcomm.MismatchError):
        dist.all_reduce(tensor, group=group)
