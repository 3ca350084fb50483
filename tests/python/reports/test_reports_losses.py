"""Losses as users of other libraries call them; each test names the public report it comes from."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import in_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from ringcomm import nn
from ringcomm.ops import cross_entropy, linear_cross_entropy
from ringcomm.torch_names import FakeTensorMode

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
ROWS, HIDDEN, CLASSES = 6, 4, 10


def drawn(*sizes: int, seed: int = 0, dtype: torch.dtype = F32) -> Tensor:
    values = torch.randn(sizes, dtype=F32, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype)


LOGITS = drawn(ROWS, CLASSES)
TARGET = torch.tensor([1, 9, 0, 4, -100, 3])
LAYER = (drawn(ROWS, HIDDEN, seed=1), drawn(CLASSES, HIDDEN, seed=2))


def leaf_of(values: Tensor, dtype: torch.dtype | None = None, is_trained: bool = True) -> Tensor:
    return values.detach().to(dtype or values.dtype, copy=True).requires_grad_(is_trained)


def grad_of(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def assert_near(found: Tensor, right: Tensor, tolerance: float, what: str = "") -> None:
    assert found.shape == right.shape, what
    found, right = found.detach().double(), right.detach().double()
    torch.testing.assert_close(
        found, right, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )


def assert_near_grads(loss: Tensor, right: Tensor, leaves: Any) -> None:
    found = [torch.autograd.grad(each, leaves) for each in (loss, right)]
    for own, wanted in zip(*found, strict=True):
        assert_near(own, wanted, 1e-5)


def torchs_samples() -> Iterator[tuple[Tensor, Tensor, dict[str, Any], Callable[..., Any]]]:
    """Logits, targets and options of torch's tests of cross_entropy, and ringcomm's form."""
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    op = next(op for op in op_db if op.name == "nn.functional.cross_entropy")
    for dtype in (F32, BF16, F64):
        for sample in op.sample_inputs("cpu", dtype, requires_grad=True):
            yield sample.input, sample.args[0], dict(sample.kwargs), cross_entropy

    def module(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
        loss: Tensor = nn.CrossEntropyLoss(**options)(logits, target)
        return loss

    info = next(m for m in module_db if m.module_cls is torch.nn.CrossEntropyLoss)
    for dtype in (F32, BF16):
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
        wide = leaf_of(logits, F64)
        right = F.cross_entropy(wide, target.detach().double() if is_soft else target, **exact)
        own = leaf_of(logits)
        rows, wanted = (
            x.movedim(1, -1) if x.dim() > 1 and (x is own or is_soft) else x
            for x in (own, target.detach())
        )
        loss = ours(rows, wanted, **options)
        upstream = torch.ones_like(right)
        right.backward(upstream)
        loss.backward(upstream.to(loss.dtype))
        what = f"{logits.dtype} {tuple(logits.shape)} {target.dtype} {options}"
        tolerance = {F32: 2e-5, F64: 1e-12}.get(logits.dtype, 2e-2)
        assert_near(loss, right, tolerance, what)
        assert_near(grad_of(own), grad_of(wide), tolerance, what)
        num += 1
    assert num > 200


# ---- class weights

LOSSES: dict[str, Callable[[Tensor], Any]] = {
    "cross_entropy": lambda w: cross_entropy(LOGITS, TARGET, weight=w),
    "in place": lambda w: cross_entropy(leaf_of(LOGITS) * 1, TARGET, weight=w, inplace=True),
    "linear": lambda w: linear_cross_entropy(*LAYER, TARGET, class_weight=w),
    "module": lambda w: nn.CrossEntropyLoss(w)(LOGITS, TARGET),
    "linear module": lambda w: nn.LinearCrossEntropyLoss(w)(*LAYER, TARGET),
    "probabilities": lambda w: cross_entropy(LOGITS, LOGITS.softmax(-1), weight=w),
    "float64": lambda w: cross_entropy(LOGITS.double(), TARGET, weight=w.double()),
}


@pytest.mark.parametrize("num", [CLASSES - 1, CLASSES + 1, 1])
@pytest.mark.parametrize("name", LOSSES)
def test_another_number_of_class_weights(name: str, num: int) -> None:
    """https://github.com/pytorch/pytorch/issues/69339: fewer weights must not make padding."""
    with pytest.raises(ValueError, match=rf"class weights .* {CLASSES} classes, got shape"):
        LOSSES[name](torch.ones(num))


