"""AdaLomo's operators on the CPU, against float64."""

from __future__ import annotations

import math

import oracle
import pytest
import torch
import update_oracle
from test_weight_update import FORMATS, num_threads, random, random_low
from torch import Tensor
from update_oracle import BF16, DTYPES, FP32, AdaLomo, Step

from ringcomm.ops import join_weight, split_weight

_ops = torch.ops.ringcomm

# One row; one column; less than a vector; tiles of 4096 columns and a rest; many rows.
SHAPES = [(1, 9000), (9000, 1), (1, 1), (3, 5), (40, 4097), (3000, 70)]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() / expected - 1).abs().max())


# ---- sums of squares


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_square_sums(shape: tuple[int, int], dtype: torch.dtype) -> None:
    grad = random(shape, dtype)
    for clip_value in (None, 0.3):
        rows, cols = _ops.square_sums(grad, 0.7, clip_value=clip_value)
        step = Step(lr=0, scale=0.7, clip_value=clip_value)
        squares = torch.from_numpy(step.gradient(grad.float().numpy())).double() ** 2
        assert (rows.dtype, cols.dtype) == (FP32, FP32)
        assert relative_error(rows, squares.sum(1)) < 1e-6
        assert relative_error(cols, squares.sum(0)) < 1e-6


def test_square_sums_of_nothing() -> None:
    for shape in ((0, 0), (0, 4), (3, 0)):
        rows, cols = _ops.square_sums(torch.empty(shape), 1.0)
        assert (rows.tolist(), cols.tolist()) == ([0.0] * shape[0], [0.0] * shape[1])


def test_one_large_gradient_hides_no_small_ones() -> None:
    grad = torch.full([100, 5000], 1e-3)
    grad[0, 0] = 1.0
    rows, cols = _ops.square_sums(grad, 1.0)
    squares = grad.double() ** 2
    assert relative_error(rows, squares.sum(1)) < 1e-6
    assert relative_error(cols, squares.sum(0)) < 1e-6


@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dtype", "seed", "has_low"), [*FORMATS[:3], FORMATS[5]])
def test_squares(dtype: torch.dtype, seed: int, has_low: bool, grad_dtype: torch.dtype) -> None:
    for shape in SHAPES:
        weight, grad = random(shape, dtype), random(shape, grad_dtype, seed=1)
        low = random_low(shape) if has_low else None
        row, col = random(shape[:1], seed=2).exp(), random(shape[1:], seed=3).exp()
        sums = _ops.adalomo_squares(weight, grad, row, col, 0.7, low=low, clip_value=0.4)
        scaled = torch.from_numpy(
            Step(lr=0, scale=0.7, clip_value=0.4).gradient(grad.float().numpy())
        )
        update = scaled.double() * row[:, None] * col
        values = torch.from_numpy(update_oracle.to_fp32(weight, low)).double()
        expected = torch.stack([(update**2).sum(), (values**2).sum()])
        assert relative_error(sums, expected) < 1e-6


def test_tails_take_no_infinite_factor() -> None:
    """What fills up the last vector is no element: 0 times infinity is not in the sum."""
    grad = torch.zeros(1, 3)
    sums = _ops.adalomo_squares(
        torch.ones(1, 3), grad + 1, torch.tensor([math.inf]), torch.ones(3), 1.0
    )
    assert sums.tolist() == [math.inf, 3.0]


# ---- updates


