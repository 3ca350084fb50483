"""The losses' gradients times an upstream factor, in every form, type and reduction.

https://github.com/linkedin/Liger-Kernel/pull/968: gradients that are made in the forward pass lose
the factor. https://github.com/linkedin/Liger-Kernel/issues/272: a loss that is scaled.
"""

from __future__ import annotations

import itertools
from typing import Any

import loss_oracle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import covering, quick, slow
from loss_oracle import random_logits, random_targets
from ranks import in_ranks
from torch import Tensor

from ringcomm.ops import cross_entropy, linear_cross_entropy

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
CLASSES, HIDDEN = 50, 8
FACTORS: dict[str, Any] = {
    "1": 1.0,
    "a third": 1 / 3,
    "large": 1000.0,
    "small": 1e-4,
    "bfloat16": torch.tensor(1 / 3, dtype=BF16),
    "of a scaler": 65536.0,
}
REDUCTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "items": {"num_items": 1e4},
}
FORMS: dict[str, Any] = {"new": False, "in place": True, "forward": "forward"}


def assert_rounded(found: Tensor, right: Tensor, num_roundings: int, what: str) -> None:
    """A gradient in fp32 rounded to its type so many times: infinite where that is too large."""
    dtype = found.dtype
    info, largest = torch.finfo(dtype), right.abs().max()
    allowed = 0.51 * loss_oracle.ulp(right, dtype) + 4e-6 * largest
    # An error of half a unit before the factor may be a whole one after it.
    allowed += 0.51 * (num_roundings - 1) * info.eps * right.abs()
    if dtype == FP64:
        allowed = 1e-12 * largest.expand_as(right)
    smallest = info.smallest_normal * info.eps
    found, allowed = found.double(), allowed + 0.51 * smallest
    error = (found - right).abs()
    # From half a unit above the largest number on, numbers are rounded to infinity.
    limit = info.max * (1 + info.eps / 4) if dtype != FP64 else info.max
    is_large = right.abs() >= limit
    good = torch.where(is_large, found == right.sign() * torch.inf, error <= allowed)
    good |= (right.abs() / limit - 1).abs() < 1e-5
    assert good.all(), (
        f"{what}: {float(found[~good][0]):.9g} instead of {float(right[~good][0]):.9g}"
    )
    is_lost = (found == 0) & (right.abs() > allowed)
    assert not is_lost.any(), what