@in_ranks(2)
def test_class_weights_of_shards(rank: int) -> None:
    """https://github.com/NVIDIA/Megatron-LM/issues/7452: the number of classes is of all ranks."""
    own, group = LOGITS[:, 5 * rank : 5 * rank + 5], dist.group.WORLD
    weight = torch.rand(CLASSES, generator=torch.Generator().manual_seed(0)) + 0.1
    right = F.cross_entropy(LOGITS, TARGET, weight=weight)
    for start in (None, 5 * rank):
        for bad in (weight[:9], torch.ones(11)):
            with pytest.raises(ValueError, match=r"class weights .* 10 classes"):
                cross_entropy(own, TARGET, group=group, vocab_start=start, weight=bad)
        loss = cross_entropy(own, TARGET, group=group, vocab_start=start, weight=weight)
        assert_near(loss, right, 1e-6)
    target = TARGET.clamp(max=8)
    padded = F.cross_entropy(LOGITS[:, :9], target, weight=weight[:9])
    given: dict[str, Any] = {"group": group, "vocab_start": 5 * rank, "vocab_size": 9}
    assert_near(cross_entropy(own, target, weight=weight[:9], **given), padded, 1e-6)
    mesh = init_device_mesh("cpu", (2,))
    part = distribute_tensor(LOGITS, mesh, [Shard(1)])
    assert_near(cross_entropy(part, TARGET, weight=weight), right, 1e-6)
    with pytest.raises(ValueError, match=r"class weights .* 10 classes"):
        cross_entropy(part, TARGET, weight=weight[:9])
    with pytest.raises(ValueError, match=r"class weights .* 10 classes"):
        nn.CrossEntropyLoss(weight[:9], group=group, num_columns=5)


@pytest.mark.parametrize("dtype", [F16, BF16, F64])
def test_class_weights_of_other_dtypes(dtype: torch.dtype) -> None:
    """https://github.com/NVIDIA/DeepLearningExamples/pull/205"""
    weight = (torch.rand(CLASSES, generator=torch.Generator().manual_seed(0)) + 0.5).to(dtype)
    logits = LOGITS.double() if dtype == F64 else LOGITS.to(dtype)
    right = F.cross_entropy(logits.double(), TARGET, weight=weight.double())
    assert_near(cross_entropy(logits, TARGET, weight=weight), right, 1e-5)
    assert_near(nn.CrossEntropyLoss(weight)(logits, TARGET), right, 1e-5)


