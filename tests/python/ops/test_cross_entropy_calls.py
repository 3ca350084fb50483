"""ringcomm.ops.cross_entropy of one rank: in place, torch's checks, torch.compile, bad calls."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import loss_oracle
import oracle
import pytest
import torch
import torch.nn.functional as F
from cases import name_of
from loss_oracle import (
    BY_NAME,
    OPTION_AXES,
    OUTPUTS,
    class_weights,
    covering,
    named,
    options_of,
    random_logits,
    random_targets,
)
from pair_table import Case
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ringcomm import nn
from ringcomm.ops import cross_entropy, linear_cross_entropy
from ringcomm.torch_names import FakeTensorMode

_ops = torch.ops.ringcomm
FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16

IN_PLACE = covering(
    {
        "dtype": tuple(BY_NAME),
        "upstream": ("1", "0.25", "65536"),
        "reduction": ("mean", "sum", "none"),
        **{
            axis: tuple(OPTION_AXES[axis])[:2]
            for axis in ("weight", "smoothing", "softcap", "padding", "z_loss")
        },
    }
)


def gradient_of(logits: Tensor, target: Tensor, upstream: float, **options: Any) -> Tensor:
    leaf = logits.detach().clone().requires_grad_()
    cross_entropy(leaf * 1, target, **options).sum().backward(torch.tensor(upstream))
    assert leaf.grad is not None
    return leaf.grad


class Operators(TorchDispatchMode):
    """The names of those that are dispatched, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("inplace", "in_forward", "in_backward"),
    [
        (False, ["softmax_stats", "cross_entropy_loss"], "cross_entropy_grad"),
        (True, ["softmax_stats", "cross_entropy_loss"], "cross_entropy_grad_"),
        ("forward", ["cross_entropy_and_grad_"], "scale_"),
    ],
)
def test_the_operators_of_a_loss(inplace: Any, in_forward: list[str], in_backward: str) -> None:
    """On a GPU each takes the host some 10 us or more. The zeros are torch's, for by_token."""
    leaf, target = random_logits((3, 9)).requires_grad_(), torch.tensor([1, 2, -100])
    logits, upstream = leaf * 1, torch.ones([])
    with Operators() as forward:
        loss = cross_entropy(logits, target, inplace=inplace)
    assert forward.names == [f"ringcomm::{name}" for name in in_forward]
    with Operators() as backward:
        torch.autograd.grad(loss, logits, upstream)
    assert backward.names == ["aten::zeros", f"ringcomm::{in_backward}"]


@pytest.mark.parametrize("case", IN_PLACE, ids=named)
def test_inplace(case: Case) -> None:
    """The gradient of the other form, to the last bit."""
    options, upstream = options_of(case, 1050), float(case["upstream"])
    logits = random_logits((8, 1050), BY_NAME[case["dtype"]])
    target = random_targets((8,), options.get("vocab_size", 1050))
    expected = gradient_of(logits, target, upstream, **options)
    oracle.assert_equal(gradient_of(logits, target, upstream, inplace=True, **options), expected)
    if case["reduction"] != "none":  # and factors are powers of two
        found = gradient_of(logits, target, upstream, inplace="forward", **options)
        oracle.assert_equal(found, expected)