@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dtype", "seed", "has_low"), FORMATS)
def test_update(dtype: torch.dtype, seed: int, has_low: bool, grad_dtype: torch.dtype) -> None:
    """To the last bit."""
    numbers = torch.tensor([0.02, 0.995])
    for shape in (*SHAPES, (0, 4), (4, 0)):
        weight, grad = random(shape, dtype), random(shape, grad_dtype, seed=1)
        low = random_low(shape) if has_low else None
        row, col = random(shape[:1], seed=2).exp(), random(shape[1:], seed=3).exp()
        common = Step(lr=0, scale=0.7, clip_value=0.4)
        update = torch.from_numpy(common.gradient(grad.float().numpy())) * row[:, None] * col
        values = torch.from_numpy(update_oracle.to_fp32(weight, low)) * numbers[1]
        new_values = update_oracle.exact_fma(
            update.flatten().numpy(), (-numbers[:1]).numpy(), values.numpy()
        )
        expected, expected_low = update_oracle.rounded(
            new_values, dtype, seed=seed, is_split=has_low, first_elem=2**32 - 30
        )
        _ops.adalomo_update_(
            weight,
            grad,
            row,
            col,
            numbers,
            0.7,
            seed,
            low=low,
            clip_value=0.4,
            first_elem=2**32 - 30,
        )
        oracle.assert_equal(weight.flatten(), expected)
        if low is not None and expected_low is not None:
            oracle.assert_equal(low.flatten(), expected_low)


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
        exact.step(
            update_oracle.linear_gradient(x, grad_out).numpy(),
            lr=0.01,
            weight_decay=0.1,
            scale=0.5,
            **options,
        )
        _ops.linear_adalomo_update_(
            weight,
            x,
            grad_out,
            row,
            col,
            0.01,
            0.1,
            0.5,
            -1 if seed < 0 else seed + t,
            low=low,
            **options,
        )
    assert relative_error(row, torch.from_numpy(exact.exp_avg_sq_row)) < 1e-5
    assert relative_error(col, torch.from_numpy(exact.exp_avg_sq_col)) < 1e-5
    return exact


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(70, 50), (1, 30), (33, 1)])
def test_steps_of_a_linear_layer(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = random(shape)
    exact = run_steps(weight, None, dtype, -1)
    assert (weight - torch.from_numpy(exact.weight)).abs().max() < 1e-5
    high, low = split_weight(random(shape))
    run_steps(high, low, dtype, -1)
    oracle.assert_equal(join_weight(high, low), weight)


def test_steps_rounded_stochastically() -> None:
    """Every step is off by up to a unit in the last place, and their mean by little."""
    weight = random((70, 50), BF16)
    exact = torch.from_numpy(run_steps(weight, None, BF16, 3).weight)
    error = weight.double() - exact
    unit = 2**-7 * exact.abs().clamp(min=0.05)
    assert (error.abs() < 20 * unit).all()
    assert (error / unit).mean().abs() < 6 * (20 / 2 / weight.numel()) ** 0.5


def test_no_tokens() -> None:
    """The gradient is zero: the means shrink, and the weight decays."""
    weight, row, col = random((4, 6)), torch.ones(4), torch.ones(6)
    size = 0.1 * weight.square().mean().sqrt()
    expected = weight * (1 - size * 0.2)
    empty = torch.empty(0, 6), torch.empty(0, 4)
    _ops.linear_adalomo_update_(weight, *empty, row, col, 0.1, 0.2, 1.0, beta2=0.75)
    assert torch.allclose(weight, expected, rtol=1e-6)
    assert (row.tolist(), col.tolist()) == ([0.75] * 4, [0.75] * 6)
    nothing = torch.empty(0, 6), torch.ones(3, 6), torch.ones(3, 0)
    _ops.linear_adalomo_update_(*nothing, torch.empty(0), col, 0.1, 0.2, 1.0, beta2=0.5)


def test_a_gradient_that_is_nan_shows() -> None:
    weight, row, col = random((4, 6)), torch.zeros(4), torch.zeros(6)
    x, grad_out = random((3, 6)), random((3, 4))
    x[1, 2] = math.nan
    _ops.linear_adalomo_update_(weight, x, grad_out, row, col, 0.1, 0.0, 1.0, beta2=0.0)
    assert weight.isnan().all()
    assert col.isnan().tolist() == [i == 2 for i in range(6)]


def test_threads_change_no_bit() -> None:
    grad, factors = random((600, 500)), (random((600,)).exp(), random((500,)).exp())
    results = []
    for number in (1, 2, 3):
        with num_threads(number):
            weight = random((600, 500), BF16)
            sums = _ops.square_sums(grad, 0.3)
            squares = _ops.adalomo_squares(weight, grad, *factors, 0.3)
            _ops.adalomo_update_(weight, grad, *factors, torch.tensor([0.1, 0.9]), 0.3, 5)
            results.append([*sums, squares, weight])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            oracle.assert_equal(two, one)
