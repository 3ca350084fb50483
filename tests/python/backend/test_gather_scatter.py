"""broadcast, gather, scatter, all_gather and reduce_scatter in their forms, against numpy."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

WORLDS = [2, 3, 4]
# What is only moved may be of any type.
MOVED = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint16,
    torch.uint64,
]
# Moves look at no element: every type once; of each size of elements one in large, and those with
# several numbers of ranks.
LARGE = (torch.bool, torch.bfloat16, torch.float32, torch.complex64, torch.complex128)
TYPES_OF_WORLDS = [
    (3 if dtype in LARGE else 2, dtype) for dtype in MOVED if dtype != torch.complex64
] + [(2, torch.complex64), (2, torch.float32), (4, torch.bfloat16)]
# Three pieces of a broadcast (half a board each), two of all_gather (a board each).
BIG_BYTES = 1_200_000


def sizes_of(dtype: torch.dtype) -> list[int]:
    return [0, 1, 13, *([BIG_BYTES // dtype.itemsize + 1] if dtype in LARGE else [])]


def any_bits(rank: int, num_elems: int, dtype: torch.dtype) -> Tensor:
    """Every bit pattern of the type, NaN included; of bool 0 and 1."""
    raw = oracle.integers(rank, num_elems * dtype.itemsize, torch.uint8, seed=9)
    return raw.bitwise_and(1).bool() if dtype == torch.bool else raw.view(dtype)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert oracle.bits(actual) == oracle.bits(expected)


def finish(work: Any) -> None:
    """Waits for an asynchronous call; a synchronous one gave None."""
    if work is not None:
        work.wait()


# ---- broadcast


def check_broadcast(rank: int, dtype: torch.dtype) -> None:
    for root in range(dist.get_world_size()):
        for num_elems in sizes_of(dtype):
            tensor = any_bits(rank, num_elems, dtype)
            finish(dist.broadcast(tensor, root, async_op=num_elems == 13))
            assert_same_bits(tensor, any_bits(root, num_elems, dtype))


@pytest.mark.parametrize(("world_size", "dtype"), TYPES_OF_WORLDS)
def test_broadcast(world_size: int, dtype: torch.dtype) -> None:
    run_ranks(world_size, check_broadcast, dtype)


# ---- gather, scatter


def check_gather_scatter(rank: int, dtype: torch.dtype) -> None:
    world_size = dist.get_world_size()
    for root in range(world_size):
        for num_elems in sizes_of(dtype):
            values = [any_bits(r, num_elems, dtype) for r in range(world_size)]
            is_async = num_elems == 13
            own = values[rank].clone()
            gathered = [torch.empty_like(own) for _ in range(world_size)] if rank == root else None
            finish(dist.gather(own, gathered, root, async_op=is_async))
            for share, value in zip(gathered or [], values, strict=False):
                assert_same_bits(share, value)
            assert_same_bits(own, values[rank])
            output = torch.empty_like(own)
            finish(dist.scatter(output, gathered, root, async_op=is_async))
            assert_same_bits(output, values[rank])
            # In place: this rank's own part of the root's list.
            if gathered is not None:
                gathered[rank].zero_().copy_(values[rank])
            output = own if gathered is None else gathered[rank]
            dist.scatter(output, gathered, root)
            assert_same_bits(output, values[rank])
            dist.gather(output, gathered, root)
            assert_same_bits(output, values[rank])


@pytest.mark.parametrize(("world_size", "dtype"), TYPES_OF_WORLDS)
def test_gather_scatter(world_size: int, dtype: torch.dtype) -> None:
    run_ranks(world_size, check_gather_scatter, dtype)


# ---- all_gather


def check_all_gather(rank: int, dtype: torch.dtype) -> None:
    world_size = dist.get_world_size()
    for num_elems in sizes_of(dtype):
        expected = [any_bits(r, num_elems, dtype) for r in range(world_size)]
        own = expected[rank].clone()
        outputs = [torch.empty_like(own) for _ in range(world_size)]
        dist.all_gather(outputs, own)
        for output, share in zip(outputs, expected, strict=True):
            assert_same_bits(output, share)
        for shape in ((world_size * num_elems,), (world_size, num_elems)):
            gathered = torch.empty(shape, dtype=dtype)
            dist.all_gather_into_tensor(gathered, own)
            assert_same_bits(gathered.view(-1), torch.cat(expected))
        assert_same_bits(own, expected[rank])


@pytest.mark.parametrize(("world_size", "dtype"), TYPES_OF_WORLDS)
def test_all_gather(world_size: int, dtype: torch.dtype) -> None:
    run_ranks(world_size, check_all_gather, dtype)


def check_in_place(rank: int) -> None:
    """ZeRO's way: the input is this rank's part of the output, or the output of the input."""
    world_size = dist.get_world_size()
    for num_elems in (5, 400_001):
        shares = [oracle.integers(r, num_elems, torch.float32) for r in range(world_size)]
        whole = torch.zeros(world_size * num_elems)
        whole.chunk(world_size)[rank].copy_(shares[rank])
        dist.all_gather_into_tensor(whole, whole.chunk(world_size)[rank])
        oracle.assert_equal(whole, torch.cat(shares))
        inputs = [
            oracle.integers(r, world_size * num_elems, torch.float32) for r in range(world_size)
        ]
        whole = inputs[rank].clone()
        dist.reduce_scatter_tensor(whole.chunk(world_size)[rank], whole)
        expected = oracle.reduced(inputs, "sum").chunk(world_size)[rank]
        oracle.assert_equal(whole.chunk(world_size)[rank], expected)


@pytest.mark.parametrize("world_size", WORLDS)
def test_in_place(world_size: int) -> None:
    run_ranks(world_size, check_in_place)


# ---- reduce_scatter


def check_reduce_scatter(rank: int, dtype: torch.dtype, op: str) -> None:
    world_size = dist.get_world_size()
    reduce_op = getattr(dist.ReduceOp, op.upper())
    # The last: more than one piece (a board of 1 MiB has a share for each of the others).
    for num_elems in (0, 1, 13, BIG_BYTES // dtype.itemsize + 1):
        inputs = [oracle.integers(r, world_size * num_elems, dtype) for r in range(world_size)]
        expected = oracle.reduced(inputs, op)[rank * num_elems : (rank + 1) * num_elems]
        own = inputs[rank].clone()
        output = torch.empty(num_elems, dtype=dtype)
        dist.reduce_scatter_tensor(output, own, reduce_op)
        oracle.assert_equal(output, expected)
        output = torch.empty(num_elems, dtype=dtype)
        parts = [own[r * num_elems : (r + 1) * num_elems] for r in range(world_size)]
        dist.reduce_scatter(output, parts, reduce_op)
        oracle.assert_equal(output, expected)
        oracle.assert_equal(own, inputs[rank])


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_reduce_scatter(world_size: int, dtype: torch.dtype) -> None:
    op = ("sum", "avg", "max")[(world_size + dtype.itemsize // 2) % 3]
    run_ranks(world_size, check_reduce_scatter, dtype, op)


# ---- coalesced


def check_coalesced(rank: int, is_async: bool) -> None:
    """The forms that DTensor and functional collectives use, and torch's manager makes."""
    world_size = dist.get_world_size()
    sizes = [3, 0, 1000, 70_000]
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.float32]
    values = [
        [
            oracle.integers(r, world_size * n, dtype, seed)
            for seed, (n, dtype) in enumerate(zip(sizes, dtypes, strict=True))
        ]
        for r in range(world_size)
    ]
    totals = [oracle.reduced([own[i] for own in values], "sum") for i in range(len(sizes))]

    mine = [tensor.clone() for tensor in values[rank]]
    with dist._coalescing_manager(async_ops=is_async) as manager:
        for tensor in mine:
            dist.all_reduce(tensor)
    finish(manager if is_async else None)
    for tensor, total in zip(mine, totals, strict=True):
        oracle.assert_equal(tensor, total)

    outputs = [torch.empty(n, dtype=dtype) for n, dtype in zip(sizes, dtypes, strict=True)]
    with dist._coalescing_manager(async_ops=is_async) as manager:
        for output, tensor in zip(outputs, values[rank], strict=True):
            dist.reduce_scatter_tensor(output, tensor)
    finish(manager if is_async else None)
    for output, total, n in zip(outputs, totals, sizes, strict=True):
        oracle.assert_equal(output, total[rank * n : (rank + 1) * n])

    lists = [[torch.empty_like(t) for t in values[rank]] for _ in range(world_size)]
    group: Any = dist.group.WORLD
    finish(group.allgather_coalesced(lists, values[rank]))
    for r in range(world_size):
        for share, value in zip(lists[r], values[r], strict=True):
            oracle.assert_equal(share, value)

    gathered = [torch.empty(world_size * t.numel(), dtype=t.dtype) for t in values[rank]]
    with dist._coalescing_manager(async_ops=is_async) as manager:
        for output, tensor in zip(gathered, values[rank], strict=True):
            dist.all_gather_into_tensor(output, tensor)
    finish(manager if is_async else None)
    for i, output in enumerate(gathered):
        oracle.assert_equal(output, torch.cat([own[i] for own in values]))

    shares = [own[::3] for own in values]  # torch wants one dtype here
    lists = [[torch.empty_like(tensor) for tensor in own] for own in shares]
    finish(dist.all_gather_coalesced(lists, shares[rank], async_op=is_async))
    for of_rank, own in zip(lists, shares, strict=True):
        for output, tensor in zip(of_rank, own, strict=True):
            oracle.assert_equal(output, tensor)
    for wrong in (lists[1:], [*lists[1:], lists[0][1:]]):
        with pytest.raises(ValueError, match="all_gather_coalesced"):
            dist.all_gather_coalesced(wrong, shares[rank])


@pytest.mark.parametrize(("world_size", "is_async"), [(2, False), (3, True), (4, True)])
def test_coalesced(world_size: int, is_async: bool) -> None:
    run_ranks(world_size, check_coalesced, is_async)


def check_objects(rank: int) -> None:
    world_size = dist.get_world_size()
    mine = {"rank": rank, "text": "ä" * (rank * 1000)}
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, mine)
    assert [item["rank"] for item in everyone] == list(range(world_size))
    assert [len(item["text"]) for item in everyone] == [1000 * r for r in range(world_size)]
    items: list[Any] = [mine, "two", 3] if rank == 1 else [None, None, None]
    dist.broadcast_object_list(items, 1)
    assert items == [{"rank": 1, "text": "ä" * 1000}, "two", 3]
    gathered: list[Any] = [None] * world_size
    dist.gather_object(mine, gathered if rank == 1 else None, 1)
    assert rank != 1 or gathered == everyone
    received: list[Any] = [None]
    dist.scatter_object_list(received, everyone if rank == 0 else None, 0)
    assert received == [mine]


def test_object_collectives() -> None:
    run_ranks(3, check_objects)