@pytest.mark.parametrize("inplace", [True, "forward"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_inplace_is_in_the_logits(dtype: torch.dtype, inplace: Any) -> None:
    """From the backward pass on, or the forward pass, and in nothing beside them."""
    leaf, target = random_logits((2, 3, 70), dtype).requires_grad_(), random_targets((2, 3), 70)
    expected = loss_oracle.evaluate(leaf, target)
    wide = random_logits((6, 80), dtype)
    columns, border = wide[:, 5:75], wide[:, 75:].clone()
    columns *= 0
    columns += leaf.view(6, 70)
    for logits in (leaf * 1, columns.view(2, 3, 70)):
        kept = logits.detach().clone()
        found = cross_entropy(logits, target, inplace=inplace, outputs=OUTPUTS)
        is_kept = inplace is True or dtype == FP16
        assert torch.equal(logits, kept) == is_kept
        # Which has no memory of its own: the logits of "forward" count as written before.
        grad, *own = torch.autograd.grad(found[0], (leaf, logits) if is_kept else leaf)
        for alias in own:
            assert alias.untyped_storage().data_ptr() == logits.untyped_storage().data_ptr()
        held = logits.detach().clone(memory_format=torch.contiguous_format)
        loss_oracle.assert_close(found, held, expected)
        oracle.assert_equal(grad, held)
    oracle.assert_equal(wide.detach()[:, 75:].contiguous(), border)
    with torch.no_grad():
        given = leaf * 1
        loss, _ = cross_entropy(given, target, inplace=inplace, outputs=OUTPUTS)
        oracle.assert_equal(given, leaf)
        torch.testing.assert_close(loss.double(), expected.loss, rtol=1e-5, atol=1e-5)


def test_inplace_refused() -> None:
    inplace: Any
    target = torch.zeros(4, dtype=torch.int64)
    leaf = random_logits((4, 6)).requires_grad_()
    for logits, words in (
        (leaf, "leaf"),
        (leaf.view(2, 2, 6).view(4, 6), "leaf"),
        (leaf.t().contiguous().t(), r"strides \(1, 4\)"),
        (leaf.repeat(1, 2)[:, ::2], r"strides \(12, 2\)"),
        ((leaf[:1] * 1).expand(4, 6), r"strides \(0, 1\)"),
        (leaf.flatten().repeat(2).as_strided((4, 6), (2, 1)), r"strides \(2, 1\)"),
    ):
        kept = logits.detach().clone()
        for inplace in (True, "forward"):
            with pytest.raises(ValueError, match=words):
                cross_entropy(logits, target, inplace=inplace)
        oracle.assert_equal(logits.detach().contiguous(), kept.contiguous())
    for inplace, reduction, words in (
        ("forward", "none", 'mean.*True supports "none"'),
        ("backward", "mean", "inplace must be False, True or \"forward\", got 'backward'"),
        (None, "mean", "got None"),
    ):
        with pytest.raises(ValueError, match=words):
            cross_entropy(leaf * 1, target, inplace=inplace, reduction=reduction)
        with pytest.raises(ValueError, match=words):
            nn.CrossEntropyLoss(inplace=inplace, reduction=reduction)
    with pytest.raises(ValueError, match="inplace"):
        cross_entropy(leaf * 1, torch.rand(4, 6), inplace=True)
    for inplace in (True, "forward"):
        loss = cross_entropy(leaf * 1, target, inplace=inplace)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("inplace", [False, True, "forward"])
def test_overwritten_logits_are_noticed(inplace: Any) -> None:
    """By what has saved them: exp for its own gradient, cross_entropy for the logits'."""
    leaf, target = random_logits((4, 6)).requires_grad_(), torch.zeros(4, dtype=torch.int64)
    logits = leaf.exp() if inplace else leaf * 1
    loss = cross_entropy(logits, target, inplace=inplace)
    if not inplace:
        with torch.no_grad():
            logits += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


@pytest.mark.parametrize("inplace", [False, True, "forward"])
def test_a_loss_whose_gradient_is_none(inplace: Any) -> None:
    """It counts as zero, as with torch's: other ranks may wait for this one's backward pass."""
    leaf, target = random_logits((4, 6)).requires_grad_(), torch.zeros(4, dtype=torch.int64)
    (_NoGradient.apply(cross_entropy(leaf * 1, target, inplace=inplace)) + leaf.sum()).backward()
    assert leaf.grad is not None
    assert leaf.grad.eq(1).all()


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("factor", [None, torch.tensor(2.0, requires_grad=True)], ids=["1", "2"])
def test_no_second_derivative(factor: Tensor | None, inplace: bool) -> None:
    """A gradient penalty would be 0 in silence: the upstream gradient 1 requires no grad."""
    leaf = random_logits((4, 6)).requires_grad_()
    for target in (torch.zeros(4, dtype=torch.int64), torch.full((4, 6), 1 / 6)):
        if inplace and target.is_floating_point():
            continue
        loss = cross_entropy(leaf.clone(), target, inplace=inplace)
        loss = loss if factor is None else loss * factor
        with pytest.raises(RuntimeError, match=r"no second derivative.*functional.cross_entropy"):
            torch.autograd.grad(loss, leaf, create_graph=True)


@pytest.mark.parametrize("weight", [None, class_weights(8)], ids=["plain", "weight"])
def test_opcheck(weight: Tensor | None) -> None:
    """merge_softmax_stats has a group: test_vocab_parallel.py."""
    logits = random_logits((5, 9), FP32 if weight is None else BF16)
    target = random_targets((5,), 8)
    check, place = torch.library.opcheck, (0, 8, -100, 0.5, 3.0)
    stats_args = (logits, target, weight, *place, True, True)
    check(_ops.softmax_stats.default, stats_args)
    stats = _ops.softmax_stats(*stats_args)
    for reduction, items in (("mean", torch.tensor(3.0)), ("none", None)):
        loss_args = (stats, target, weight, items, 8, -100, 0.1, 1e-3, reduction)
        check(_ops.cross_entropy_loss.default, loss_args)
        both = (target, weight, None, *place[1:], 0.1, 1e-3, reduction, True)
        check(_ops.cross_entropy_and_grad_.default, (logits.clone(), *both))
    loss, _, denominator = _ops.cross_entropy_loss(*loss_args)
    grad_args = (target, weight, stats, denominator, *place, 0.1, 1e-3)
    check(_ops.cross_entropy_grad.default, (torch.ones_like(loss), logits, *grad_args))
    check(_ops.cross_entropy_grad_.default, (torch.ones_like(loss), logits.clone(), *grad_args))
    check(_ops.scale_.default, (logits.clone(), torch.tensor(0.5)))


PROBABILITIES = torch.full((4, 6), 1 / 6)


@pytest.mark.parametrize(
    ("case", "dtype", "inplace"),
    [
        ({}, FP32, False),
        ({"weight": "some"}, FP16, True),
        ({"smoothing": "0.1"}, BF16, "forward"),
        ({"reduction": "items_tensor"}, FP32, True),
        ({"softcap": "5", "smoothing": "0.1"}, FP32, None),  # with probabilities
    ],
)
def test_compile(case: Case, dtype: torch.dtype, inplace: Any) -> None:
    options, target = options_of(case, 6), random_targets((4,), 6)
    if inplace is None:
        target = PROBABILITIES
    else:
        options |= {"inplace": inplace, "outputs": OUTPUTS}

    def step(x: Tensor, target: Tensor) -> Any:
        return cross_entropy(x * 2, target, **options)

    results = []
    torch.compiler.reset()
    for call in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaf = random_logits((4, 6), dtype).requires_grad_()
        found = call(leaf, target)
        loss, outputs = found if isinstance(found, tuple) else (found, {})
        (grad,) = torch.autograd.grad(loss * 4, leaf)
        results.append([loss.detach(), grad, *outputs.values()])
    torch.testing.assert_close(*results, rtol=0 if inplace is not None else 1e-6, atol=0)


def assert_near(found: Any, right: Any, tolerance: float, what: str = "") -> None:
    assert found.shape == right.shape, what
    tolerances: dict[str, Any] = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    values = found.detach().double(), right.detach().double()
    torch.testing.assert_close(*values, **tolerances, msg=lambda m: f"{what}: {m}")


def torchs_samples() -> Iterator[tuple[Tensor, Tensor, dict[str, Any], Callable[..., Any]]]:
    """Logits, targets and options of torch's tests of cross_entropy, and ringcomm's form."""
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    op = next(op for op in op_db if op.name == "nn.functional.cross_entropy")
    for dtype in (FP32, BF16, FP64):
        for sample in op.sample_inputs("cpu", dtype, requires_grad=True):
            yield sample.input, sample.args[0], dict(sample.kwargs), cross_entropy

    def module(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
        loss: Tensor = nn.CrossEntropyLoss(**options)(logits, target)
        return loss

    info = next(m for m in module_db if m.module_cls is torch.nn.CrossEntropyLoss)
    for dtype in (FP32, BF16):
        how = {"device": "cpu", "dtype": dtype, "requires_grad": True, "training": True}
        for sample in info.module_inputs_func(info, **how):
            yield (
                *sample.forward_input.args,
                {**sample.constructor_input.kwargs, **sample.forward_input.kwargs},
                module,
            )


def test_torchs_samples() -> None:
    """Losses and gradients of torch.testing's OpInfo and ModuleInfo, which torch itself must pass.

    ringcomm has classes last.
    """
    pytest.importorskip("expecttest")  # which torch.testing._internal imports
    num = 0
    for logits, target, given, ours in torchs_samples():
        options = {k: v.detach() if isinstance(v, Tensor) else v for k, v in given.items()}
        exact: dict[str, Any] = {
            k: v.double() if isinstance(v, Tensor) else v for k, v in options.items()
        }
        is_soft = target.is_floating_point()
        wide = logits.detach().double().requires_grad_()
        right = F.cross_entropy(wide, target.detach().double() if is_soft else target, **exact)
        own = logits.detach().clone().requires_grad_()
        rows, wanted = (
            x.movedim(1, -1) if x.dim() > 1 and (x is own or is_soft) else x
            for x in (own, target.detach())
        )
        loss = ours(rows, wanted, **options)
        upstream = torch.ones_like(right)
        right.backward(upstream)
        loss.backward(upstream.to(loss.dtype))
        what = f"{logits.dtype} {tuple(logits.shape)} {target.dtype} {options}"
        tolerance = {FP32: 2e-5, FP64: 1e-12}.get(logits.dtype, 2e-2)
        assert_near(loss, right, tolerance, what)
        assert_near(own.grad, wide.grad, tolerance, what)
        num += 1
    assert num > 200


# ---- logits that are read beside the loss

Loss = Callable[[Tensor, Tensor], Tensor]


def between_the_passes(leaf: Tensor, labels: Tensor, loss_of: Loss) -> Tensor:
    """By metrics, by another loss and by a residual."""
    z = leaf * 2
    loss = loss_of(z, labels)
    assert torch.equal(z.argmax(-1), leaf.argmax(-1))
    return loss / 3 + 0.1 * torch.logsumexp(z, -1).pow(2).mean() + 0.2 * (z * z).mean()


def capped(leaf: Tensor, labels: Tensor, loss_of: Loss) -> Tensor:
    """By an operation that saves its result."""
    z = leaf.tanh()
    return loss_of(z, labels) + 0.1 * torch.logsumexp(z, -1).mean()


def in_checkpoint(leaf: Tensor, labels: Tensor, loss_of: Loss) -> Any:
    return checkpoint(lambda x: loss_of(torch.tanh(x), labels), leaf, use_reentrant=False)


def in_hooks(leaf: Tensor, labels: Tensor, loss_of: Loss) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return loss_of(torch.tanh(leaf), labels)


def in_graph(leaf: Tensor, labels: Tensor, loss_of: Loss) -> Any:
    torch.compiler.reset()
    head = lambda x: loss_of(torch.tanh(x), labels)  # noqa: E731
    return torch.compile(head, fullgraph=True, backend="aot_eager")(leaf)


def several(leaf: Tensor, labels: Tensor, loss_of: Loss) -> Tensor:
    parts = zip((leaf * 1).chunk(3), labels.chunk(3), strict=True)
    return torch.stack([loss_of(part * 1, of_part) for part, of_part in parts]).sum()


READ: list[tuple[Any, Any, tuple[torch.dtype, ...]]] = [
    # https://github.com/unslothai/unsloth/issues/5002: with inplace.
    (between_the_passes, True, (FP32, BF16, FP16)),
    # The same, where autograd checks no versions.
    *itertools.product((in_checkpoint, in_hooks, in_graph), (True, "forward"), ((FP32,),)),
    # https://github.com/modelscope/ms-swift/pull/10130,
    # https://github.com/NVIDIA/Megatron-LM/pull/1594: not even the backward pass writes them.
    (capped, False, (FP32, BF16, FP16, FP64)),
    # https://github.com/Dao-AILab/flash-attention/issues/681: in one backward pass.
    (several, True, (FP32,)),
]


@pytest.mark.parametrize(("read", "inplace", "dtypes"), READ, ids=name_of)
def test_logits_that_are_read_beside_the_loss(read: Any, inplace: Any, dtypes: Any) -> None:
    labels = random_targets((6,), 10)
    for dtype in dtypes:
        leaf = random_logits((6, 10), FP32).to(dtype).requires_grad_()
        wide = leaf.detach().double().requires_grad_()
        loss = read(leaf, labels, partial(cross_entropy, inplace=inplace))
        loss.backward(retain_graph=not inplace)
        read(wide, labels, F.cross_entropy).backward()
        assert_near(leaf.grad, wide.grad, 1e-6 if dtype in (FP32, FP64) else 1e-2)
        if not inplace:
            assert leaf.grad is not None
            twice = 2 * leaf.grad
            loss.backward()
            assert_near(leaf.grad, twice, 1e-6)


def test_logits_that_are_read_before_the_loss_or_in_another_one() -> None:
    leaf, labels = random_logits((6, 10)).requires_grad_(), random_targets((6,), 10)
    logits = leaf * 2
    before = torch.logsumexp(logits, -1).mean()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (cross_entropy(logits, labels, inplace=True) + before).backward()
    logits = leaf * 2
    twice = [cross_entropy(logits, t, inplace=True) for t in (labels, labels.clamp(min=0))]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (twice[0] + twice[1]).backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_logits_of_an_evaluation(mode: Callable[[], Any]) -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/328, also 343 and 507."""
    head = torch.nn.Linear(4, 10).requires_grad_(mode is not torch.enable_grad)
    with mode():
        logits, labels = head(random_logits((6, 4))), random_targets((6,), 10)
        kept = logits.clone()
        loss = nn.CrossEntropyLoss(inplace=True)(logits, labels)
        assert torch.equal(logits, kept)
        assert_near(loss, F.cross_entropy(kept, labels), 1e-6)


# ---- other dtypes


@pytest.mark.parametrize("dtype", [FP16, BF16, FP64])
def test_class_weights_of_other_dtypes(dtype: torch.dtype) -> None:
    """https://github.com/NVIDIA/DeepLearningExamples/pull/205"""
    weight, labels = (torch.rand(10) + 0.5).to(dtype), random_targets((6,), 10)
    logits = random_logits((6, 10), FP32).to(dtype)
    right = F.cross_entropy(logits.double(), labels, weight=weight.double())
    assert_near(cross_entropy(logits, labels, weight=weight), right, 1e-5)
    assert_near(nn.CrossEntropyLoss(weight)(logits, labels), right, 1e-5)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16])
def test_targets_of_small_integers(dtype: torch.dtype) -> None:
    """https://github.com/pytorch/pytorch/issues/45540: labels of images; 255 is ignored."""
    ignored = 255 if dtype == torch.uint8 else 100
    hidden, weight = random_logits((6, 4)), random_logits((10, 4), seed=3)
    target, logits = torch.tensor([1, 9, 0, 4, ignored, 3]), F.linear(hidden, weight)
    right = F.cross_entropy(logits, target, ignore_index=ignored)
    given = target.to(dtype)
    assert_near(cross_entropy(logits, given, ignore_index=ignored), right, 1e-6)
    linear = linear_cross_entropy(hidden, weight, given, ignore_index=ignored)
    assert_near(linear, right, 1e-6)
    with pytest.raises(IndexError, match=rf"target\[4\] = {ignored}"):
        cross_entropy(logits, given)


FORMS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.2, "z_loss": 0.05, "softcap": 3.0, "logit_scale": -0.7},
    {"vocab_size": 9, "reduction": "none"},
    {"reduction": "sum", "z_loss": 0.1},
    {"num_items": 7},
]


