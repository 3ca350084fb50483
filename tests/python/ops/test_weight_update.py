"""What update_cases.py's table does not hold of weight updates: rounding, products, AdaLomo."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import oracle
import pytest
import torch
import update_oracle
from torch import Tensor
from update_oracle import BF16, DTYPES, FP32, AdaLomo

_ops: Any = torch.ops.ringcomm


def random(shape: tuple[int, ...], dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() / expected - 1).abs().max())


def split(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 weight as bfloat16 and its low."""
    high, low = update_oracle.rounded(weight.flatten().numpy(), BF16, is_split=True)
    assert low is not None
    return high.view(weight.shape), low.view(weight.shape)


# ---- SGD


def sgd_(weight: Tensor, grad: Tensor, seed: int = -1, **options: Any) -> None:
    _ops.sgd_update_(weight, grad, options.pop("lr", 0.1), 0.0, 1.0, seed, **options)


def test_shards_have_the_bits_of_the_whole() -> None:
    whole, grad = random((1000,), BF16), random((1000,), seed=1)
    parts = whole.clone()
    sgd_(whole, grad, 3)
    for begin, end in ((0, 13), (13, 600), (600, 1000)):
        sgd_(parts[begin:end], grad[begin:end], 3, first_elem=begin)
    oracle.assert_equal(parts, whole)
    sgd_(parts, grad, 4)
    sgd_(whole, grad, 5)
    assert not torch.equal(parts, whole)


@pytest.mark.parametrize("fraction", [1 / 65536, 0.01, 0.25, 0.5, 0.99])
def test_stochastic_rounding_is_unbiased(fraction: float) -> None:
    """A million draws at `fraction` of the way from 1 to the next number, 1 + 2^-7."""
    draws = 1_000_000
    fraction = round(fraction * 65536) / 65536
    weight = torch.ones(draws, dtype=BF16)
    sgd_(weight, torch.full([draws], -fraction * 2**-7), 2**35 + 1, lr=1.0)
    assert ((weight == 1) | (weight == 1 + 2**-7)).all()
    share = (weight > 1).double().mean().item()
    assert abs(share - fraction) < 6 * math.sqrt(fraction * (1 - fraction) / draws)


def test_random_bits_of_neighbours_and_seeds() -> None:
    """Correlations of a million pairs are within 6 sigma of none."""
    elems = np.arange(1_000_000, dtype=np.uint64)

    def draws(seed: int) -> np.ndarray:
        weight = torch.ones(len(elems), dtype=BF16)
        sgd_(weight, torch.full([len(elems)], -(2**-8)), seed, lr=1.0)
        return np.asarray(weight.float().numpy()) > 1

    def correlation(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.abs(np.corrcoef(a, b)[0, 1]))

    first = draws(6)
    assert np.array_equal(first, update_oracle.random_bits(6, elems) >= 0x8000)
    for other in (draws(7), draws(6 + 2**32), np.roll(first, 1), np.roll(first, 4096)):
        assert correlation(first, other) < 6 / math.sqrt(len(elems))
    assert correlation(first, draws(6)) > 0.99  # the same seed: what the check would see


def test_a_split_weight_is_an_fp32_weight() -> None:
    """Over 50 steps, to the last bit."""
    whole = random((501, 20))
    high, low = split(whole)
    for i in range(50):
        grad = random((501, 20), BF16, seed=i)
        for weight, rest in ((whole, None), (high, low)):
            _ops.sgd_update_(weight, grad, 1e-3, 0.1, 1.0, low=rest)
        oracle.assert_equal(torch.from_numpy(update_oracle.to_fp32(high, low)), whole.flatten())
    oracle.assert_equal(split(whole)[0], high)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_against_float64(dtype: torch.dtype) -> None:
    """Strided tokens; the sum of 600 products is off by some roundings of fp32."""
    x, grad_out = random((200, 3, 90), dtype)[:, :, 5:85], random((3, 200, 70), dtype, seed=1)
    grad_out = grad_out.transpose(0, 1)
    weight = random((70, 80), FP32, seed=2)
    expected = 0.99 * weight.double() - 0.1 * 0.5 * update_oracle.linear_gradient(x, grad_out)
    _ops.linear_sgd_update_(weight, x, grad_out, 0.1, 0.1, 0.5)
    assert (weight - expected).abs().max() < 600**0.5 * 2**-24 * expected.abs().max()


def test_rows_without_a_token_keep_their_bits() -> None:
    """Also those of a NaN, and of the padding."""
    weight = random((6, 8), BF16)
    weight[1, 0], weight[2, 3] = math.nan, math.nan
    before, indices = weight.clone(), torch.tensor([0, 2, 5, 2])
    _ops.embedding_sgd_update_(
        weight, indices, random((4, 8)), 0.1, 0.0, 1.0, 7, padding_idx=2, clip_value=1.0
    )
    for row in (1, 2, 3, 4):
        oracle.assert_equal(weight[row], before[row])
    assert not torch.equal(weight[[0, 5]], before[[0, 5]])


