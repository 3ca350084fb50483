"""cross_entropy at the edges, of whole rows and of shards: the bound of errors, NaN, no tokens."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import loss_oracle
import oracle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from loss_oracle import BY_NAME, DTYPES, OUTPUTS, covering, named, random_logits, random_targets
from pair_table import Case
from ranks import in_ranks
from torch import Tensor

from ringcomm.ops import cross_entropy

BF16, FP32 = torch.bfloat16, torch.float32


def even_loss(rank: int, logits: Tensor, target: Tensor, **options: Any) -> Any:
    """Of shards of one size, in rank order."""
    start = rank * logits.shape[-1]
    return cross_entropy(logits, target, group=dist.group.WORLD, vocab_start=start, **options)


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


def check_bound(case: Case, size: int, call: Any, columns: slice) -> None:
    logits = loss_oracle.hard_logits(8, size)[case["logits"]].to(BY_NAME[case["dtype"]])
    target = random_targets((8,), size // 2 + 1)
    own = logits[:, columns].clone().requires_grad_()
    options: dict[str, Any] = {"label_smoothing": float(case["smoothing"]), "reduction": "none"}
    loss, outputs = call(own, target, outputs=["lse"], **options)
    loss.sum().backward()
    assert own.grad is not None
    given = (own.grad, logits, target, columns)
    loss_oracle.assert_as_good_as_torch(loss, outputs["lse"], *given, **options)


@pytest.mark.parametrize("case", HARD_CASES, ids=named)
def test_error_bound(case: Case) -> None:
    check_bound(case, int(case["size"]), cross_entropy, slice(None))


@in_ranks(3)
def test_error_bound_of_shards(rank: int) -> None:
    """That of one process's torch, over the same logits."""
    for case in HARD_CASES:
        check_bound(case, 3000, partial(even_loss, rank), slice(rank * 1000, rank * 1000 + 1000))


def check_not_finite(value: float, dtype: torch.dtype, call: Any, columns: slice) -> None:
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
        theirs = logits.float().clone().requires_grad_()
        ours = logits[:, columns].clone().requires_grad_()
        expected, loss = F.cross_entropy(theirs, target, **options), call(ours, target, **options)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
        (right,) = torch.autograd.grad(expected.sum(), theirs)
        (grad,) = torch.autograd.grad(loss.sum(), ours)
        right = right[:, columns]
        rtol, atol = (1e-5, 1e-7) if dtype == torch.float32 else (2**-7, 1e-5)
        torch.testing.assert_close(grad.float(), right, rtol=rtol, atol=atol, equal_nan=True)
        if value == -math.inf and smoothing == 0:
            assert loss[1] == math.inf


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_not_finite(value: float, dtype: torch.dtype) -> None:
    """NaN and infinities where torch has them: one of them, the target, the row, behind a block."""
    check_not_finite(value, dtype, cross_entropy, slice(None))


@in_ranks(2)
def test_shards_that_are_not_finite_and_ties(rank: int) -> None:
    columns = slice(550 * rank, 550 * rank + 550)
    for value in (math.nan, math.inf, -math.inf):
        check_not_finite(value, FP32, partial(even_loss, rank), columns)
    # Of equal logits the first class is the largest, wherever it is.
    target = torch.arange(12)
    for lowest in (0, 5, 6, 11):
        whole = torch.zeros(12, 12)
        whole[:, :lowest] = -1
        own = whole[:, 6 * rank : 6 * rank + 6]
        _, outputs = even_loss(rank, own, target, outputs=["accuracy"])
        assert outputs["accuracy"].tolist() == (target == lowest).float().tolist()


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


def check_nothing_counts(call: Any) -> None:
    for num_tokens, dtype, inplace in itertools.product((0, 4), DTYPES, (False, True)):
        for reduction, expected in (("mean", math.nan), ("sum", 0.0)):
            leaf = random_logits((num_tokens, 9), dtype).requires_grad_()
            options: dict[str, Any] = {"reduction": reduction, "inplace": inplace}
            ignored = torch.full((num_tokens,), -100)
            loss, outputs = call(leaf * 1, ignored, outputs=OUTPUTS, **options)
            (grad,) = torch.autograd.grad(loss, leaf)
            torch.testing.assert_close(loss, torch.tensor(expected), equal_nan=True)
            assert all((value == 0).all() for value in (grad, *outputs.values()))


def test_nothing_counts() -> None:
    """No tokens, or all ignored: as in torch, but that the gradient of a mean is 0."""
    check_nothing_counts(cross_entropy)


@in_ranks(3)
def test_nothing_counts_on_shards(rank: int) -> None:
    check_nothing_counts(partial(even_loss, rank))


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


@pytest.mark.parametrize("items", [4, torch.tensor([2.5])], ids=str)
def test_probabilities_of_one_class(items: Any) -> None:
    """One-hot targets are classes, also where an unlikely class has a logit of -infinity."""
    logits, classes = random_logits((6, 30)), random_targets((6,), 30, ignored=0)
    logits[0, (int(classes[0]) + 1) % 30] = -math.inf
    options: dict[str, Any] = {"z_loss": 1e-2, "logit_scale": 1.3}
    options["weight"] = loss_oracle.class_weights(30)
    results = []
    for target in (classes, F.one_hot(classes, 30).float()):
        leaf = logits.clone().requires_grad_()
        loss = cross_entropy(leaf, target, num_items=items, **options)
        loss.backward()
        results.append((loss.detach(), leaf.grad))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


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
            assert leaf.grad is not None
            grad = leaf.grad.clone()
            changed = leaf * 1
            cross_entropy(changed, target, inplace=True, label_smoothing=0.1).backward()
            tensors = (loss, grad, changed.detach(), *outputs.values())
            results.append([oracle.bits(tensor) for tensor in tensors])
    assert results[0] == results[1] == results[2]