@pytest.mark.parametrize("options", FORMS, ids=str)
def test_float64(options: dict[str, Any]) -> None:
    """https://github.com/modelscope/ms-swift/pull/10130 compares losses in float64 too."""
    labels, results = random_targets((6,), 9), list[list[Tensor]]()
    for dtype, inplace in itertools.product((FP64, FP32), (False, True)):
        hidden, weight = (
            random_logits(shape, seed=3).to(dtype).requires_grad_() for shape in ((6, 4), (10, 4))
        )
        given = {**options, "inplace": inplace and options.get("reduction") != "none"}
        wanted = ("lse", "entropy", "accuracy")
        loss, outputs = cross_entropy(F.linear(hidden, weight), labels, outputs=wanted, **given)
        fused = linear_cross_entropy(hidden, weight, labels, **options)
        assert loss.dtype == fused.dtype == outputs["lse"].dtype == dtype
        grads = [torch.autograd.grad(each.sum(), (hidden, weight)) for each in (loss, fused)]
        results.append([loss, fused, *outputs.values(), *grads[0], *grads[1]])
    for found in results:
        for value, right in zip(found, results[0], strict=True):
            assert_near(value, right, 2e-5)
    logits = random_logits((6, 10)).double().requires_grad_()
    if "vocab_size" not in options:
        assert torch.autograd.gradcheck(lambda x: cross_entropy(x, labels, **options), logits)
    with pytest.raises(IndexError, match=r"target\[1\] = 10"):
        cross_entropy(logits, torch.tensor([0, 10, 0, 0, 0, 0]), **options)