def test_threads_change_no_bit() -> None:
    grad, factors = random((300, 700), seed=1), (random((300,)).exp(), random((700,)).exp())
    x, grad_out = random((90, 700), seed=2), random((90, 300), seed=3)
    indices, rows = torch.arange(2000) % 280, random((2000, 700), BF16, seed=4)
    results: list[list[Tensor]] = []
    for number in (1, 2, 3):
        with oracle.num_threads(number):
            new = [random((300, 700), dtype) for dtype in (BF16, BF16, BF16, FP32, BF16)]
            given = (0.1, 0.0, 1.0)
            _ops.sgd_update_(new[0], grad, *given, 8)
            _ops.linear_sgd_update_(new[1], x, grad_out, *given, 8)
            _ops.embedding_sgd_update_(new[2], indices, rows, 0.1, 0.1, 1.0)
            _ops.linear_sgd_update_(new[3], x, grad_out, *given)
            sums = _ops.square_sums(grad, 0.3)
            squares = _ops.adalomo_squares(new[4], grad, *factors, 0.3)
            _ops.adalomo_update_(new[4], grad, *factors, torch.tensor([0.1, 0.9]), 0.3, 5)
            results.append([*new, *sums, squares])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            oracle.assert_equal(two, one)


# ---- AdaLomo's sums


def test_sums_of_squares_at_the_edges() -> None:
    for shape in ((0, 0), (0, 4), (3, 0)):
        rows, cols = _ops.square_sums(torch.empty(shape), 1.0)
        assert (rows.tolist(), cols.tolist()) == ([0.0] * shape[0], [0.0] * shape[1])
    # One row; one column; tiles of 4096 columns and a rest; many rows.
    for shape in ((1, 9000), (9000, 1), (40, 4097), (3000, 70)):
        grad = random(shape) * 1e-3
        grad[0, 0] = 1.0  # hides no small ones
        rows, cols = _ops.square_sums(grad, 0.7)
        squares = (grad * torch.tensor(0.7)).double() ** 2
        assert relative_error(rows, squares.sum(1)) < 1e-6
        assert relative_error(cols, squares.sum(0)) < 1e-6
    # What fills up the last vector is no element: 0 times infinity is not in the sum.
    ones, factor = torch.ones(1, 3), torch.tensor([math.inf])
    assert _ops.adalomo_squares(ones, ones, factor, torch.ones(3), 1.0).tolist() == [math.inf, 3.0]


# ---- linear_adalomo_update_


def run_steps(
    weight: Tensor, low: Tensor | None, dtype: torch.dtype, seed: int, num_steps: int = 20
) -> AdaLomo:
    """Updates a weight by steps of a linear layer; returns what they are in float64."""
    exact = AdaLomo.of(weight, low)
    rows, cols = weight.shape
    row, col = torch.zeros(rows), torch.zeros(cols)
    for t in range(1, num_steps + 1):
        x, grad_out = random((6, 5, cols), dtype, seed=t), random((6, 5, rows), dtype, seed=-t)
        grad_out = grad_out * torch.linspace(0.1, 3, rows).to(dtype)
        options = {"beta2": update_oracle.beta2_of(t), "clip_value": 20.0}
        grad = update_oracle.linear_gradient(x, grad_out).numpy()
        exact.step(grad, lr=0.01, weight_decay=0.1, scale=0.5, **options)
        given = (weight, x, grad_out, row, col, 0.01, 0.1, 0.5, -1 if seed < 0 else seed + t)
        _ops.linear_adalomo_update_(*given, low=low, **options)
    assert relative_error(row, torch.from_numpy(exact.exp_avg_sq_row)) < 1e-5
    assert relative_error(col, torch.from_numpy(exact.exp_avg_sq_col)) < 1e-5
    return exact


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(70, 50), (1, 30), (33, 1)])
def test_steps_of_a_linear_layer(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = random(shape)
    exact = run_steps(weight, None, dtype, -1)
    assert (weight - torch.from_numpy(exact.weight)).abs().max() < 1e-5
    high, low = split(random(shape))
    run_steps(high, low, dtype, -1)
    oracle.assert_equal(torch.from_numpy(update_oracle.to_fp32(high, low)), weight.flatten())


def test_steps_rounded_stochastically() -> None:
    """Every step is off by up to a unit in the last place, and their mean by little."""
    weight = random((70, 50), BF16)
    exact = torch.from_numpy(run_steps(weight, None, BF16, 3).weight)
    error = weight.double() - exact
    unit = 2**-7 * exact.abs().clamp(min=0.05)
    assert (error.abs() < 20 * unit).all()
    assert (error / unit).mean().abs() < 6 * (20 / 2 / weight.numel()) ** 0.5


def test_no_tokens_and_a_nan() -> None:
    """Without tokens the gradient is zero: the means shrink, and the weight decays."""
    weight, row, col = random((4, 6)), torch.ones(4), torch.ones(6)
    size = 0.1 * weight.square().mean().sqrt()
    expected = weight * (1 - size * 0.2)
    empty = torch.empty(0, 6), torch.empty(0, 4)
    _ops.linear_adalomo_update_(weight, *empty, row, col, 0.1, 0.2, 1.0, beta2=0.75)
    assert torch.allclose(weight, expected, rtol=1e-6)
    assert (row.tolist(), col.tolist()) == ([0.75] * 4, [0.75] * 6)
    nothing = torch.empty(0, 6), torch.ones(3, 6), torch.ones(3, 0)
    _ops.linear_adalomo_update_(*nothing, torch.empty(0), col, 0.1, 0.2, 1.0, beta2=0.5)
    x, grad_out = random((3, 6)), random((3, 4))
    x[1, 2] = math.nan
    _ops.linear_adalomo_update_(weight, x, grad_out, row, col, 0.1, 0.0, 1.0, beta2=0.0)
    assert weight.isnan().all()
    assert col.isnan().tolist() == [i == 2 for i in range(6)]