# ---- logits that are read after the loss


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_logits_of_an_evaluation(mode: Callable[[], Any]) -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/328, also 343 and 507."""
    head = torch.nn.Linear(HIDDEN, CLASSES).requires_grad_(mode is not torch.enable_grad)
    with mode():
        logits = head(LAYER[0])
        kept = logits.clone()
        loss = nn.CrossEntropyLoss(inplace=True)(logits, TARGET)
        assert torch.equal(logits, kept)
        assert_near(loss, F.cross_entropy(kept, TARGET), 1e-6)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_logits_are_read_between_the_passes(dtype: torch.dtype) -> None:
    """https://github.com/unslothai/unsloth/issues/5002: with inplace, by metrics, by another loss
    and by a residual. What reads them later, or a second loss of them, is an error.
    """

    def losses(z: Tensor, loss: Tensor) -> Tensor:
        return loss / 3 + 0.1 * torch.logsumexp(z, -1).pow(2).mean() + 0.2 * (z * z).mean()

    leaf, wide = leaf_of(LOGITS, dtype), leaf_of(LOGITS.to(dtype), F64)
    logits = leaf * 2
    loss = cross_entropy(logits, TARGET, inplace=True)
    assert torch.equal(logits.argmax(-1), LOGITS.to(dtype).argmax(-1))
    losses(logits, loss).backward()
    losses(wide * 2, F.cross_entropy(wide * 2, TARGET)).backward()
    assert_near(grad_of(leaf), grad_of(wide), 1e-6 if dtype == F32 else 1e-2)

    logits = leaf * 2
    before = torch.logsumexp(logits, -1).mean()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (cross_entropy(logits, TARGET, inplace=True) + before).backward()
    logits = leaf * 2
    twice = [cross_entropy(logits, t, inplace=True) for t in (TARGET, TARGET.clamp(min=0))]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (twice[0] + twice[1]).backward()


def with_hooks(head: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return head(x)


INSIDE: dict[str, Callable[..., Any]] = {
    "checkpoint": lambda head, x: checkpoint(head, x, use_reentrant=False),
    "hooks": with_hooks,
    "compiled": lambda head, x: torch.compile(head, fullgraph=True, backend="aot_eager")(x),
}


@pytest.mark.parametrize("inplace", [True, "forward"])
@pytest.mark.parametrize("name", INSIDE)
def test_logits_that_their_own_operation_saves(name: str, inplace: Any) -> None:
    """https://github.com/unslothai/unsloth/issues/5002: where autograd checks no versions.

    tanh needs its result in the backward pass: without hooks and compilers that is an error.
    """
    leaf, wide = leaf_of(LOGITS), leaf_of(LOGITS, F64)

    def head(x: Tensor) -> Any:
        return cross_entropy(torch.tanh(x), TARGET, inplace=inplace)

    torch.compiler.reset()
    INSIDE[name](head, leaf).backward()
    F.cross_entropy(torch.tanh(wide), TARGET).backward()
    assert_near(grad_of(leaf), grad_of(wide), 1e-6)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        head(leaf).backward()


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64])
def test_logits_are_not_written_without_inplace(dtype: torch.dtype) -> None:
    """https://github.com/modelscope/ms-swift/pull/10130,
    https://github.com/NVIDIA/Megatron-LM/pull/1594: not even by the backward pass.
    """
    leaf = leaf_of(LOGITS, dtype)
    capped = leaf.tanh()  # saves its result
    kept = capped.detach().clone()
    loss = cross_entropy(capped, TARGET) + 0.1 * torch.logsumexp(capped, -1).mean()
    loss.backward(retain_graph=True)
    assert torch.equal(capped.detach(), kept)
    once = grad_of(leaf).clone()
    loss.backward()
    assert_near(grad_of(leaf), 2 * once, 1e-6)
    wide = leaf_of(leaf, F64)
    z = wide.tanh()
    (F.cross_entropy(z, TARGET) + 0.1 * torch.logsumexp(z, -1).mean()).backward()
    assert_near(once, grad_of(wide), 1e-6 if dtype in (F32, F64) else 1e-2)


def test_several_losses_in_one_backward_pass() -> None:
    """https://github.com/Dao-AILab/flash-attention/issues/681, with one module in place."""
    head, ours = torch.nn.Linear(HIDDEN, CLASSES), nn.CrossEntropyLoss(inplace=True)
    theirs = copy.deepcopy(head)
    parts = LAYER[0].chunk(3), TARGET.chunk(3)
    pairs = list(zip(*parts, strict=True))
    torch.stack([ours(head(x), t) for x, t in pairs]).sum().backward()
    torch.stack([F.cross_entropy(theirs(x), t) for x, t in pairs]).sum().backward()
    for found, right in zip(head.parameters(), theirs.parameters(), strict=True):
        assert_near(grad_of(found), grad_of(right), 1e-6)


