"""ringcomm.ops.cross_entropy of one rank: values and gradients against float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import loss_oracle
import oracle
import pytest
import torch
import torch.nn.functional as F
from loss_oracle import (
    BY_NAME,
    DTYPES,
    OPTION_AXES,
    OUTPUTS,
    class_weights,
    covering,
    named,
    options_of,
    random_logits,
    random_targets,
)
from ranks import place
from torch import Tensor

from ringcomm.ops import cross_entropy

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


# ---- values and gradients

CASES = covering(
    {
        "dtype": tuple(BY_NAME),
        # One vector; a block of 1024 and a class; many blocks with a part.
        "size": ("64", "1", "7", "1000", "1025", "3000"),
        "tokens": ("6", "2x3", "one", "0", "2x0"),
        "layout": ("contiguous", "reversed", "in wider rows", "every other", "expanded"),
        "index": ("int64", "int32"),
        **OPTION_AXES,
    }
)


def laid_out(layout: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Logits in whatever order the memory has them."""
    *lead, size = shape
    if layout == "reversed":
        return random_logits(shape[::-1], dtype).permute(*reversed(range(len(shape))))
    if layout == "in wider rows":
        return random_logits((*lead, size + 7), dtype)[..., 3 : size + 3]
    if layout == "every other":
        return random_logits((*lead, 2 * size), dtype)[..., ::2]
    if layout == "expanded":
        return random_logits((*[1] * len(lead), size), dtype).expand(shape)
    return random_logits(shape, dtype)


def compare(logits: Tensor, target: Tensor, device: Any = "cpu", **options: Any) -> None:
    """Loss, outputs and gradient against float64; the logits stay as they were."""
    leaf = logits.detach().to(device).requires_grad_()
    kept = leaf.detach().clone()
    given = loss_oracle.on(device, options)
    loss, outputs = cross_entropy(leaf, target.to(device), outputs=OUTPUTS, **given)
    factor = torch.linspace(0.5, 2, loss.numel()).view(loss.shape)
    loss.backward(factor.to(device))
    assert leaf.grad is not None
    assert leaf.grad.dtype == logits.dtype
    expected = loss_oracle.evaluate(logits, target, factor.double(), **options)
    found = loss.cpu(), {name: value.cpu() for name, value in outputs.items()}
    loss_oracle.assert_close(found, leaf.grad.cpu(), expected)
    assert torch.equal(leaf.detach(), kept)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_against_float64(case: dict[str, str], device: str) -> None:
    """Every pair of two options, types, sizes and layouts."""
    size = int(case["size"])
    lead = tuple(map(int, case["tokens"].split("x"))) if case["tokens"] != "one" else ()
    options = options_of(case, size)
    vocab_size, ignored = options.get("vocab_size", size), options.get("ignore_index", -100)
    target = random_targets(lead, vocab_size, ignore_index=ignored)
    logits = laid_out(case["layout"], (*lead, size), BY_NAME[case["dtype"]])
    compare(logits, target.to(getattr(torch, case["index"])), place(device, 0), **options)


@pytest.mark.parametrize("inplace", [False, True])
def test_nothing_counts(inplace: bool) -> None:
    """No tokens, or all ignored: as in torch, but that the gradient of a mean is 0."""
    for num_tokens, dtype in itertools.product((0, 4), DTYPES):
        for reduction, expected in (("mean", math.nan), ("sum", 0.0)):
            leaf = random_logits((num_tokens, 9), dtype).requires_grad_()
            options: dict[str, Any] = {"reduction": reduction, "inplace": inplace}
            ignored = torch.full((num_tokens,), -100)
            loss, outputs = cross_entropy(leaf * 1, ignored, outputs=OUTPUTS, **options)
            (grad,) = torch.autograd.grad(loss, leaf)
            torch.testing.assert_close(loss, torch.tensor(expected), equal_nan=True)
            assert all((value == 0).all() for value in (grad, *outputs.values()))


