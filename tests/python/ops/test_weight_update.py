"""The weight updates on the CPU: to the last bit where one result is right, or float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import oracle
import pytest
import torch
import update_oracle
from torch import Tensor
from update_oracle import BF16, DTYPES, FP16, FP32, Step

from ringcomm.ops import (
    embedding_sgd_update_,
    join_weight,
    linear_sgd_update_,
    sgd_update_,
    split_weight,
)

_ops = torch.ops.ringcomm

# dtype, seed, with low; the seed has bits in both halves.
FORMATS = [
    (FP32, -1, False),
    (FP16, -1, False),
    (BF16, -1, False),
    (BF16, 0, False),
    (BF16, (5 << 40) + 77, False),
    (BF16, -1, True),
]
NEAR_4G = 2**32 - 50  # the lower half of the elements' numbers runs over


def random(shape: tuple[int, ...], dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def random_low(shape: tuple[int, ...], seed: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16)


def integers(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Sums of products of up to a thousand are exact in any order, and in fp32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


def check_sgd(
    update: Callable[[Tensor, Tensor | None], None],
    weight: Tensor,
    grad: Tensor,
    step: Step,
    low: Tensor | None = None,
) -> None:
    """What `update` makes of copies, against SGD with that gradient; to the last bit."""
    expected, expected_low = update_oracle.sgd(weight, grad, step, low)
    new, new_low = weight.clone(), None if low is None else low.clone()
    update(new, new_low)
    assert new.stride() == weight.stride()
    oracle.assert_equal(new, expected)
    if new_low is not None and expected_low is not None:
        oracle.assert_equal(new_low, expected_low)


@contextmanager
def num_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- sgd_update_


def sgd_with(grad: Tensor, step: Step) -> Callable[[Tensor, Tensor | None], None]:
    def update(weight: Tensor, low: Tensor | None) -> None:
        _ops.sgd_update_(
            weight,
            grad,
            step.lr,
            step.weight_decay,
            step.scale,
            step.rounding_seed,
            low=low,
            clip_value=step.clip_value,
            first_elem=step.first_elem,
        )

    return update


@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dtype", "seed", "has_low"), FORMATS)
def test_sgd(dtype: torch.dtype, seed: int, has_low: bool, grad_dtype: torch.dtype) -> None:
    for shape in ((), (0,), (1,), (15,), (3, 0), (33, 129), (70_001,)):
        weight, grad = random(shape, dtype), random(shape, grad_dtype, seed=1)
        low = random_low(shape) if has_low else None
        for step in (
            Step(lr=0.1, rounding_seed=seed),
            Step(
                lr=0.03,
                weight_decay=0.3,
                scale=0.7,
                clip_value=0.5,
                rounding_seed=seed,
                first_elem=NEAR_4G,
            ),
        ):
            check_sgd(sgd_with(grad, step), weight, grad, step, low)


@pytest.mark.parametrize(("dtype", "seed", "has_low"), [FORMATS[0], FORMATS[4], FORMATS[5]])
def test_sgd_of_other_layouts(dtype: torch.dtype, seed: int, has_low: bool) -> None:
    """Elements are numbered as they lie in memory; the gradient may lie in another order."""
    step = Step(lr=0.1, rounding_seed=seed)
    for weight in (
        random((4, 6, 5, 3), dtype).to(memory_format=torch.channels_last),
        random((7, 9), dtype).t(),
        random((20, 4), dtype)[5:9],
    ):
        low = random_low(weight.shape).as_strided(weight.shape, weight.stride())
        grad = random(weight.shape, seed=2)
        for ordered in (grad, torch.empty_like(weight, dtype=FP32).copy_(grad)):
            check_sgd(sgd_with(ordered, step), weight, ordered, step, low if has_low else None)


def test_shards_have_the_bits_of_the_whole() -> None:
    whole, grad = random((1000,), BF16), random((1000,), seed=1)
    parts = whole.clone()
    sgd_update_(whole, grad, lr=0.1, rounding_seed=3)
    for begin, end in ((0, 13), (13, 600), (600, 1000)):
        shard = parts[begin:end]
        sgd_update_(shard, grad[begin:end], lr=0.1, rounding_seed=3, first_elem=begin)
    oracle.assert_equal(parts, whole)
    sgd_update_(parts, grad, lr=0.1, rounding_seed=4)
    sgd_update_(whole, grad, lr=0.1, rounding_seed=5)
    assert not torch.equal(parts, whole)


@pytest.mark.parametrize("fraction", [1 / 65536, 0.01, 0.25, 0.5, 0.99])
def test_stochastic_rounding_is_unbiased(fraction: float) -> None:
    """A million draws at `fraction` of the way from 1 to the next number, 1 + 2^-7."""
    draws = 1_000_000
    fraction = round(fraction * 65536) / 65536
    weight = torch.ones(draws, dtype=BF16)
    sgd_update_(weight, torch.full([draws], -fraction * 2**-7), lr=1.0, rounding_seed=2**35 + 1)
    assert ((weight == 1) | (weight == 1 + 2**-7)).all()
    share = (weight > 1).double().mean().item()
    assert abs(share - fraction) < 6 * math.sqrt(fraction * (1 - fraction) / draws)


def test_random_bits_of_neighbours_and_seeds() -> None:
    """Correlations of a million pairs are within 6 sigma of none."""
    elems = np.arange(1_000_000, dtype=np.uint64)

    def draws(seed: int) -> np.ndarray:
        weight = torch.ones(len(elems), dtype=BF16)
        sgd_update_(weight, torch.full([len(elems)], -(2**-8)), lr=1.0, rounding_seed=seed)
        return np.asarray(weight.float().numpy()) > 1

    def correlation(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.abs(np.corrcoef(a, b)[0, 1]))

    first = draws(6)
    assert np.array_equal(first, update_oracle.random_bits(6, elems) >= 0x8000)
    for other in (draws(7), draws(6 + 2**32), np.roll(first, 1), np.roll(first, 4096)):
        assert correlation(first, other) < 6 / math.sqrt(len(elems))
    assert correlation(first, draws(6)) > 0.99  # the same seed: what the check would see


def test_split_weight_is_an_fp32_weight() -> None:
    """Over 50 steps, to the last bit."""
    whole = random((501, 20))
    high, low = split_weight(whole)
    for i in range(50):
        grad = random((501, 20), BF16, seed=i)
        for weight, rest in ((whole, None), (high, low)):
            sgd_update_(weight, grad, lr=1e-3, weight_decay=0.1, low=rest)
        oracle.assert_equal(join_weight(high, low), whole)
    rounded = update_oracle.rounded(whole.flatten().numpy(), BF16, is_split=True)
    oracle.assert_equal(high.flatten(), rounded[0])


def test_split_and_joined() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint64).astype(np.uint32)
    weight = torch.from_numpy(bits.view(np.float32))
    high, low = split_weight(weight)
    expected, expected_low = update_oracle.rounded(weight.numpy(), BF16, is_split=True)
    oracle.assert_equal(high, expected)
    assert expected_low is not None
    oracle.assert_equal(low, expected_low)
    joined, is_nan = join_weight(high, low), weight.isnan()
    assert joined[is_nan].isnan().all()
    oracle.assert_equal(joined[~is_nan], weight[~is_nan])


@pytest.mark.parametrize(("dtype", "seed", "has_low"), FORMATS)
def test_infinities_and_nan(dtype: torch.dtype, seed: int, has_low: bool) -> None:
    values = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 3e38, -6e4, 1e-40, 65519.0]
    pairs = list(itertools.product(values, values))
    weight = torch.tensor([pair[0] for pair in pairs]).to(dtype)
    grad = torch.tensor([pair[1] for pair in pairs])
    low = torch.zeros_like(weight, dtype=torch.int16) if has_low else None
    for clip_value in (None, 0.25):
        step = Step(lr=0.5, weight_decay=0.5, rounding_seed=seed, clip_value=clip_value)
        check_sgd(sgd_with(grad, step), weight, grad, step, low)


# ---- linear_sgd_update_


def linear_with(x: Tensor, grad_out: Tensor, step: Step) -> Callable[[Tensor, Tensor | None], None]:
    def update(weight: Tensor, low: Tensor | None) -> None:
        _ops.linear_sgd_update_(
            weight,
            x,
            grad_out,
            step.lr,
            step.weight_decay,
            step.scale,
            step.rounding_seed,
            low=low,
            clip_value=step.clip_value,
        )

    return update


@pytest.mark.parametrize("dtype_of_tokens", DTYPES, ids=str)
@pytest.mark.parametrize(("dtype", "seed", "has_low"), FORMATS)
def test_linear(dtype: torch.dtype, seed: int, has_low: bool, dtype_of_tokens: torch.dtype) -> None:
    """With gradients that are exact in fp32, and in no 16-bit type."""
    step = Step(lr=0.01, weight_decay=0.1, scale=1 / 3, clip_value=10.0, rounding_seed=seed)
    for out, into in ((1, 1), (1, 50), (300, 7), (129, 65), (5, 3000)):
        for tokens in ((0,), (1,), (6, 8), (333,), ()):
            x = integers((*tokens, into), dtype_of_tokens)
            grad_out = integers((*tokens, out), dtype_of_tokens, seed=1)
            grad = update_oracle.linear_gradient(x, grad_out).to(FP32)
            weight = random((out, into), dtype)
            low = random_low((out, into)) if has_low else None
            check_sgd(linear_with(x, grad_out, step), weight, grad, step, low)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_against_float64(dtype: torch.dtype) -> None:
    """Strided tokens; the sum of 600 products is off by some roundings of fp32."""
    x, grad_out = random((200, 3, 90), dtype)[:, :, 5:85], random((3, 200, 70), dtype, seed=1)
    grad_out = grad_out.transpose(0, 1)
    weight = random((70, 80), FP32, seed=2)
    expected = 0.99 * weight.double() - 0.1 * 0.5 * update_oracle.linear_gradient(x, grad_out)
    linear_sgd_update_(weight, x, grad_out, lr=0.1, weight_decay=0.1, scale=0.5)
    assert (weight - expected).abs().max() < 600**0.5 * 2**-24 * expected.abs().max()


# ---- embedding_sgd_update_


@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_decay", [0.0, 0.2])
@pytest.mark.parametrize(("dtype", "seed", "has_low"), FORMATS)
def test_embedding(
    dtype: torch.dtype, seed: int, has_low: bool, weight_decay: float, grad_dtype: torch.dtype
) -> None:
    """As SGD with the dense gradient; without decay, what has no token keeps its bits."""
    step = Step(lr=0.1, weight_decay=weight_decay, scale=0.7, clip_value=1.5, rounding_seed=seed)
    for rows, dim, shape, index_dtype, padding_idx in (
        (50, 33, (7, 20), torch.int64, -1),
        (50, 33, (7, 20), torch.int32, 4),
        (3, 5, (300,), torch.int64, 0),
        (900, 70, (40,), torch.int32, -1),
        (6, 8, (), torch.int64, -1),
        (6, 8, (0,), torch.int64, -1),
    ):
        indices = torch.randint(0, rows, shape, generator=torch.Generator().manual_seed(1))
        indices = indices.to(index_dtype)
        grad_out = random((*shape, dim), grad_dtype)
        grad = update_oracle.embedding_gradient(rows, indices, grad_out, padding_idx)
        weight = random((rows, dim), dtype, seed=2)
        weight[0, 0] = math.nan  # without a token it is neither read nor written
        low = random_low((rows, dim)) if has_low else None
        expected, expected_low = update_oracle.sgd(weight, grad, step, low)
        is_touched = torch.full([rows], weight_decay != 0)
        is_touched[indices[indices != padding_idx].long()] = True
        expected[~is_touched] = weight[~is_touched]
        new, new_low = weight.clone(), None if low is None else low.clone()
        _ops.embedding_sgd_update_(
            new,
            indices,
            grad_out,
            step.lr,
            weight_decay,
            step.scale,
            seed,
            low=new_low,
            clip_value=step.clip_value,
            padding_idx=padding_idx,
        )
        oracle.assert_equal(new, expected)
        if low is not None and new_low is not None and expected_low is not None:
            expected_low[~is_touched] = low[~is_touched]
            oracle.assert_equal(new_low, expected_low)


# ---- any number of threads


def test_threads_change_no_bit() -> None:
    weight, grad = random((300, 700), BF16), random((300, 700), seed=1)
    x, grad_out = random((90, 700), seed=2), random((90, 300), seed=3)
    indices = torch.arange(2000) % 280
    rows = random((2000, 700), BF16, seed=4)
    results: list[list[Tensor]] = []
    for number in (1, 2, 3):
        with num_threads(number):
            new = [weight.clone() for _ in range(3)]
            sgd_update_(new[0], grad, lr=0.1, rounding_seed=8)
            linear_sgd_update_(new[1], x, grad_out, lr=0.1, rounding_seed=8)
            embedding_sgd_update_(new[2], indices, rows, lr=0.1, weight_decay=0.1)
            single = random((300, 700), FP32)
            linear_sgd_update_(single, x, grad_out, lr=0.1)
            results.append([*new, single])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            oracle.assert_equal(two, one)