def test_logits_without_values() -> None:
    """https://github.com/pytorch/pytorch/issues/99250: on the meta device, in FakeTensorMode."""
    for dtype, mode in itertools.product((FP64, FP32, BF16), (None, FakeTensorMode)):
        with torch.device("meta") if mode is None else mode():
            leaf = torch.empty(4, 10, dtype=dtype, requires_grad=True)
            labels = torch.zeros(4, dtype=torch.int64)
            cross_entropy(leaf, labels, label_smoothing=0.1, outputs=("lse",))[0].backward()
            assert leaf.grad is not None
            assert leaf.grad.shape == leaf.shape


def test_operators_refuse_what_the_wrapper_would() -> None:
    logits, target = random_logits((3, 5)), random_targets((3,), 5)
    stats = (-100, 1.0, 0.0, False, False)
    with pytest.raises(ValueError, match="vocab_start must be 0 or more, got -2"):
        _ops.softmax_stats(logits, target, None, -2, 5, *stats)
    both = (7, -100, 1.0, 0.0, 0.0, 0.0, "mean", False)
    with pytest.raises(ValueError, match=r"5 columns.* 7"):
        _ops.cross_entropy_and_grad_(logits, target, None, None, *both)
    with pytest.raises(ValueError, match="shape"):
        _ops.cross_entropy_loss(torch.empty(0, 6), target, None, None, 5, -100, 0.0, 0.0, "mean")


