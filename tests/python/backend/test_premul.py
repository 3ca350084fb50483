"""ReduceOp.PREMUL_SUM: each rank's tensor times a factor, in its own type, then the sum."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_gather_scatter import finish
from torch import Tensor

SIZES = [0, 1, 1000, 300_001]  # the last: two_shot, and several pieces of a reduce_scatter


def premul(factor: Any) -> Any:
    return dist._make_nccl_premul_sum(factor)


def values(dtype: torch.dtype, num_elems: int) -> list[Tensor]:
    """Small integers: with factors of powers of two no result is rounded."""
    reals = [oracle.integers(r, num_elems, torch.float64) for r in range(dist.get_world_size())]
    return [value.to(dtype) for value in reals]


def scaled_sum(inputs: list[Tensor], factor: float) -> Tensor:
    dtype = inputs[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64
    total = torch.stack([value.to(wide) for value in inputs]).sum(0) * factor
    return total.to(torch.int64).to(dtype) if not _is_inexact(dtype) else total.to(dtype)


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def check_all(rank: int, dtype: torch.dtype, factor: float, as_tensor: bool) -> None:
    world_size = dist.get_world_size()
    op = premul(torch.tensor([factor], dtype=torch.float64) if as_tensor else factor)
    for num_elems in SIZES:
        inputs = values(dtype, world_size * num_elems)
        expected = scaled_sum(inputs, factor)
        own = expected.chunk(world_size)[rank] if num_elems else expected

        tensor = inputs[rank].clone()
        finish(dist.all_reduce(tensor, op, async_op=num_elems == 1000))
        oracle.assert_equal(tensor, expected)

        tensor = inputs[rank].clone()
        dist.reduce(tensor, 1, op)
        oracle.assert_equal(tensor, expected if rank == 1 else inputs[rank])

        output = torch.empty(num_elems, dtype=dtype)
        given = inputs[rank].clone()
        dist.reduce_scatter_tensor(output, given, op)
        oracle.assert_equal(output, own)
        shares = [given[r * num_elems : (r + 1) * num_elems] for r in range(world_size)]
        dist.reduce_scatter(output.zero_(), shares, op)
        oracle.assert_equal(output, own)
        oracle.assert_equal(given, inputs[rank])  # what is only read stays as it is


@pytest.mark.parametrize("dtype", [*oracle.FLOATS, torch.complex64])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_floats(dtype: torch.dtype, as_tensor: bool) -> None:
    run_ranks(2, check_all, dtype, 0.25, as_tensor)


WHOLE = [
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
]


@pytest.mark.parametrize("dtype", WHOLE)
def test_whole_factors_of_integers(dtype: torch.dtype) -> None:
    """Negative ones too: unsigned types wrap around."""
    run_ranks(2, check_integers, dtype)


def check_integers(rank: int, dtype: torch.dtype) -> None:
    for factor in (3, -2.0):
        inputs = [oracle.integers(r, 67, torch.int64) for r in range(2)]
        tensor = inputs[rank].clone().to(dtype)
        dist.all_reduce(tensor, premul(float(factor)))
        oracle.assert_equal(tensor, ((inputs[0] + inputs[1]) * int(factor)).to(dtype))


def check_factors_of_ranks(rank: int) -> None:
    """Each rank may have another factor; the other forms of the call; a strided tensor."""
    world_size = dist.get_world_size()
    expected = sum(2.0**r for r in range(world_size))
    op = premul(2.0**rank)
    tensor = torch.ones(6, 2)[:, 0]
    dist.all_reduce(tensor, op)
    assert (tensor == expected).all()
    tensors = [torch.ones(3), torch.ones(70_000)]
    with dist._coalescing_manager():
        for each in tensors:
            dist.all_reduce(each, op)
    assert all((each == expected).all() for each in tensors)
    outputs = [torch.empty(1 + r) for r in range(2)]
    with dist._coalescing_manager():
        for output in outputs:
            dist.reduce_scatter_tensor(output, torch.ones(world_size * output.numel()), op)
    assert all((output == expected).all() for output in outputs)
    uneven = torch.empty(rank)
    dist.reduce_scatter(uneven, [torch.ones(r) for r in range(world_size)], op)
    assert (uneven == expected).all()


@pytest.mark.parametrize("world_size", [2, 3])
def test_other_forms(world_size: int) -> None:
    run_ranks(world_size, check_factors_of_ranks)


def check_rounding(rank: int, dtype: torch.dtype) -> None:
    """Rounded twice: the product in the tensor's type, the sum as any other."""
    inputs = [oracle.floats(r, 501, dtype) for r in range(dist.get_world_size())]
    tensor = inputs[rank].clone()
    dist.all_reduce(tensor, premul(1 / 3))
    products = [value * (1 / 3) for value in inputs]
    oracle.assert_equal(tensor, (products[0].float() + products[1].float()).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounding(dtype: torch.dtype) -> None:
    run_ranks(2, check_rounding, dtype)


REFUSED: list[tuple[torch.dtype, Any, str]] = [
    (torch.int32, 0.5, "wants a whole number as its factor, got 0.5"),
    (torch.int64, float("nan"), "whole number"),
    (torch.int64, 2.0**63, "whole number"),
    (torch.bool, 2.0, "no meaning for Bool"),
    (torch.float8_e5m2, 2.0, "cannot reduce Float8_e5m2"),
    (torch.float32, torch.tensor([1j]), "real factor"),
]


def check_refused(rank: int, dtype: torch.dtype, factor: Any, words: str) -> None:
    tensor = torch.zeros(4, dtype=dtype)
    with pytest.raises(TypeError, match=words):
        dist.all_reduce(tensor, premul(factor))
    dist.barrier()


@pytest.mark.parametrize(("dtype", "factor", "words"), REFUSED, ids=str)
def test_refused(dtype: torch.dtype, factor: Any, words: str) -> None:
    run_ranks(2, check_refused, dtype, factor, words)