# ---- targets and logits of other dtypes


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16])
def test_targets_of_small_integers(dtype: torch.dtype) -> None:
    """https://github.com/pytorch/pytorch/issues/45540: labels of images; 255 is ignored."""
    ignored = 255 if dtype == torch.uint8 else 100
    target = torch.where(TARGET == -100, ignored, TARGET)
    right = F.cross_entropy(LOGITS, target, ignore_index=ignored)
    given = target.to(dtype)
    assert_near(cross_entropy(LOGITS, given, ignore_index=ignored), right, 1e-6)
    logits = F.linear(*LAYER)
    linear = linear_cross_entropy(*LAYER, given, ignore_index=ignored)
    assert_near(linear, F.cross_entropy(logits, target, ignore_index=ignored), 1e-6)
    with pytest.raises(IndexError, match=rf"target\[4\] = {ignored}"):
        cross_entropy(LOGITS, given)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.2, "z_loss": 0.05, "softcap": 3.0, "logit_scale": -0.7},
    {"vocab_size": CLASSES - 1, "reduction": "none"},
    {"reduction": "sum", "z_loss": 0.1},
    {"num_items": 7},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_float64(options: dict[str, Any]) -> None:
    """https://github.com/modelscope/ms-swift/pull/10130 compares losses in float64 too."""
    target = TARGET.clamp(max=CLASSES - 2)
    results: list[list[Tensor]] = []
    for dtype in (F64, F32):
        hidden, weight = (leaf_of(x, dtype) for x in LAYER)
        for inplace in (False, options.get("reduction") != "none"):
            logits = F.linear(hidden, weight)
            loss, outputs = cross_entropy(
                logits, target, inplace=inplace, outputs=("lse", "entropy", "accuracy"), **options
            )
            fused = linear_cross_entropy(hidden, weight, target, **options)
            assert loss.dtype == fused.dtype == outputs["lse"].dtype == dtype
            grads = torch.autograd.grad(loss.sum(), (hidden, weight))
            fused_grads = torch.autograd.grad(fused.sum(), (hidden, weight))
            results.append([loss, fused, *outputs.values(), *grads, *fused_grads])
    for found in results:
        for value, right in zip(found, results[0], strict=True):
            assert_near(value, right, 2e-5)
    if "vocab_size" not in options:
        assert torch.autograd.gradcheck(
            lambda x: cross_entropy(x, target, **options), leaf_of(LOGITS, F64)
        )
    with pytest.raises(IndexError, match=rf"target\[1\] = {CLASSES}"):
        cross_entropy(LOGITS.double(), torch.tensor([0, CLASSES, 0, 0, 0, 0]), **options)


def test_logits_without_values() -> None:
    """https://github.com/pytorch/pytorch/issues/99250: on the meta device, in FakeTensorMode."""
    with torch.device("meta"):
        logits, target = torch.empty(4, CLASSES), torch.zeros(4, dtype=torch.int64)
    for dtype in (F64, F32, BF16):
        leaf = leaf_of(logits, dtype)
        cross_entropy(leaf, target, label_smoothing=0.1, outputs=("lse",))[0].backward()
        assert grad_of(leaf).is_meta
        with FakeTensorMode():
            fake = torch.zeros(4, CLASSES, dtype=dtype, requires_grad=True)
            cross_entropy(fake, torch.zeros(4, dtype=torch.int64)).backward()
            assert grad_of(fake).shape == fake.shape


# ---- layers


