"""Cases for cross-entropy's Triton kernels: the CPU's tests, and what is particular to a GPU.

Run as a script it works through them by the kernels' PTX on CPU tensors, and prints what is wrong
with each as JSON (triton_scripts.py). On a GPU test_triton.py runs `BESIDES`; the tests of the CPU
run there themselves.
"""

from __future__ import annotations

import importlib
import itertools
import math
import mmap
from collections.abc import Callable
from functools import partial
from typing import Any

import loss_oracle
import pytest
import test_cross_entropy as cpu_tests
import test_cross_entropy_edges as edges
import test_loss_factors
import torch
from loss_oracle import named, options_of, random_logits, random_targets
from torch import Tensor
from triton_scripts import work_through

import ringcomm.ops.losses.cross_entropy_cuda as launchers
from ringcomm.ops import cross_entropy
from ringcomm.ops.losses import linear_blocks
from ringcomm.ops.losses.cross_entropy_cuda import merge_gathered

BF16, FP32 = torch.bfloat16, torch.float32
PLAIN: dict[str, str] = {}
ALL = {
    "weight": "some",
    "smoothing": "0.1",
    "z_loss": "0.01",
    "softcap": "5",
    "padding": "some",
    "scale": "-0.7",
}


def trained(rows: torch.Tensor) -> torch.Tensor:
    """The same memory, now the result of a computation that requires grad, as in-place needs it."""
    rows += torch.zeros([], dtype=rows.dtype, device=rows.device, requires_grad=True)
    return rows


def check_in_place(
    size: int, dtype: torch.dtype, case: dict[str, str], inplace: Any, device: str
) -> None:
    """Rows that begin anywhere: loss and gradient, and nothing else is written."""
    options = options_of(case, size)
    target = random_targets((3,), options.get("vocab_size", size))
    buffer = torch.full((3, size + 9), 77.0, dtype=dtype, device=device)
    rows = buffer[:, 2 : size + 2].copy_(random_logits((3, size), dtype))
    expected = loss_oracle.evaluate(rows.cpu(), target, **options)
    given = loss_oracle.on(device, options)
    loss, outputs = cross_entropy(
        trained(rows), target.to(device), inplace=inplace, outputs=loss_oracle.OUTPUTS, **given
    )
    loss.backward()
    rows, buffer = rows.detach(), buffer.detach()
    found = loss.cpu(), {name: value.cpu() for name, value in outputs.items()}
    loss_oracle.assert_close(found, rows.cpu(), expected)
    rows.fill_(77.0)
    assert bool((buffer == 77.0).all()), "wrote outside of the rows"


def in_place(ops: Any, device: str) -> None:
    """In the forward pass rows held in registers, up to the widest, and read twice."""
    forward = (
        *((size, BF16, PLAIN) for size in (1, 7, 8, 129, 1025, 32_768)),
        *((size, dtype, ALL) for size in (7, 1025) for dtype in (FP32, BF16)),
        (1000, FP32, {"reduction": "sum"}),
        (33_001, FP32, ALL),
        (40_001, BF16, PLAIN),
    )
    backward = ((1025, BF16, PLAIN), (1025, BF16, ALL), (7, FP32, ALL))
    for inplace, cases in (("forward", forward), (True, backward)):
        for size, dtype, case in cases:
            check_in_place(size, dtype, case, inplace, device)


def factors(ops: Any, device: str) -> None:
    """Each factor of the loss times the gradient, which is rounded afterwards."""
    logits, target = random_logits((3, 64)), random_targets((3,), 64)
    forms: tuple[Any, ...] = (False, True, "forward")
    for dtype, inplace in itertools.product((torch.float16, BF16), forms):
        for name, factor in test_loss_factors.FACTORS.items():
            leaf = logits.to(dtype).to(device).requires_grad_()
            loss = cross_entropy(leaf * 1, target.to(device), num_items=1024, inplace=inplace)
            (loss * torch.as_tensor(factor, device=device)).backward()
            assert leaf.grad is not None
            right = loss_oracle.evaluate(leaf.cpu(), target, float(factor), num_items=1024).grad
            is_twice = inplace == "forward" and dtype == BF16
            what = f"{dtype} inplace={inplace} {name}"
            test_loss_factors.assert_rounded(leaf.grad.cpu(), right, 2 if is_twice else 1, what)