def test_more_than_2_to_the_31_logits() -> None:
    """The rows that count are the first and the last; nothing touches the others' memory."""
    num_tokens, size = 67_200, 32_000
    logits = torch.empty(num_tokens, size, dtype=BF16)
    assert logits.numel() > 2**31
    target = torch.full((num_tokens,), -100)
    target[0], target[-1] = 1, size - 1
    ends = [0, num_tokens - 1]
    logits[ends] = random_logits((2, size), BF16)
    expected = loss_oracle.evaluate(logits[ends], target[ends])
    loss, outputs = cross_entropy(logits, target, outputs=["lse"])
    torch.testing.assert_close(loss.double(), expected.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(outputs["lse"][ends].double(), expected.outputs["lse"])


# ---- the bound of errors

HARD_CASES = covering(
    {
        "logits": tuple(loss_oracle.hard_logits(1, 1)),
        "size": ("7", "1000", "3000", "32003"),
        "dtype": tuple(BY_NAME),
        "smoothing": ("0", "0.1"),
    },
    # What smoothing makes of a mask is 1e28, and all else is rounded off.
    {"logits": ("masked",), "smoothing": ("0.1",)},
)


@pytest.mark.parametrize("case", HARD_CASES, ids=named)
def test_error_bound(case: dict[str, str]) -> None:
    size = int(case["size"])
    logits = loss_oracle.hard_logits(8, size)[case["logits"]].to(BY_NAME[case["dtype"]])
    target = random_targets((8,), size // 2 + 1)
    leaf = logits.clone().requires_grad_()
    options: dict[str, Any] = {"label_smoothing": float(case["smoothing"]), "reduction": "none"}
    loss, outputs = cross_entropy(leaf, target, outputs=["lse"], **options)
    loss.sum().backward()
    assert leaf.grad is not None
    loss_oracle.assert_as_good_as_torch(loss, outputs["lse"], leaf.grad, logits, target, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_not_finite(value: float, dtype: torch.dtype) -> None:
    """NaN and infinities where torch has them: one of them, the target, the row, behind a block."""
    logits = random_logits((7, 1100), dtype)
    target = random_targets((7,), 1100, ignored=0)
    logits[0, (int(target[0]) + 1) % 1100] = value
    logits[1, target[1]] = value
    logits[2] = value
    logits[3, 1090] = value
    logits[4, :1090] = value
    logits[5, 0], logits[5, 1] = value, math.inf
    for smoothing in (0.0, 0.1):
        options: dict[str, Any] = {"label_smoothing": smoothing, "reduction": "none"}
        theirs, ours = logits.float().clone().requires_grad_(), logits.clone().requires_grad_()
        expected = F.cross_entropy(theirs, target, **options)
        loss = cross_entropy(ours, target, **options)
        close = torch.testing.assert_close
        close(loss, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
        for result in (expected, loss):
            result.sum().backward()
        assert ours.grad is not None
        assert theirs.grad is not None
        close(ours.grad.float(), theirs.grad, rtol=1e-2, atol=1e-2, equal_nan=True)
        if value == -math.inf and smoothing == 0:
            assert loss[1] == math.inf


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_the_gradient_of_a_saturated_softcap(dtype: torch.dtype) -> None:
    """1 - tanh^2 would have lost all digits where a logit is 10 caps from 0."""
    logits, target = loss_oracle.saturated_logits(dtype)
    wanted = F.one_hot(target, logits.shape[1]).float()
    for given in (target, wanted):
        leaf = logits.clone().requires_grad_()
        cross_entropy(leaf, given, softcap=loss_oracle.SATURATED_CAP, reduction="sum").backward()
        assert leaf.grad is not None
        loss_oracle.assert_saturated(leaf.grad, logits, target)


# ---- in place

IN_PLACE = covering(
    {
        "dtype": tuple(BY_NAME),
        "upstream": ("1", "0.25", "65536"),
        "reduction": ("mean", "sum"),
        **{
            axis: tuple(OPTION_AXES[axis])[:2]
            for axis in ("weight", "smoothing", "softcap", "padding", "z_loss")
        },
    }
)


def gradient_of(logits: Tensor, target: Tensor, upstream: float, **options: Any) -> Tensor:
    leaf = logits.detach().clone().requires_grad_()
    cross_entropy(leaf * 1, target, **options).backward(torch.tensor(upstream))
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("case", IN_PLACE, ids=named)
def test_inplace(case: dict[str, str]) -> None:
    """The gradient of the other form, to the last bit; of float16 to an ulp."""
    options, upstream = options_of(case, 1050), float(case["upstream"])
    logits = random_logits((8, 1050), BY_NAME[case["dtype"]])
    target = random_targets((8,), options.get("vocab_size", 1050))
    expected = gradient_of(logits, target, upstream, **options)
    actual = gradient_of(logits, target, upstream, inplace=True, **options)
    if logits.dtype != FP16:
        oracle.assert_equal(actual, expected)
        return
    finite = expected.isfinite()
    # With a z-loss, whose size is not known in advance, less room is left for small numbers.
    smallest = 2.0**-24 * (1 + options.get("z_loss", 0.0) * 2 * 65504 * max(1, upstream / 32768))
    allowed = loss_oracle.ulp(expected.double().nan_to_num(0.0), FP16) + smallest
    assert ((actual.double() - expected.double()).abs() <= allowed)[finite].all()
    assert (actual[~finite] == expected[~finite]).all()


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_inplace_is_in_the_logits(dtype: torch.dtype) -> None:
    """Whether a gradient is wanted or not, and in nothing beside them."""
    leaf, target = random_logits((2, 3, 70), dtype).requires_grad_(), random_targets((2, 3), 70)
    expected = loss_oracle.evaluate(leaf, target)
    wide = random_logits((6, 80), dtype)
    columns, border = wide[:, 5:75].copy_(leaf.detach().view(6, 70)), wide[:, 75:].clone()
    for logits in (leaf * 1, leaf.detach().clone(), columns.view(2, 3, 70)):
        found = cross_entropy(logits, target, inplace=True, outputs=OUTPUTS)
        held = logits.detach().clone(memory_format=torch.contiguous_format)
        loss_oracle.assert_close(found, held, expected)
        if found[0].requires_grad:
            found[0].backward()
            assert leaf.grad is not None
            oracle.assert_equal(leaf.grad, held)
    oracle.assert_equal(wide[:, 75:].contiguous(), border)


def test_inplace_refused() -> None:
    target = torch.zeros(4, dtype=torch.int64)
    leaf = random_logits((4, 6)).requires_grad_()
    for logits, reduction, words in (
        (leaf * 1, "none", "mean"),
        (leaf, "mean", "leaf"),
        (leaf.view(2, 2, 6).view(4, 6), "mean", "leaf"),
        (leaf.t().contiguous().t(), "mean", r"strides \(1, 4\)"),
        (random_logits((4, 12))[:, ::2], "mean", r"strides \(12, 2\)"),
        (random_logits((1, 6)).expand(4, 6), "mean", r"strides \(0, 1\)"),
        (random_logits((12,)).as_strided((4, 6), (2, 1)), "mean", r"strides \(2, 1\)"),
    ):
        kept = logits.detach().clone()
        with pytest.raises(ValueError, match=words):
            cross_entropy(logits, target, inplace=True, reduction=reduction)
        oracle.assert_equal(logits.detach().contiguous(), kept.contiguous())
    with pytest.raises(ValueError, match="inplace"):
        cross_entropy(leaf * 1, torch.rand(4, 6), inplace=True)
    loss = cross_entropy(leaf * 1, target, inplace=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        loss.backward()


@pytest.mark.parametrize("inplace", [False, True])
def test_overwritten_logits_are_noticed(inplace: bool) -> None:
    """By what has saved them: exp for its own gradient, cross_entropy for the logits'."""
    leaf, target = random_logits((4, 6)).requires_grad_(), torch.zeros(4, dtype=torch.int64)
    logits = leaf.exp() if inplace else leaf * 1
    loss = cross_entropy(logits, target, inplace=inplace)
    if not inplace:
        with torch.no_grad():
            logits += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_second_derivative() -> None:
    leaf, factor = random_logits((4, 6)).requires_grad_(), torch.tensor(2.0, requires_grad=True)
    for target in (torch.zeros(4, dtype=torch.int64), torch.full((4, 6), 1 / 6)):
        loss = cross_entropy(leaf, target) * factor
        (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            grad.sum().backward()


# ---- determinism


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(300, 1000), (100_000, 3)], ids=str)
def test_same_bits(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Again, and with another number of threads."""
    logits, target = random_logits(shape, dtype), random_targets(shape[:1], shape[1])
    results = []
    for number in (1, 1, 2):
        with oracle.num_threads(number):
            leaf = logits.clone().requires_grad_()
            loss, outputs = cross_entropy(leaf, target, outputs=OUTPUTS, label_smoothing=0.1)
            loss.backward()
            changed = logits.clone()
            cross_entropy(changed, target, inplace=True, label_smoothing=0.1)
            assert leaf.grad is not None
            tensors = (loss, leaf.grad, changed, *outputs.values())
            results.append([oracle.bits(tensor) for tensor in tensors])
    assert results[0] == results[1] == results[2]


# ---- probabilities as targets


PROBABILITIES = covering(
    {
        "dtype": tuple(BY_NAME),
        "layout": ("contiguous", "reversed", "every other"),
        "offset": ("0", "1e4"),
        "tokens": ("3x5", "0"),
        **{
            axis: values
            for axis, values in OPTION_AXES.items()
            if axis not in ("ignore", "padding")
        },
    },
    {"reduction": ("items", "items_tensor")},
    {"offset": ("1e4",), "softcap": ("5",)},  # where all z are equal
    {"offset": ("1e4",), "scale": ("-0.7",)},  # a product that fp32 rounds
)


@pytest.mark.parametrize("case", PROBABILITIES, ids=named)
def test_probabilities(case: dict[str, str]) -> None:
    """As targets, against float64."""
    shape = (*map(int, case["tokens"].split("x")), 40)
    dtype, options = BY_NAME[case["dtype"]], options_of(case, 40)
    logits = (laid_out(case["layout"], shape, FP32) + float(case["offset"])).to(dtype)
    target = torch.softmax(random_logits(shape, seed=2), -1).to(dtype)
    leaf = logits.clone().requires_grad_()
    loss = cross_entropy(leaf, target, **options)
    factor = torch.linspace(0.5, 2, loss.numel()).view(loss.shape)
    loss.backward(factor)
    assert leaf.grad is not None
    expected = loss_oracle.evaluate(logits, target, factor.double(), **options)
    # The targets' sum is 1 but for their rounding: an offset of the logits shows in the loss.
    loss_oracle.assert_close((loss, {}), leaf.grad, expected)


@pytest.mark.parametrize("items", [4, torch.tensor([2.5])], ids=str)
def test_probabilities_of_one_class(items: Any) -> None:
    """One-hot targets are classes, also where an unlikely class has a logit of -infinity."""
    logits, classes = random_logits((6, 30)), random_targets((6,), 30, ignored=0)
    logits[0, (int(classes[0]) + 1) % 30] = -math.inf
    options: dict[str, Any] = {
        "z_loss": 1e-2,
        "logit_scale": 1.3,
        "class_weight": class_weights(30),
    }
    results = []
    for target in (classes, F.one_hot(classes, 30).float()):
        leaf = logits.clone().requires_grad_()
        loss = cross_entropy(leaf, target, num_items=items, **options)
        loss.backward()
        results.append((loss.detach(), leaf.grad))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
