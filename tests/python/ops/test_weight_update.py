"""The weight updates as operators, and what update_cases.py's table does not hold of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import oracle
import pytest
import torch
import update_cases
import update_oracle
from torch import Tensor
from update_oracle import BF16, DTYPES, FP16, FP32

from ringcomm.ops import triton_kernels, weight_update_cuda

_ops: Any = torch.ops.ringcomm
SHAPE = (4, 6)
LOW = torch.arange(24, dtype=torch.int16).view(SHAPE)
INDICES = torch.tensor([0, 3, 3])
MEAN = torch.ones(1, dtype=torch.float64)


def random(shape: tuple[int, ...], dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


@pytest.mark.parametrize("name", [n for n in update_cases.NAMES if n != "ids_out_of_range"])
def test_cpu_operators_do_what_the_oracle_does(name: str) -> None:
    update_cases.check(name, _ops, "cpu")


@pytest.mark.parametrize(
    ("shape", "num_products"),
    [
        ((4096, 4096), 4),
        ((14336, 4096), 7),
        ((4096, 14336), 8),
        ((128256, 4096), 63),
        ((1024, 1024), 1),
        ((5, 7), 1),
        ((300, 1 << 22), 3),
    ],
)
def test_products_take_a_quarter_of_the_gradient(shape: tuple[int, int], num_products: int) -> None:
    """In fp32, in whole tiles: 8 MiB where a quarter is less, and 32 MiB where it is more."""
    num_rows = triton_kernels.rows_per_product(*shape)
    assert num_rows % 128 == 0
    assert -(-shape[0] // num_rows) == num_products
    num_bytes, tile_bytes = (4 * rows * shape[1] for rows in (num_rows, 128))
    assert num_bytes <= max(shape[0] * shape[1] + tile_bytes, 8 << 20, tile_bytes)
    assert num_bytes <= max(32 << 20, tile_bytes)


@pytest.mark.parametrize("fraction", [1 / 65536, 0.01, 0.25, 0.5, 0.99])
def test_stochastic_rounding_is_unbiased(fraction: float) -> None:
    """A million draws at `fraction` of the way from 1 to the next number, 1 + 2^-7."""
    draws = 1_000_000
    fraction = round(fraction * 65536) / 65536
    weight = torch.ones(draws, dtype=BF16)
    grad = torch.full([draws], -fraction * 2**-7)
    _ops.sgd_update_(weight, grad, 1.0, 0.0, 1.0, 2**35 + 1)
    assert ((weight == 1) | (weight == 1 + 2**-7)).all()
    share = (weight > 1).double().mean().item()
    assert abs(share - fraction) < 6 * math.sqrt(fraction * (1 - fraction) / draws)


def test_random_bits_of_neighbours_and_seeds() -> None:
    """Correlations of a million pairs are within 6 sigma of none; update_cases.py has the bits."""
    elems = np.arange(1_000_000, dtype=np.uint64)

    def correlation(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.abs(np.corrcoef(a >= 0x8000, b >= 0x8000)[0, 1]))

    first, other, far = (update_oracle.random_bits(seed, elems) for seed in (6, 7, 6 + 2**32))
    for bits in (other, far, np.roll(first, 1), np.roll(first, 4096)):
        assert correlation(first, bits) < 6 / math.sqrt(len(elems))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_against_float64(dtype: torch.dtype) -> None:
    """Strided tokens; the sum of 600 products is off by some roundings of fp32."""
    x, grad_out = random((200, 3, 90), dtype)[:, :, 5:85], random((3, 200, 70), dtype, seed=1)
    grad_out = grad_out.transpose(0, 1)
    weight = random((70, 80), FP32, seed=2)
    expected = 0.99 * weight.double() - 0.1 * 0.5 * update_oracle.linear_gradient(x, grad_out)
    _ops.linear_sgd_update_(weight, x, grad_out, 0.1, 0.1, 0.5)
    assert (weight - expected).abs().max() < 600**0.5 * 2**-24 * expected.abs().max()


def test_threads_change_no_bit() -> None:
    grad, row, col = random((300, 700), seed=1), random((300,)).exp(), random((700,)).exp()
    factored = (grad, row, col, row.mean(0, keepdim=True, dtype=torch.float64))
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
            squares = _ops.adalomo_squares(new[4], *factored, 0.3)
            numbers = (new[4].numel(), 0.1, 0.1, 1e-3, 1.0, 0.3, 5)
            _ops.adalomo_update_(new[4], *factored, squares, *numbers)
            results.append([*new, *sums, squares])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            oracle.assert_equal(two, one)


def test_sums_of_squares_at_the_edges() -> None:
    for shape in ((0, 0), (0, 4), (3, 0)):
        rows, cols = _ops.square_sums(torch.empty(shape), 1.0)
        assert (rows.tolist(), cols.tolist()) == ([[0.0] * shape[0]], [[0.0] * shape[1]])
    # One row; one column; tiles of 4096 columns and a rest; many rows.
    for shape in ((1, 9000), (9000, 1), (40, 4097), (3000, 70)):
        grad = random(shape) * 1e-3
        grad[0, 0] = 1.0  # hides no small ones
        rows, cols = _ops.square_sums(grad, 0.7)
        squares = (grad * torch.tensor(0.7)).double() ** 2
        for found, wanted in ((rows[0], squares.sum(1)), (cols[0], squares.sum(0))):
            torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=0)
    # What fills up the last vector is no element: 0 times infinity is not in the sum.
    ones, none = torch.ones(1, 3), torch.zeros(1)
    squares = _ops.adalomo_squares(ones, ones, none, torch.ones(3), MEAN, 1.0)
    assert squares.tolist() == [[math.inf], [3.0]]


def calls() -> dict[str, tuple[Any, ...]]:
    """Right arguments of each operator, new ones every time."""
    grad, x, grad_out = random(SHAPE, seed=1), random((3, 6), seed=2), random((3, 4), seed=3)
    factored = (grad, torch.ones(4), torch.ones(6), MEAN.clone())
    sums, squares = (torch.ones(1, 4), torch.ones(1, 6)), torch.ones(2, 1, dtype=torch.float64)
    return {
        "sgd_update_": (random(SHAPE), grad, 0.1, 0.1, 1.0),
        "linear_sgd_update_": (random(SHAPE), x, grad_out, 0.1, 0.1, 1.0),
        "embedding_sgd_update_": (random(SHAPE), INDICES, x, 0.1, 0.1, 1.0),
        "square_sums": (grad, 1.0),
        "adalomo_moments_": (torch.ones(4), torch.ones(6), *sums, 0.5, 1e-30),
        "adalomo_squares": (random(SHAPE), *factored, 1.0),
        "adalomo_update_": (random(SHAPE), *factored, squares, 24, 0.1, 0.1, 1e-3, 1.0, 1.0),
    }


NAMES = list(calls())
IN_PLACE = [name for name in NAMES if name.endswith("update_")]


@pytest.mark.parametrize("name", NAMES)
def test_opcheck_compile_and_autocast(name: str) -> None:
    operator = getattr(_ops, name)
    torch.library.opcheck(operator.default, calls()[name])
    if name not in ("square_sums", "adalomo_moments_"):
        weight, *rest = calls()[name]
        options = {"low": LOW.clone(), "clip_value": 0.5}
        torch.library.opcheck(operator.default, (weight.to(BF16), *rest), options)

    def call(*args: Any) -> Any:
        return operator(*args)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    results = []
    for function, is_cast in ((call, False), (compiled, False), (call, True)):
        args = calls()[name]
        with torch.autocast("cpu", dtype=BF16, enabled=is_cast):
            found = function(*args)
        assert (found is None) == (name in IN_PLACE)
        results.append([*args, *(found if isinstance(found, tuple) else (found,))])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            if isinstance(one, Tensor):
                oracle.assert_equal(two, one)


def test_a_product_on_cuda_is_in_the_dtype_of_its_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    grads: list[Tensor] = []
    monkeypatch.setattr(weight_update_cuda, "_update_elements", lambda *args: grads.append(args[2]))
    x, grad_out = random((3, 6), BF16), random((3, 4), BF16)
    for is_cast in (False, True):
        with torch.autocast("cpu", FP16, enabled=is_cast):
            weight_update_cuda.linear_sgd_update_(_HALF.clone(), x, grad_out, 0.1, 0.0, 1.0, 7)
    oracle.assert_equal(grads[1], grads[0])
    assert grads[1].dtype == BF16


@pytest.mark.parametrize("name", IN_PLACE)
def test_versions_and_gradients(name: str) -> None:
    """What is written has another version; in grad mode a weight that requires grad is refused."""
    weight, *args = calls()[name]
    kept, low = weight.clone(), LOW.clone()
    weight.requires_grad_()
    with pytest.raises(ValueError, match="requires grad"):
        getattr(_ops, name)(weight, *args)
    oracle.assert_equal(weight.detach(), kept)
    version = weight._version
    with torch.no_grad():
        getattr(_ops, name)(weight, *args)
    assert weight._version == version + 1
    with torch.inference_mode():
        split = kept.to(BF16).clone()
        getattr(_ops, name)(split, *args, low=low)
        assert not torch.equal(split, kept.to(BF16))
    assert low._version == 1


_SGD, _LINEAR, _EMBEDDING, _ADALOMO = IN_PLACE
_BUFFER = torch.zeros(200)

# Positions in the arguments: what stands there instead.
_Change = dict[int | str, Any]
_HALF = random(SHAPE, BF16)
_FOR_ALL: list[tuple[type[Exception], str, _Change]] = [
    (TypeError, "Double|float64", {0: torch.ones(SHAPE).double()}),
    (TypeError, "Int|int32", {0: torch.ones(SHAPE).int()}),
    (ValueError, "side by side|contiguous", {0: torch.ones(4, 1).expand(SHAPE)}),
    (ValueError, "side by side|contiguous", {0: torch.ones(4, 12)[:, ::2]}),
    (ValueError, "meta", {0: torch.ones(SHAPE, device="meta")}),
    (ValueError, "meta", {1: torch.ones(SHAPE, device="meta")}),
    (ValueError, "Float|float32", {"low": LOW}),
    (ValueError, "Float|float32", {"rounding_seed": 3}),
    (ValueError, "Half|float16", {0: random(SHAPE, FP16), "rounding_seed": 3}),
    (ValueError, "-2", {"rounding_seed": -2}),
    (ValueError, "both", {0: _HALF, "low": LOW, "rounding_seed": 3}),
    (TypeError, "Short", {0: _HALF, "low": LOW.int()}),
    (ValueError, r"\[4, 5\]", {0: _HALF, "low": LOW[:, :5]}),
    (ValueError, "strides", {0: _HALF, "low": LOW.t().contiguous().t()}),
    (ValueError, "clip_value", {"clip_value": 0.0}),
    (ValueError, "clip_value", {"clip_value": math.nan}),
]
_NUMBERS: list[tuple[str, int, float]] = [  # of lr's place and those behind it
    ("lr.*-1", 0, -1.0),
    ("lr.*nan", 0, math.nan),
    ("weight_decay.*-1", 1, -1.0),
    ("weight_decay.*inf", 1, math.inf),
    ("scale.*nan", 2, math.nan),
]
_PLACES = {_SGD: 2, _LINEAR: 3, _EMBEDDING: 3}
WRONG: dict[str, list[tuple[type[Exception], str, _Change]]] = {
    _SGD: [
        (ValueError, r"\[4, 6\]", {1: random((4, 5))}),
        (TypeError, "Double", {1: random(SHAPE).double()}),
        (ValueError, "first_elem", {"first_elem": -1}),
        (ValueError, "share", {0: _BUFFER[:24].view(SHAPE), 1: _BUFFER[23:47].view(SHAPE)}),
        (ValueError, "share", {0: _BUFFER[:12].view(BF16).view(SHAPE),
                               "low": _BUFFER[:12].view(torch.int16).view(SHAPE)}),
    ],
    _LINEAR: [
        (ValueError, "two dimensions", {0: random((6, 4)).t()}),
        (ValueError, r"\.\.\., 6", {1: random((3, 5))}),
        (ValueError, r"\.\.\., 4", {2: random((3, 6))}),
        (ValueError, "(as many|same number of) tokens", {1: random((2, 6))}),
        (ValueError, "meta", {2: torch.ones(3, 4, device="meta")}),
        (TypeError, "BFloat16", {1: random((3, 6), BF16)}),
        (TypeError, "Double", {1: random((3, 6)).double(), 2: random((3, 4)).double()}),
        (ValueError, "share", {0: _BUFFER[:24].view(SHAPE), 1: _BUFFER[20:38].view(3, 6)}),
    ],
    _EMBEDDING: [
        (ValueError, "two dimensions", {0: random((24,))}),
        (IndexError, "index 2 is 4", {1: torch.tensor([0, 3, 4])}),
        (IndexError, "index 0 is -1", {1: torch.tensor([-1, 0, 0], dtype=torch.int32)}),
        (TypeError, "Short", {1: torch.tensor([0, 0, 0], dtype=torch.int16)}),
        (ValueError, r"\[3, 6\]", {2: random((3, 5))}),
        (ValueError, "padding_idx", {"padding_idx": 4}),
        (ValueError, "share", {0: _BUFFER[:24].view(SHAPE), 2: _BUFFER[20:38].view(3, 6)}),
    ],
    _ADALOMO: [
        (ValueError, "row", {2: torch.ones(6)}),
        (ValueError, "col_factor", {3: torch.ones(1, 6)}),
        (TypeError, "row", {2: torch.ones(4).double()}),
        (TypeError, "row_mean", {4: torch.ones(1)}),
        (ValueError, "squares", {5: torch.ones(3, 1).double()}),
        (TypeError, "squares", {5: torch.ones(2, 1)}),
        (ValueError, "share", {0: _BUFFER[:24].view(SHAPE), 3: _BUFFER[20:26]}),
        (ValueError, "first_elem", {"first_elem": -1}),
    ],
    "adalomo_moments_": [
        (ValueError, r"row .*\[4\]", {0: torch.ones(5)}),
        (ValueError, r"col .*\[6\]", {1: torch.ones(5)}),  # where row is right
        (ValueError, r"col .*\[6\]", {0: None, 1: torch.ones(7)}),
        (ValueError, r"col .*\[6\]", {1: torch.ones(1, 6)}),
        (TypeError, "row", {0: torch.ones(4).double()}),
        (TypeError, "col", {1: torch.ones(6, dtype=BF16)}),
        (ValueError, "row .*(side by side|contiguous)", {0: torch.ones(8)[::2]}),
        (ValueError, "col .*(side by side|contiguous)", {1: torch.ones(1).expand(6)}),
        (ValueError, "meta", {1: torch.ones(6, device="meta")}),
        (ValueError, "row_sums", {2: torch.ones(4)}),
        (TypeError, "col_sums", {3: torch.ones(1, 6).double()}),
        (ValueError, "col_sums .*contiguous", {3: torch.ones(6, 2).t()}),
    ],
    "square_sums": [
        (ValueError, "matrix", {0: random((24,))}),
        (TypeError, "Double", {0: random(SHAPE).double()}),
    ],
    "adalomo_squares": [
        (ValueError, "row", {2: torch.ones(5)}),
        (ValueError, "meta", {1: torch.ones(SHAPE, device="meta")}),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_wrong_arguments(name: str) -> None:
    """Refused on the CPU, and by the launchers for CUDA; nothing is written."""
    wrong = WRONG[name] + (_FOR_ALL if name in IN_PLACE else [])
    if name in _PLACES:
        wrong += [(ValueError, words, {_PLACES[name] + i: n}) for words, i, n in _NUMBERS]
    for error, words, change in wrong:
        options = {key: new for key, new in change.items() if isinstance(key, str)}
        given = [change.get(place, arg) for place, arg in enumerate(calls()[name])]
        tensors = [arg for arg in (*given, *options.values()) if isinstance(arg, Tensor)]
        kept = [None if tensor.is_meta else tensor.clone() for tensor in tensors]
        with pytest.raises(error, match=words):
            getattr(_ops, name)(*given, **options)
        if error is not IndexError:  # of which the device is told
            seed = [options.pop("rounding_seed")] if "rounding_seed" in options else []
            with pytest.raises(error, match="ringcomm: "):
                getattr(weight_update_cuda, name)(*given, *seed, **options)
        for tensor, before in zip(tensors, kept, strict=True):
            if before is not None:
                oracle.assert_equal(tensor, before)