def shards(ops: Any, device: str) -> None:
    """Stats merged of shards, the later ones first, are those of whole rows."""
    target = random_targets((5,), 1025).to(device)
    for dtype, bounds, is_masked in (
        (FP32, (0, 600, 1025), False),
        (FP32, (0, 1, 1025, 1025), True),
        (BF16, (0, 500, 501, 1025), True),
    ):
        logits = random_logits((5, 1025), dtype).to(device)
        if is_masked:
            logits[:, 350:] = -torch.inf

        def stats_of(begin: int, end: int, rows: Any = logits) -> Tensor:
            given = (begin, 1025, -100, 1.0, 0.0, not is_masked, True)  # noqa: B023
            result: Tensor = ops.softmax_stats(rows[:, begin:end], target, None, *given)
            return result

        parts = [stats_of(*pair) for pair in reversed(list(itertools.pairwise(bounds)))]
        merged, whole = merge_gathered(torch.cat(parts), len(parts))[:-1], stats_of(0, 1025)[:-1]
        torch.testing.assert_close(merged[:, :5], whole[:, :5], rtol=4e-6, atol=2e-3)
        assert torch.equal(*(s[:, 5].contiguous().view(torch.int32) for s in (merged, whole)))


def beyond_32_bits(ops: Any, device: str) -> None:
    """The last row begins 2 ** 31 elements behind the first."""
    vocab, stride = 129, 2**30
    if device == "cpu":  # three pages of it exist
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
        buffer = torch.frombuffer(mmap.mmap(-1, 5 << 30, flags=flags), dtype=BF16)
    else:
        buffer = torch.empty(5 << 29, dtype=BF16, device=device)
    target = torch.tensor([1, 2, 3])
    for inplace in (True, "forward"):  # by different kernels
        rows = buffer.detach().as_strided([3, vocab], (stride, 1))
        values = rows.copy_(random_logits((3, vocab), BF16)).cpu()
        expected = loss_oracle.evaluate(values, target)
        loss = cross_entropy(trained(rows), target.to(device), inplace=inplace)
        loss.backward()
        loss_oracle.assert_close((loss.cpu(), {}), rows.detach().cpu(), expected)


def no_class(ops: Any, device: str) -> None:
    """A target out of range: NaN for its token alone, or an error that names it."""
    logits = torch.randn(3, 20, device=device)
    target = torch.tensor([3, 20, -100], device=device)
    leaf = logits.clone().requires_grad_()
    loss = cross_entropy(leaf, target, reduction="none")
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    assert loss.isnan().tolist() == [False, True, False]
    assert grad.isnan().tolist() == [[False] * 20, [True] * 20, [False] * 20]
    rows = trained(logits.clone())
    options: dict[str, Any] = {"reduction": "sum", "inplace": True, "outputs": ["loss"]}
    total, outputs = cross_entropy(rows, target, **options)
    total.backward()
    assert total.isnan()
    assert outputs["loss"].isnan().tolist() == [False, True, False]
    assert rows.isnan().tolist() == grad.isnan().tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RINGCOMM_CHECK_TARGETS", "1")
        for inplace in (False, True):
            with pytest.raises(IndexError, match=r"target\[1\] = 20 is out of range 0 to 19"):
                cross_entropy(trained(logits.clone()), target, inplace=inplace)
        patch.setenv("RINGCOMM_CHECK_TARGETS", "yes")
        with pytest.raises(ValueError, match="RINGCOMM_CHECK_TARGETS must be 0 or 1"):
            cross_entropy(logits, target)
    weight = torch.ones(6, device=device)
    with pytest.raises(ValueError, match=r"(weight|element) for each of the 5 classes"):
        cross_entropy(logits[:, :6], target, weight=weight, vocab_size=5)


def wrong_shards(ops: Any, device: str) -> None:
    """Shards that do not fit together, or not with the vocabulary: NaN, or an error."""
    logits, target = torch.randn(2, 20, device=device), torch.zeros(2, dtype=torch.int64).to(device)
    # First class and softcap of each shard; the size that is asked for; what is said.
    for parts, size, said in (
        (((4, 0.0),), -1, "do not add up|must be adjacent"),
        (((0, 0.0), (0, 0.0)), -1, "do not add up|must be adjacent"),
        (((0, 0.0), (20, 3.0)), -1, "calls differ"),
        (((0, 0.0), (20, 0.0)), 30, "40 classes (of the vocabulary's|in all, but .* has) 30"),
    ):
        found = [
            ops.softmax_stats(logits, target, None, start, -1, -100, 1.0, softcap, False, False)
            for start, softcap in parts
        ]
        stats = merge_gathered(torch.cat(found), len(found))
        terms = (size, -100, 0.0, 0.0, "mean")
        loss, _, denominator = ops.cross_entropy_loss(stats, target, None, None, *terms)
        assert loss.isnan()
        options = (0, size, -100, 1.0, 0.0, 0.0, 0.0)
        grad = ops.cross_entropy_grad(loss, logits, target, None, stats, denominator, *options)
        assert grad.isnan().all()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RINGCOMM_CHECK_TARGETS", "1")
            with pytest.raises(ValueError, match=said):
                ops.cross_entropy_loss(stats, target, None, None, *terms)


