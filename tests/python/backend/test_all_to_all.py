"""all_to_all in its forms: lists, one tensor, splits; what torch builds on it."""

from __future__ import annotations

import itertools
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_gather_scatter import TYPES_OF_WORLDS, any_bits, assert_same_bits, finish, sizes_of
from torch import Tensor

# table[i][j]: rows that rank i has for rank j.
Table = list[list[int]]
# The last: several pieces for some pairs, none for others.
TABLES: list[Table] = [
    [[0, 0], [0, 0]],
    [[1, 0], [5, 2]],
    [[3, 3], [3, 3]],
    [[0, 2, 1], [7, 0, 0], [1, 1, 1]],
    [[4, 4, 4], [4, 4, 9], [4, 0, 4]],  # rank 0's are all alike, the others' are not
    [[7, 300_000, 0], [0, 1, 150_001], [400_003, 0, 0]],
]


def part(source: int, target: int, num_elems: int, dtype: torch.dtype) -> Tensor:
    return any_bits(100 * source + target, num_elems, dtype)


def column(table: Table, rank: int) -> list[int]:
    return [row[rank] for row in table]


def check_even(rank: int, dtype: torch.dtype) -> None:
    world_size = dist.get_world_size()
    for num_elems in sizes_of(dtype):
        given = [part(rank, r, num_elems, dtype) for r in range(world_size)]
        expected = [part(r, rank, num_elems, dtype) for r in range(world_size)]
        outputs = [torch.empty_like(share) for share in given]
        finish(dist.all_to_all(outputs, given, async_op=num_elems == 13))
        output = torch.empty(world_size * num_elems, dtype=dtype)
        single = torch.cat(given)
        finish(dist.all_to_all_single(output, single, async_op=num_elems == 13))
        for r in range(world_size):
            assert_same_bits(outputs[r], expected[r])
            assert_same_bits(given[r], part(rank, r, num_elems, dtype))
        assert_same_bits(output, torch.cat(expected))
        assert_same_bits(single, torch.cat(given))
        dist.all_to_all(given, given)  # in place
        for r in range(world_size):
            assert_same_bits(given[r], expected[r])


@pytest.mark.parametrize(("world_size", "dtype"), TYPES_OF_WORLDS)
def test_even(world_size: int, dtype: torch.dtype) -> None:
    run_ranks(world_size, check_even, dtype)


def check_table(rank: int, table: Table, dtype: torch.dtype, width: int, is_async: bool) -> None:
    """Rows of `width` elements, in lists and in one tensor."""
    world_size = dist.get_world_size()
    given = [part(rank, r, width * table[rank][r], dtype) for r in range(world_size)]
    expected = [part(r, rank, width * table[r][rank], dtype) for r in range(world_size)]
    outputs = [torch.empty_like(share) for share in expected]
    finish(dist.all_to_all(outputs, given, async_op=is_async))
    for output, share in zip(outputs, expected, strict=True):
        assert_same_bits(output, share)
    single = torch.cat(given).view(-1, width)
    output = torch.empty(sum(column(table, rank)), width, dtype=dtype)
    finish(
        dist.all_to_all_single(output, single, column(table, rank), table[rank], async_op=is_async)
    )
    assert_same_bits(output.view(-1), torch.cat(expected))
    # Every second column of a wider tensor, on both sides.
    wide = torch.zeros(len(single), 2 * width, dtype=dtype)
    wide[:, ::2] = single
    wide_output = torch.zeros(len(output), 2 * width, dtype=dtype)
    work: Any = dist.all_to_all_single(
        wide_output[:, ::2], wide[:, ::2], column(table, rank), table[rank], async_op=is_async
    )
    finish(work)
    assert_same_bits(wide_output[:, ::2].contiguous(), output)
    assert not wide_output[:, 1::2].any()


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_uneven(table: Table) -> None:
    is_async = TABLES.index(table) % 2 == 1
    run_ranks(len(table), check_table, table, torch.float32, 1, is_async)


# More types and splits: test_random_sequences.py.
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex128])
def test_uneven_types(dtype: torch.dtype) -> None:
    run_ranks(3, check_table, TABLES[3], dtype, 3, False)


def check_mixed(rank: int) -> None:
    """Rank 0 gives no splits where they are even for it; the others have some."""
    table = [[2, 2, 2], [2, 5, 1], [2, 0, 3]]
    splits = ([], []) if rank == 0 else (column(table, rank), table[rank])
    given = torch.cat([part(rank, r, n, torch.int64) for r, n in enumerate(table[rank])])
    output = torch.empty(sum(column(table, rank)), dtype=torch.int64)
    dist.all_to_all_single(output, given, splits[0] or None, splits[1] or None)
    expected = [part(r, rank, n, torch.int64) for r, n in enumerate(column(table, rank))]
    assert_same_bits(output, torch.cat(expected))


def test_ranks_with_and_without_splits() -> None:
    run_ranks(3, check_mixed)


def check_users(rank: int) -> None:
    """Functional collectives, their gradient, and DTensor from one dimension to another."""
    import torch.distributed._functional_collectives as funcol
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    world_size = dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    sent = torch.arange(float(world_size * 2)).requires_grad_()
    moved = funcol.all_to_all_single_autograd(sent * (rank + 1), None, None, group)
    expected = [(r + 1) * torch.arange(2.0).add(2 * rank) for r in range(world_size)]
    assert_same_bits(moved.detach() + 0, torch.cat(expected))
    (moved.sum() * 2).backward()
    assert sent.grad is not None
    assert_same_bits(sent.grad, torch.full((world_size * 2,), 2.0 * (rank + 1)))

    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(7.0 * 5).view(7, 5)
    rows = DTensor.from_local(
        _chunk(whole, rank, 0),
        mesh,
        [Shard(0)],
        shape=whole.shape,
        stride=whole.stride(),
    )
    columns = rows.redistribute(mesh, [Shard(1)]).to_local()
    assert_same_bits(columns.contiguous(), _chunk(whole, rank, 1).contiguous())


def _chunk(whole: Tensor, rank: int, dim: int) -> Tensor:
    return whole.chunk(dist.get_world_size(), dim)[rank]


def test_what_torch_builds_on_it() -> None:
    run_ranks(3, check_users)


def check_alone(rank: int) -> None:
    for num_elems, is_async in itertools.product((0, 5), (False, True)):
        value = torch.arange(float(num_elems))
        output = torch.zeros(num_elems)
        finish(dist.all_to_all_single(output, value, async_op=is_async))
        oracle.assert_equal(output, value)
        outputs = [torch.zeros(num_elems)]
        finish(dist.all_to_all(outputs, [value], async_op=is_async))
        oracle.assert_equal(outputs[0], value)


def test_world_of_one() -> None:
    run_ranks(1, check_alone)