def given_for(num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    logits = random_logits((num_tokens, CLASSES), FP32).to(dtype)
    return logits, random_targets((num_tokens,), CLASSES)


CASES = [
    case
    for case in itertools.product((*FORMS, "probabilities"), (FP16, BF16, FP32, FP64), REDUCTIONS)
    if case[::2] != ("forward", "none")  # which is refused
]


@pytest.mark.parametrize(
    ("form", "dtype", "reduction"), quick(CASES, *CASES[::9], ("in place", FP16, "mean")), ids=str
)
def test_logits(form: str, dtype: torch.dtype, reduction: str) -> None:
    """Of 1 to 4,096 tokens, over which "mean" divides."""
    options = REDUCTIONS[reduction]
    for num_tokens in (1, 64, 1024, 4096):
        logits, target = given_for(num_tokens, dtype)
        if form == "probabilities":
            target = F.one_hot(target.clamp(min=0), CLASSES).to(dtype)
        right = loss_oracle.evaluate(logits, target, **options).grad
        for name, factor in FACTORS.items():
            leaf = logits.clone().requires_grad_()
            loss = cross_entropy(leaf * 1, target, inplace=FORMS.get(form, False), **options)
            (loss * factor).sum().backward()
            assert leaf.grad is not None
            is_twice = form == "forward" and dtype in (BF16, FP32)
            what = f"{num_tokens} tokens, {name}"
            assert_rounded(leaf.grad, right * float(factor), 2 if is_twice else 1, what)


def check_layer(dtype: torch.dtype, num_tokens: int, options: Any, part: slice, **how: Any) -> None:
    """Gradients of hidden states, weight and bias, for the classes of this rank."""
    hidden, layer = random_logits((num_tokens, HIDDEN), dtype, spread=1.0), random_logits((9, 50))
    weight = layer[:8].t().contiguous().to(dtype) / 3
    target = random_targets((num_tokens,), CLASSES)
    given = [hidden, weight, (layer[8] / 3).to(dtype)]

    def grads(loss_of: Any, cast: torch.dtype, factor: Any) -> list[Tensor]:
        leaves = [x.to(cast, copy=True).requires_grad_() for x in given]
        loss = loss_of(*leaves)
        (loss * factor).sum().backward()
        found = [x.grad for x in leaves]
        return [found[0], found[1][part], found[2][part]]  # type: ignore[list-item, index]

    def plain(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        loss = F.cross_entropy(F.linear(hidden, weight, bias), target, reduction=reduction)
        return loss / options.get("num_items", 1)

    def fused(hidden: Tensor, weight: Tensor, bias: Tensor) -> Any:
        own = {"bias": bias[part], **how, **options}
        return linear_cross_entropy(hidden, weight[part], target, **own)

    reduction = "sum" if "num_items" in options else options.get("reduction", "mean")
    for name, factor in FACTORS.items():
        exact, theirs = (grads(plain, cast, factor) for cast in (FP64, dtype))
        for found, right, torchs in zip(grads(fused, dtype, factor), exact, theirs, strict=True):
            limit = torch.finfo(dtype).max
            if not (torchs.isfinite().all() and right.abs().max() < limit):
                continue  # of float16, where torch's logits have infinite gradients
            least = torch.finfo(dtype).tiny
            loss_oracle.assert_near(found, right, torchs, dtype, f"{num_tokens} {name}", least)


@pytest.mark.parametrize(("dtype", "reduction"), covering([FP16, BF16, FP32], REDUCTIONS), ids=str)
def test_layers(dtype: torch.dtype, reduction: str) -> None:
    """No further off than torch's layer and loss in the same type."""
    for num_tokens in (1, 64, 1024):
        check_layer(dtype, num_tokens, REDUCTIONS[reduction], slice(None))


@pytest.mark.parametrize("how", ["once", "graph retained", slow("compiled")])
def test_a_factor_of_a_layer_is_not_rounded(how: str) -> None:
    """1.00390625 is 1 in bfloat16: the gradients of the forward pass are multiplied in float32."""
    hidden, weight = random_logits((64, HIDDEN), BF16), random_logits((CLASSES, HIDDEN), BF16)
    target = random_targets((64,), CLASSES, ignored=0)

    def step(hidden: Tensor, weight: Tensor) -> Any:
        return linear_cross_entropy(hidden, weight, target)

    call: Any = step
    if how == "compiled":
        torch.compiler.reset()
        call = torch.compile(step, fullgraph=True, backend="aot_eager")
    grads = []
    for factor in (1.0, 1.00390625):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        loss = call(*leaves) * factor
        found = torch.autograd.grad(loss, leaves, retain_graph=how == "graph retained")
        grads.append(found[0])
    assert torch.equal(grads[1], (grads[0].float() * 1.00390625).to(BF16))
    assert not torch.equal(*grads)


@in_ranks(2)
def test_over_ranks(rank: int) -> None:
    """Classes over ranks: the forms of logits, and layers."""
    part = slice(20) if rank == 0 else slice(20, CLASSES)
    how: dict[str, Any] = {"group": dist.group.WORLD, "vocab_start": part.start or 0}
    for dtype in (FP16, BF16, FP32):
        for reduction, num_tokens in (("mean", 1024), ("none", 64), ("items", 64)):
            options = REDUCTIONS[reduction]
            logits, target = given_for(num_tokens, dtype)
            right = loss_oracle.evaluate(logits, target, **options).grad[:, part]
            for form, inplace in FORMS.items():
                if inplace == "forward" and reduction == "none":
                    continue
                for name, factor in FACTORS.items():
                    leaf = logits[:, part].clone().requires_grad_()
                    loss = cross_entropy(leaf * 1, target, inplace=inplace, **how, **options)
                    (loss * factor).sum().backward()
                    assert leaf.grad is not None
                    what = f"{dtype} {reduction} {form} {name}"
                    assert_rounded(leaf.grad, right * float(factor), 1, what)
            check_layer(dtype, num_tokens, options, part, vocab_size=CLASSES, **how)