def test_module() -> None:
    logits, target, weight = random_logits((5, 9)), random_targets((5,), 9), class_weights(9)
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-3, "outputs": ("lse",)}
    module = nn.CrossEntropyLoss(weight, **options)
    expected = cross_entropy(logits, target, weight=weight, num_items=3, **options)
    loss, outputs = module(logits, target, num_items=3)
    oracle.assert_equal(loss, expected[0])
    oracle.assert_equal(outputs["lse"], expected[1]["lse"])
    assert not module.state_dict()
    # https://github.com/deepset-ai/FARM/issues/428: a checkpoint has the weights of the loss.
    theirs = torch.nn.ModuleList([torch.nn.CrossEntropyLoss(torch.rand(9))])
    ours = torch.nn.ModuleList([nn.CrossEntropyLoss(torch.ones(9))])
    ours.load_state_dict(theirs.state_dict())
    assert_near(ours[0](logits, target), theirs[0](logits, target), 1e-6)
    ours.load_state_dict({})
    assert list(theirs.state_dict()) == ["0.weight"]
    with pytest.raises(RuntimeError, match=r"Unexpected key.*0\.weight"):
        torch.nn.ModuleList([nn.CrossEntropyLoss()]).load_state_dict(theirs.state_dict())
    half = module.bfloat16()(logits.bfloat16(), target)[0]
    torch.testing.assert_close(half, module.float()(logits, target)[0], rtol=0.02, atol=0.02)


