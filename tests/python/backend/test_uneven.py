"""Lists of tensors of different sizes; sizes that do not fit each other."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_errors import caught
from test_gather_scatter import any_bits, assert_same_bits, finish

# Elements of each rank; the last: several pieces for one, none for another.
SIZES = [[0, 1], [5, 5], [3, 0, 7], [1, 2, 3, 4], [600_000, 0, 300_001]]


def check_moves(rank: int, sizes: list[int], dtype: torch.dtype, is_async: bool) -> None:
    expected = [any_bits(r, n, dtype) for r, n in enumerate(sizes)]

    def fresh() -> list[torch.Tensor]:
        return [torch.empty(n, dtype=dtype) for n in sizes]

    outputs = fresh()
    finish(dist.all_gather(outputs, expected[rank].clone(), async_op=is_async))
    for output, share in zip(outputs, expected, strict=True):
        assert_same_bits(output, share)
    for root in range(len(sizes)):
        outputs = fresh()
        is_root = rank == root
        finish(dist.gather(expected[rank], outputs if is_root else None, root, async_op=is_async))
        for output, share in zip(outputs if is_root else [], expected, strict=False):
            assert_same_bits(output, share)
        output = fresh()[rank]
        finish(dist.scatter(output, expected if is_root else None, root, async_op=is_async))
        assert_same_bits(output, expected[rank])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_moves(sizes: list[int]) -> None:
    run_ranks(len(sizes), check_moves, sizes, torch.float32, SIZES.index(sizes) % 2 == 0)


# More types and sizes: test_random_sequences.py.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex128])
def test_moves_of_types(dtype: torch.dtype) -> None:
    run_ranks(3, check_moves, SIZES[2], dtype, False)


def check_reduce_scatter(rank: int, sizes: list[int], dtype: torch.dtype, op: str) -> None:
    inputs = [
        [oracle.integers(r, n, dtype, seed=target) for target, n in enumerate(sizes)]
        for r in range(len(sizes))
    ]
    output = torch.empty(sizes[rank], dtype=dtype)
    dist.reduce_scatter(output, inputs[rank], getattr(dist.ReduceOp, op.upper()))
    oracle.assert_equal(output, oracle.reduced([shares[rank] for shares in inputs], op))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_reduce_scatter(sizes: list[int]) -> None:
    of_turn = [(torch.float32, "avg"), (torch.bfloat16, "sum"), (torch.int64, "max")]
    run_ranks(len(sizes), check_reduce_scatter, sizes, *of_turn[SIZES.index(sizes) % 3])


def check_complex(rank: int) -> None:
    sizes = [2, 0, 5]
    inputs = [[torch.full((n,), complex(r, n)) for n in sizes] for r in range(3)]
    output = torch.empty(sizes[rank], dtype=torch.complex64)
    dist.reduce_scatter(output, inputs[rank])
    oracle.assert_equal(output, torch.full((sizes[rank],), complex(3, 3 * sizes[rank])))


def test_reduce_scatter_of_complex_numbers() -> None:
    run_ranks(3, check_complex)


# ---- sizes that do not fit: every rank of three raises, and says which two


def tensors(*sizes: int) -> list[torch.Tensor]:
    return [torch.zeros(n) for n in sizes]


def all_gather(rank: int) -> Any:
    dist.all_gather(tensors(1, 2, 4 if rank == 2 else 3), torch.zeros(rank + 1 + rank // 2))


def gather(rank: int) -> Any:
    dist.gather(torch.zeros(5 if rank == 0 else 4), tensors(4, 4, 4) if rank == 1 else None, 1)


def scatter(rank: int) -> Any:
    dist.scatter(torch.zeros(4), tensors(4, 4, 5) if rank == 0 else None, 0)


def reduce_scatter(rank: int) -> Any:
    dist.reduce_scatter(torch.zeros(4), tensors(4, 4, 6 if rank == 1 else 4))


def all_to_all(rank: int) -> Any:
    given = tensors(4, 4, 4)
    given[1] = torch.zeros(2 if rank == 2 else 4)
    dist.all_to_all(tensors(4, 2 if rank == 2 else 4, 4), given)


def all_to_all_single(rank: int) -> Any:
    dist.all_to_all_single(torch.zeros(6), torch.zeros(6), [1, 2, 3], [1, 2, 3])


MISFITS: dict[str, tuple[Callable[[int], Any], str]] = {
    "all_gather": (all_gather, "rank 2 has 16 bytes for rank 0, which expects 12 bytes"),
    "gather": (gather, "rank 0 has 20 bytes for rank 1, which expects 16 bytes"),
    "scatter": (scatter, "rank 0 has 20 bytes for rank 2, which expects 16 bytes"),
    "reduce_scatter": (reduce_scatter, "rank 1 has 24 bytes for rank 2, which expects 16 bytes"),
    "all_to_all": (all_to_all, "rank 1 has 16 bytes for rank 2, which expects 8 bytes"),
    "all_to_all_single": (all_to_all_single, "rank 0 has 8 bytes for rank 1, which expects 4"),
}


def check_misfit(rank: int, name: str, is_late: bool) -> list[dict[str, Any]]:
    """`is_late`: the last rank comes when the others have been waiting for a while."""
    if is_late and rank == 2:
        time.sleep(0.1)
    return [caught(lambda: MISFITS[name][0](rank)) for _ in range(2)]


@pytest.mark.parametrize("name", sorted(MISFITS))
def test_misfits(name: str) -> None:
    for errors in run_ranks(3, check_misfit, name, name < "r", fresh=True):
        for error in errors:
            assert error["type"] == "MismatchError"
            assert MISFITS[name][1] in error["text"]
