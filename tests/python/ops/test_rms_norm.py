"""all_reduce_add_rms_norm_: values against float64, equal bits on all ranks, errors, compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks
from torch import Tensor

from ringcomm import MismatchError, ops

_ops = torch.ops.ringcomm
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = 1e-5


def case(
    rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """input, which differs between ranks, residual and weight, which do not."""
    own = torch.Generator().manual_seed(100 * seed + rank + 1)
    common = torch.Generator().manual_seed(100 * seed)
    residual = torch.randn(shape, generator=common).to(dtype)
    weight = torch.rand(shape[-1:], generator=common).add_(0.5).to(dtype)
    return torch.randn(shape, generator=own).to(dtype), residual, weight


def roundings(dtype: torch.dtype, count: float) -> float:
    """The relative error of `count` roundings to nearest."""
    return count * torch.finfo(dtype).eps / 2


def check_against_float64(
    inputs: list[Tensor], before: Tensor, weight: Tensor, normed: Tensor, residual: Tensor
) -> None:
    """The sum and the residual are rounded once each; the norm of the rounded residual once."""
    dtype, world_size = before.dtype, len(inputs)
    total = torch.stack([x.double() for x in inputs]).sum(0)
    size = sum(x.double().abs() for x in inputs) + before.double().abs()
    bound = size * (roundings(dtype, 2) + roundings(torch.float32, world_size))
    assert ((residual.double() - (before.double() + total)).abs() <= bound).all()
    wide = residual.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    # float32: each of 64 partial sums of squares has features / 64 elements.
    in_fp32 = roundings(torch.float32, 12 + before.size(-1) / 64)
    bound = exact.abs() * (roundings(dtype, 1) * 1.01 + in_fp32)
    if dtype is torch.float16:
        bound = bound + 2**-25  # half of the smallest subnormal number
    assert ((normed.double() - exact).abs() <= bound).all()


@in_ranks([1, 2, 3])
def test_values(rank: int) -> None:
    world_size = dist.get_world_size()
    shapes = ((1,), (2, 3), (1, 1, 63), (5, 64), (3, 130), (1, 1, 4096), (40, 2048), (0, 8))
    for seed, shape in enumerate(shapes):
        for dtype in DTYPES:
            x, residual, weight = case(rank, shape, dtype, seed)
            before = residual.clone()
            results = ops.all_reduce_add_rms_norm_(x, residual, weight, EPS)
            assert results[0] is x
            assert results[1] is residual
            inputs = [case(r, shape, dtype, seed)[0] for r in range(world_size)]
            check_against_float64(inputs, before, weight, x, residual)
            for mine in (x, residual):
                bits = mine.reshape(1, -1).view(torch.uint8)
                assert (ops.all_gather(bits) == bits).all()
            name = dist.group.WORLD.group_name  # type: ignore[union-attr]
            again, sums, _ = case(rank, shape, dtype, seed)
            _ops.all_reduce_add_rms_norm_(again, sums, weight, EPS, name)
            assert torch.equal(again, x)
            assert torch.equal(sums, residual)


@in_ranks(2)
def test_infinities_and_nan(rank: int) -> None:
    """As in torch: a NaN, or an infinity, makes a NaN of what it meets in its own row only."""
    for value in (float("nan"), float("inf")):
        x, residual, weight = case(rank, (2, 70), torch.float32)
        x[0, 65] = value
        ops.all_reduce_add_rms_norm_(x, residual, weight, EPS)
        expected = torch.nn.functional.rms_norm(residual, (70,), weight, EPS)
        torch.testing.assert_close(x, expected, equal_nan=True)
        assert not x[0, 65].isfinite()
        assert x[1].isfinite().all()


@in_ranks(2)
def test_wrong_arguments_exchange_nothing(rank: int) -> None:
    x, residual, weight = case(rank, (4, 8), torch.float32)
    wide = torch.ones(4, 16)
    wrong: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((x, residual[:3], weight), ValueError, r"residual of shape \[4, 8\], got \[3, 8\]"),
        ((x, residual, weight[:7]), ValueError, r"weight of shape \[8\], got \[7\]"),
        ((x, residual, weight.bfloat16()), TypeError, "weight in the input's Float"),
        ((x, residual.half(), weight), TypeError, "residual in the input's Float"),
        ((x.long(), residual, weight), TypeError, "input"),
        ((wide[:, ::2], residual, weight), ValueError, "a contiguous input"),
        ((x, wide[:, :8], weight), ValueError, "a contiguous residual"),
        ((x[0, 0], residual, weight), ValueError, "shape"),
        ((wide.new_empty(4, 0), wide.new_empty(4, 0), wide.new_empty(0)), ValueError, "features"),
        ((x, x, weight), ValueError, "share memory"),
        ((x, residual, x[1]), ValueError, "share memory"),
        ((x, residual, weight, -1.0), ValueError, "eps must be"),
        ((x, residual, weight, float("nan")), ValueError, "eps must be"),
        ((x, residual, weight.clone().requires_grad_()), ValueError, r"use torch\.inference_mode"),
    ]
    before = x.clone(), residual.clone()
    if rank == 0:  # alone: an exchange would fail
        for arguments, kind, words in wrong:
            with pytest.raises(kind, match=words):
                ops.all_reduce_add_rms_norm_(*arguments)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])
    with torch.no_grad():
        ops.all_reduce_add_rms_norm_(x, residual, torch.nn.Parameter(weight))


@in_ranks(2, fresh=True)
def test_ranks_with_other_sizes_raise(rank: int) -> None:
    x, residual, weight = case(rank, (2 + rank, 8), torch.float32)
    before = residual.clone()
    with pytest.raises(MismatchError):
        ops.all_reduce_add_rms_norm_(x, residual, weight)
    assert torch.equal(residual, before)


@in_ranks(2)
def test_over_another_backend(rank: int) -> None:
    group = dist.new_group(backend="gloo")
    x, residual, weight = case(rank, (3, 40), torch.bfloat16)
    before = residual.clone()
    ops.all_reduce_add_rms_norm_(x, residual, weight, EPS, group)
    inputs = [case(r, (3, 40), torch.bfloat16)[0] for r in range(2)]
    check_against_float64(inputs, before, weight, x, residual)
    dist.destroy_process_group(group)


def block(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The end of a row-parallel layer, the norm, and something after it."""
    x, residual = ops.all_reduce_add_rms_norm_(x * 2, residual + 0, weight, EPS)
    return x + 1, residual


@in_ranks(2, timeout_s=180)
def test_compile(rank: int) -> None:
    x, residual, weight = case(rank, (4, 96), torch.bfloat16)
    with torch.inference_mode():
        expected = block(x, residual, weight)
        actual = torch.compile(block, fullgraph=True, backend="aot_eager")(x, residual, weight)
    for theirs, ours in zip(expected, actual, strict=True):
        assert torch.equal(theirs, ours)
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    arguments = (x.clone(), residual.clone(), weight, EPS, name)
    operator = _ops.all_reduce_add_rms_norm_.default
    torch.library.opcheck(operator, arguments, test_utils=tests)