def test_probabilities_of_rows() -> None:
    """Those that sum to one over the last dimension, over both, or over none."""
    rows = torch.softmax(torch.randn(2, 5, 3), -1)
    masked = rows * torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0])[:, None]
    both, none = torch.full((2, 3, 3), 1 / 3), torch.zeros_like(rows)
    for target in (rows, masked, 3 * rows, both, none, rows[:0]):
        logits = torch.randn_like(target)
        right = -(target * torch.log_softmax(logits, -1)).sum(-1)
        torch.testing.assert_close(cross_entropy(logits, target, reduction="none"), right)


LOGITS, TARGET = torch.zeros(4, 6), torch.zeros(4, dtype=torch.int64)
SECOND = torch.softmax(torch.arange(30.0).view(2, 5, 3) % 7, 1)  # classes in dimension 1
HUGE = torch.empty(1, 1).expand(1, (1 << 24) + 1)  # more classes than a float can count


@pytest.mark.parametrize(
    ("error", "words", "args", "options"),
    [
        (ValueError, "16777217", (HUGE, TARGET[:1]), {}),
        (TypeError, "float64 for float64 logits, got torch.float32", (LOGITS.double(), TARGET),
         {"weight": torch.ones(6)}),
        (TypeError, "int64", (LOGITS.long(), TARGET), {}),
        (TypeError, "bool", (LOGITS, TARGET.bool()), {}),
        (TypeError, "complex", (LOGITS, TARGET.to(torch.complex64)), {}),
        (TypeError, "int64", (LOGITS, TARGET), {"weight": torch.ones(6).long()}),
        (ValueError, "scalar", (torch.zeros(()), TARGET), {}),
        (ValueError, r"\(4,\), got \(3,\)", (LOGITS, TARGET[:3]), {}),
        (ValueError, r"last dimension.*movedim\(1, -1\)", (LOGITS[..., None], TARGET[:, None]), {}),
        (ValueError, "meta", (LOGITS, TARGET.to("meta")), {}),
        (ValueError, "0 columns", (LOGITS[:, :0], TARGET), {}),
        (ValueError, "6 columns, but the vocabulary only 7", (LOGITS, TARGET), {"vocab_size": 7}),
        (ValueError, "vocabulary only 0", (LOGITS, TARGET), {"vocab_size": 0}),
        (ValueError, "vocab_start=2", (LOGITS, TARGET), {"vocab_start": 2}),
        (ValueError, r"weights .* 6 classes, got shape \(7,\)", (LOGITS, TARGET),
         {"weight": torch.ones(7)}),
        (ValueError, r"weights .* 6 classes, got shape \(5,\): give vocab_size", (LOGITS, TARGET),
         {"weight": torch.ones(5)}),
        (ValueError, r"5 classes, got shape \(6,\)", (LOGITS, TARGET),
         {"weight": torch.ones(6), "vocab_size": 5}),
        (ValueError, r"weights .* 6 classes, got shape \(1,\)", (LOGITS, TARGET),
         {"weight": torch.ones(1)}),
        (ValueError, r"weights .* 6 classes, got shape \(7,\)", (LOGITS.double(), TARGET),
         {"weight": torch.ones(7).double()}),
        (ValueError, r"\(2, 3\)", (LOGITS, TARGET), {"weight": torch.ones(2, 3)}),
        (ValueError, "weights get no gradient", (LOGITS, TARGET),
         {"weight": torch.ones(6, requires_grad=True)}),
        (ValueError, "weights get no gradient", (LOGITS, PROBABILITIES),
         {"weight": torch.ones(6, requires_grad=True)}),
        (ValueError, "1.5", (LOGITS, TARGET), {"label_smoothing": 1.5}),
        (ValueError, "inf", (LOGITS, TARGET), {"z_loss": math.inf}),
        (ValueError, "softcap.*1e-60", (LOGITS, TARGET), {"softcap": 1e-60}),
        (ValueError, "logit_scale.*inf", (LOGITS, TARGET), {"logit_scale": math.inf}),
        (ValueError, "'avg'", (LOGITS, TARGET), {"reduction": "avg"}),
        (ValueError, "'probs'", (LOGITS, TARGET), {"outputs": ["lse", "probs"]}),
        (ValueError, "'sum'", (LOGITS, TARGET), {"num_items": 3, "reduction": "sum"}),
        (ValueError, r"\(2,\)", (LOGITS, TARGET), {"num_items": torch.ones(2)}),
        (IndexError, r"target\[2\] = 6 is out of range 0 to 5 \(ignore_index is -100\)",
         (LOGITS, torch.tensor([0, 1, 6, 7])), {}),
        (IndexError, r"target\[0\] = -1", (LOGITS, TARGET - 1), {}),
        (IndexError, r"target\[3\] = 5 is out of range 0 to 4",
         (LOGITS, torch.tensor([0, 1, 2, 5])), {"vocab_size": 5}),
        (ValueError, r"\(6, 4\)", (LOGITS, PROBABILITIES.view(6, 4)), {}),
        (ValueError, r"dimension 1.*movedim\(1, -1\)",
         (torch.zeros(2, 5, 3), SECOND), {}),
        (ValueError, r"dimension 1.*movedim\(1, -1\)",
         (torch.zeros(2, 5, 3), SECOND * torch.tensor([1.0, 0.0, 1.0])), {}),
        (ValueError, r"dimension 1.*movedim\(1, -1\)",
         (torch.zeros(2, 5, 3).half(), torch.eye(5)[:, :3].repeat(2, 1, 1)), {}),
        (ValueError, "requires? grad", (LOGITS, PROBABILITIES.clone().requires_grad_()), {}),
        (ValueError, "padding", (LOGITS, PROBABILITIES), {"vocab_size": 5}),
        (ValueError, "outputs", (LOGITS, PROBABILITIES), {"outputs": ["lse"]}),
        (ValueError, "vocab_start=2", (LOGITS, PROBABILITIES), {"vocab_start": 2}),
        (ValueError, "ignore_index=3", (LOGITS, PROBABILITIES), {"ignore_index": 3}),
        (ValueError, "meta", (LOGITS, PROBABILITIES.to("meta")), {}),
        (ValueError, r"6 classes, got shape \(1,\)", (LOGITS, PROBABILITIES),
         {"weight": torch.ones(1)}),
    ],
)  # fmt: skip
def test_wrong_arguments(
    error: type[Exception], words: str, args: tuple[Tensor, Tensor], options: dict[str, Any]
) -> None:
    """https://github.com/pytorch/pytorch/issues/69339: fewer weights must not make padding."""
    with pytest.raises(error, match=words):
        cross_entropy(*args, **options)
    if "classes, got shape" in words:
        with pytest.raises(error, match=words):
            nn.CrossEntropyLoss(options["weight"], vocab_size=options.get("vocab_size"))(*args)
    if error is IndexError or ("classes, got shape" in words and args[1] is TARGET):
        with pytest.raises(error, match=words):
            cross_entropy(args[0].clone(), args[1], inplace=True, **options)