def scale(ops: Any, device: str) -> None:
    """Rows, columns, parts of either and one row; what is between them stays as it is."""
    whole = torch.arange(1.0, 1 + 40 * 70).view(40, 70)
    for part in (
        (..., ...),
        (slice(3, 20), slice(1, 60)),
        (slice(0, 1), ...),
        (..., slice(5, 6)),
        (slice(2, 3), slice(4, 5)),
        (slice(0), ...),
        (7, slice(2, 69)),
    ):
        for turn in (lambda x: x, torch.Tensor.t):
            buffer = whole.to(device)
            expected = whole.clone()
            expected[part] *= 2
            view = buffer[part]
            ops.scale_(turn(view) if view.dim() == 2 else view, torch.tensor(2.0, device=device))
            assert torch.equal(buffer.cpu(), expected), part
    for gaps in (whole[:, ::2], whole[:1].expand(40, 70), whole.as_strided([6, 24], [1, 2])):
        with pytest.raises(ValueError, match="without gaps"):
            launchers.scale_(gaps, torch.ones([]))


def strided(ops: Any, device: str) -> None:
    """Logits, targets and the gradients of losses in layouts that others' kernels misread.

    https://github.com/NVIDIA/TransformerEngine/issues/2734 (batches that are transposed),
    https://github.com/unslothai/unsloth/pull/10713 (strided targets, parts of the columns),
    https://github.com/ROCm/TransformerEngine/pull/623 (an expanded gradient),
    https://github.com/pytorch/pytorch/issues/194719 (a gradient that is a part of another).
    """
    logits = random_logits((4, 6, 80)).to(device).transpose(0, 1)[..., 7:71]
    target = random_targets((4, 12), 64).to(device).t()[::2]
    factors = torch.linspace(0.1, 2, 48, device=device).view(6, 8)
    ends_of_losses: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda loss: loss.sum(),
        lambda loss: (torch.cat([loss, 2 * loss], 1) * factors).sum(),
        lambda loss: loss.t()[1::2].sum(),
    )
    for ends in ends_of_losses:
        found, right = logits.detach().requires_grad_(), logits.clone().requires_grad_()
        ends(cross_entropy(found, target, reduction="none")).backward()
        given = (right.reshape(24, 64), target.reshape(24))
        plain = torch.nn.functional.cross_entropy(*given, reduction="none")
        ends(plain.view(6, 4)).backward()
        assert found.grad is not None
        torch.testing.assert_close(found.grad, right.grad, rtol=1e-5, atol=1e-6)


BESIDES = {
    check.__name__: check
    for check in (in_place, factors, shards, beyond_32_bits, no_class, wrong_shards, scale, strided)
}


def hard_cases() -> list[dict[str, str]]:
    """Of one size: others would be other kernels for each of them."""
    return [case for case in edges.HARD_CASES if case["size"] == "1000"]


CHECKS: dict[str, Callable[[], None]] = {
    **{
        named(case): partial(cpu_tests.test_against_float64, case, "cpu")
        for case in cpu_tests.CASES
        if case["path"] != "probabilities"  # which have no kernel
    },
    **{named(case): partial(edges.test_error_bound, case) for case in hard_cases()},
    **{
        f"{value} {dtype}": partial(edges.test_not_finite, value, dtype)
        for value, dtype in ((math.nan, FP32), (math.inf, BF16), (-math.inf, FP32))
    },
    "saturated": partial(edges.test_the_gradient_of_a_saturated_softcap, FP32),
    "nothing counts": edges.test_nothing_counts,
    **{name: partial(check, launchers, "cpu") for name, check in BESIDES.items()},
}


def check_by_name(name: str) -> None:
    """A case on CPU tensors, by the launchers of GPUs."""
    for module in ("cross_entropy", "linear_cross_entropy", "linear_blocks"):
        importlib.import_module(f"ringcomm.ops.losses.{module}")._ops = launchers  # type: ignore[attr-defined]
    linear_blocks._is_on_gpu = lambda tensor: True
    CHECKS[name]()


def main() -> None:
    work_through(check_by_name, CHECKS)


if __name__ == "__main__":
    main()