@pytest.mark.parametrize("shift", [0.0, 300.0, -1e4])
def test_logits_with_a_common_offset(shift: float) -> None:
    """https://github.com/pytorch/pytorch/pull/195829, https://github.com/apple/ml-cross-entropy/issues/52"""
    hidden, weight = (leaf_of(x) for x in LAYER)
    bias = (torch.full((CLASSES,), shift) + torch.arange(CLASSES)).requires_grad_()
    loss = linear_cross_entropy(hidden, weight, TARGET, bias=bias)
    grads = torch.autograd.grad(loss, (hidden, weight, bias))
    z = leaf_of(F.linear(hidden, weight, bias), F64)
    right = F.cross_entropy(z, TARGET)
    (slope,) = torch.autograd.grad(right, z)
    exact = slope @ weight.double(), slope.T @ hidden.double(), slope.sum(0)
    assert_near(loss, right, 1e-6)
    for found, wanted in zip(grads, exact, strict=True):
        assert_near(found, wanted, 1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_blocks_do_not_change_the_result(
    reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/NVIDIA-NeMo/Automodel/issues/3803: a mean of means."""
    from ringcomm.ops.losses import linear_blocks

    monkeypatch.setattr(linear_blocks, "BLOCK_BYTES", 1)
    monkeypatch.setattr(linear_blocks, "MIN_BLOCK_TOKENS", 4)
    hidden, weight = leaf_of(drawn(11, HIDDEN)), leaf_of(LAYER[1])
    target = torch.arange(11) % CLASSES
    target[3:9] = -100  # the second block has no labels
    loss = linear_cross_entropy(hidden, weight, target, reduction=reduction)
    right = F.cross_entropy(F.linear(hidden, weight), target, reduction=reduction)
    assert_near(loss, right, 1e-6)
    factor = torch.arange(11.0) if reduction == "none" else torch.tensor(3.0)
    assert_near_grads((loss * factor).sum(), (right * factor).sum(), (hidden, weight))


def test_the_gradient_of_a_16_bit_layer_is_not_filtered() -> None:
    """https://github.com/apple/ml-cross-entropy/issues/14: small probabilities count too."""
    hidden, weight = leaf_of(drawn(512, 16), BF16), leaf_of(drawn(32, 16, seed=1) * 2, BF16)
    target = torch.arange(512) % 32
    grads = torch.autograd.grad(linear_cross_entropy(hidden, weight, target), (hidden, weight))
    wide = [leaf_of(x, F64) for x in (hidden, weight)]
    right = torch.autograd.grad(F.cross_entropy(F.linear(*wide), target), wide)
    for found, wanted in zip(grads, right, strict=True):
        gap = (found.double() - wanted).norm() / wanted.norm()
        assert gap < 0.01


@in_ranks(2)
def test_a_head_that_is_not_gathered(rank: int) -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/332, https://github.com/huggingface/trl/pull/6372"""
    mesh = init_device_mesh("cpu", (2,))
    hidden, weight = LAYER
    bias = torch.zeros(CLASSES)
    for at, name in enumerate(("hidden", "weight", "bias")):
        given: list[Any] = [hidden, weight, bias]
        given[at] = distribute_tensor(given[at], mesh, [Replicate() if at == 0 else Shard(0)])
        with pytest.raises(TypeError, match=rf"{name} is a DTensor: .*fully_shard"):
            linear_cross_entropy(given[0], given[1], TARGET, bias=given[2])


@in_ranks(2)
def test_frozen_shards_of_a_head(rank: int) -> None:
    """https://github.com/fla-org/flash-linear-attention/pull/1253: one rank's head is frozen."""
    hidden = leaf_of(LAYER[0])
    weight = leaf_of(LAYER[1][5 * rank : 5 * rank + 5], is_trained=rank == 0)
    given: dict[str, Any] = {"group": dist.group.WORLD, "vocab_start": 5 * rank}
    loss = linear_cross_entropy(hidden, weight, TARGET, vocab_size=CLASSES, **given)
    loss.backward()
    whole = [leaf_of(x) for x in LAYER]
    F.cross_entropy(F.linear(*whole), TARGET).backward()
    assert_near(grad_of(hidden), grad_of(whole[0]), 1e-6)
    if rank == 0:
        assert_near(grad_of(weight), grad_of(whole[1])[:5], 1e-6)
    else:
        assert weight.grad is None


@in_ranks(2)
def test_copies_of_modules_with_a_group(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/73825: process groups cannot be pickled."""
    group = dist.group.WORLD
    plain = nn.CrossEntropyLoss(group=group, num_columns=5)
    fused = nn.LinearCrossEntropyLoss(group=group, vocab_start=5 * rank, vocab_size=CLASSES)
    model: Any = torch.nn.ModuleList([plain, fused])
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    averaged: Any = torch.optim.swa_utils.AveragedModel(model).module
    own, rows = LOGITS[:, 5 * rank : 5 * rank + 5], LAYER[1][5 * rank : 5 * rank + 5]
    for found in (model, copy.deepcopy(model), copy.deepcopy(loaded), loaded, averaged):
        assert_near(found[0](own, TARGET), F.cross_entropy(LOGITS, TARGET), 1e-6)
        right = F.cross_entropy(F.linear(*LAYER), TARGET)
        assert_near(found[1](LAYER[0], rows, TARGET), right, 1e-6)


def test_the_state_of_torchs_module() -> None:
    """https://github.com/deepset-ai/FARM/issues/428: a checkpoint has the weights of the loss."""
    theirs = torch.nn.ModuleList([torch.nn.CrossEntropyLoss(torch.rand(CLASSES))])
    ours = torch.nn.ModuleList([nn.CrossEntropyLoss(torch.ones(CLASSES))])
    ours.load_state_dict(theirs.state_dict())
    assert_near(ours[0](LOGITS, TARGET), theirs[0](LOGITS, TARGET), 1e-6)
    assert not ours.state_dict()
    ours.load_state_dict({})
    assert list(theirs.state_dict()) == ["0.weight"]
    with pytest.raises(RuntimeError, match=r"Unexpected key.*0\.weight"):
        torch.nn.ModuleList([nn.CrossEntropyLoss()]).load_state_dict(theirs.state_dict())
