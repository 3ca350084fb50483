"""linear_cross_entropy: memory, precision, updates, what is wrong, and its blocks on CUDA."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from allocations import tensor_bytes
from cases import covering
from loss_oracle import evaluate_layer, reference
from test_cross_entropy import set_blocks
from torch import Tensor

from ringcomm import nn
from ringcomm.ops import linear_cross_entropy
from ringcomm.ops.losses import linear_blocks

F32, BF16, F64, C64 = torch.float32, torch.bfloat16, torch.float64, torch.complex64
TOKENS, HIDDEN, CLASSES = 72, 24, 333


def layer(dtype: torch.dtype = F32) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    target = torch.randint(CLASSES, (TOKENS,), generator=random)
    target[3::10] = -100
    return {
        "hidden": torch.randn(TOKENS, HIDDEN, generator=random).to(dtype),
        "weight": torch.randn(CLASSES, HIDDEN, generator=random).to(dtype),
        "bias": torch.randn(CLASSES, generator=random).to(dtype),
        "target": target,
    }


def gradients(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    upstream = torch.linspace(0.5, 2, loss.numel()).view_as(loss)
    return list(torch.autograd.grad(loss, inputs, upstream))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    set_blocks(monkeypatch.setattr)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_only_where_they_are_wanted(reduction: str, small_blocks: None) -> None:
    """https://github.com/fla-org/flash-linear-attention/pull/1253,
    https://github.com/PrimeIntellect-ai/prime-rl/pull/3011: a head or what is before it is frozen.
    """
    given, every = layer(), list[Tensor]()
    for wanted in itertools.product((True, False), repeat=3):
        names = zip(("hidden", "weight", "bias"), wanted, strict=True)
        inputs = [given[name].clone().requires_grad_(is_wanted) for name, is_wanted in names]
        hidden, weight, bias = inputs
        loss = linear_cross_entropy(hidden, weight, given["target"], bias=bias, reduction=reduction)
        assert loss.requires_grad == any(wanted)
        if any(wanted):
            found = gradients(loss, *(tensor for tensor in inputs if tensor.requires_grad))
            every = every or found  # those of all three come first
            rights = (grad for grad, is_wanted in zip(every, wanted, strict=True) if is_wanted)
            for grad, right in zip(found, rights, strict=True):
                assert torch.equal(grad, right)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_backward_twice_but_not_of_itself(reduction: str, small_blocks: None) -> None:
    given = layer(F32)
    hidden = given["hidden"].requires_grad_()
    loss = linear_cross_entropy(hidden, given["weight"], given["target"], reduction=reduction)
    first = torch.autograd.grad(loss.sum(), hidden, retain_graph=True)[0]
    with pytest.raises(RuntimeError, match=r"no second derivative.*functional.cross_entropy"):
        torch.autograd.grad(loss.sum(), hidden, retain_graph=True, create_graph=True)
    assert torch.equal(first, torch.autograd.grad(loss.sum(), hidden)[0])


PATHS = ["mean", "none", "fused"]


@pytest.mark.parametrize(("path", "dtype"), covering([*PATHS, "no_grad"], [F32, BF16]), ids=str)
def test_no_logits_of_all(path: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, width, classes = 2048, 16, 4096
    monkeypatch.setattr(linear_blocks, "BLOCK_BYTES", 64 * classes * dtype.itemsize)
    hidden = torch.randn(tokens, width).to(dtype).requires_grad_()
    weight = torch.randn(classes, width).to(dtype).requires_grad_()
    target = torch.randint(classes, (tokens,))

    def step() -> None:
        with torch.set_grad_enabled(path != "no_grad"):
            loss = linear_cross_entropy(
                hidden,
                weight,
                target,
                reduction="none" if path == "none" else "mean",
                fused_update=(lambda rows, grad: None) if path == "fused" else None,
            )
        if path != "no_grad":
            loss.sum().backward()

    step()  # what is made once
    largest, most = tensor_bytes(step)
    block_bytes = max(64 * classes, tokens * 256) * 4
    assert largest <= block_bytes
    assert most < 4 * block_bytes < tokens * classes * dtype.itemsize
    assert tensor_bytes(lambda: (torch.ones(1000), torch.ones(500))) == (4000, 6000)  # what it sees


def test_gradients_that_are_not_kept_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_blocks, "BLOCK_BYTES", 1)
    hidden, weight = torch.randn(64, 512, requires_grad=True), torch.randn(4096, 512)
    target = torch.randint(4096, (64,))

    def most(**options: Any) -> int:
        return tensor_bytes(
            lambda: linear_cross_entropy(hidden, weight, target, **options).sum().backward()
        )[1]

    for reduction in ("mean", "none"):
        assert most(reduction=reduction) < weight.nbytes / 4  # a frozen weight
    weight.requires_grad_()
    assert most() >= weight.nbytes
    weight.grad = None
    assert most(fused_update=lambda rows, grad: None) < weight.nbytes / 4
    assert weight.grad is None


def long_sums(tokens: int) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """A layer in bfloat16, its targets and its gradients in float64."""
    random = torch.Generator().manual_seed(1)
    hidden = (1 + torch.rand(tokens, 8, generator=random)).to(BF16)
    tensors = [hidden, torch.randn(40, 8, generator=random).to(BF16), torch.zeros(40).to(BF16)]
    target = torch.randint(40, (tokens,), generator=random)
    return tensors, target, evaluate_layer([t.double() for t in tensors], target, 1.0)[1]


def test_gradients_are_summed_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many blocks they are as exact as of one.

    https://github.com/apple/ml-cross-entropy/issues/14: small probabilities count too.
    """
    tensors, target, exact = long_sums(4096)

    def run() -> list[Tensor]:
        inputs = [tensor.clone().requires_grad_() for tensor in tensors]
        loss = linear_cross_entropy(inputs[0], inputs[1], target, bias=inputs[2])
        return [grad.double() for grad in torch.autograd.grad(loss, inputs)]

    one = run()
    monkeypatch.setattr(linear_blocks, "BLOCK_BYTES", 1)
    monkeypatch.setattr(linear_blocks, "MIN_BLOCK_TOKENS", 8)
    for found, other, right in zip(run(), one, exact, strict=True):
        size = right.abs().max() * torch.finfo(BF16).eps / 2
        assert (found - right).abs().max() <= (other - right).abs().max() + 0.1 * size


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"hidden": torch.zeros(TOKENS, HIDDEN, dtype=C64)}, TypeError, "must be in float32"),
        ({"hidden": torch.zeros(TOKENS, HIDDEN, dtype=F64)}, TypeError, "the weight"),
        ({"class_weight": torch.ones(CLASSES - 1)}, ValueError, "give vocab_size"),
        ({"hidden": torch.zeros(TOKENS, HIDDEN - 1)}, ValueError, "weight of shape"),
        ({"weight": torch.zeros(CLASSES, HIDDEN, dtype=BF16)}, TypeError, "the weight"),
        ({"bias": torch.zeros(CLASSES - 1)}, ValueError, "the bias must have shape"),
        ({"bias": torch.zeros(CLASSES, dtype=BF16)}, TypeError, "the bias"),
        ({"weight": torch.zeros(CLASSES, HIDDEN, device="meta")}, ValueError, "and meta"),
        ({"target": torch.arange(TOKENS - 1)}, ValueError, "targets must have shape"),
        ({"target": torch.arange(TOKENS) + CLASSES - 70}, IndexError, r"target\[70\] = 333"),
        ({"class_weight": torch.ones(CLASSES - 1), "vocab_size": CLASSES}, ValueError, "weight"),
        ({"vocab_size": CLASSES + 1}, ValueError, "columns"),
        ({"class_weight": torch.ones(CLASSES + 1)}, ValueError, "class weights"),
        ({"class_weight": torch.ones(1)}, ValueError, "class weights"),
        ({"outputs": ("logits",)}, ValueError, "outputs"),
        ({"sequence_parallel": True}, ValueError, "sequence_parallel"),
        ({"accumulate_dtype": BF16}, ValueError, "accumulate_dtype must be float32 or hidden's"),
    ],
)
def test_bad_input(arguments: Any, error: Any, words: str, small_blocks: None) -> None:
    given: dict[str, Any] = {**layer(F32), **arguments}
    for has_grad in (False, True):
        given["hidden"] = given["hidden"].clone().requires_grad_(has_grad)
        with pytest.raises(error, match=words):
            linear_cross_entropy(**given)


@pytest.mark.parametrize("shift", [0.0, 300.0, -1e4])
def test_logits_with_a_common_offset(shift: float) -> None:
    """https://github.com/pytorch/pytorch/pull/195829, https://github.com/apple/ml-cross-entropy/issues/52"""
    given = layer()
    bias = torch.full((CLASSES,), shift) + torch.arange(CLASSES) / CLASSES
    leaves = [x.requires_grad_() for x in (given["hidden"], given["weight"] / 5, bias)]
    hidden, weight, _ = leaves
    loss = linear_cross_entropy(hidden, weight, given["target"], bias=bias)
    found = torch.autograd.grad(loss, leaves)
    z = torch.nn.functional.linear(*leaves).detach().double().requires_grad_()
    right = torch.nn.functional.cross_entropy(z, given["target"])
    (slope,) = torch.autograd.grad(right, z)
    exact = slope @ weight.double(), slope.T @ hidden.double(), slope.sum(0)
    torch.testing.assert_close(loss.double(), right, rtol=1e-6, atol=1e-6)
    for grad, wanted in zip(found, exact, strict=True):
        torch.testing.assert_close(grad.double(), wanted, rtol=1e-5, atol=1e-5)


def sgd(weight: Tensor, lr: float, seen: list[int]) -> Callable[[slice, Tensor], None]:
    def update(rows: slice, grad: Tensor) -> None:
        assert grad.dtype == F32
        assert grad.shape == weight[rows].shape
        seen.extend(range(rows.start, rows.stop))
        weight[rows] = (weight[rows].float() - lr * grad).to(weight.dtype)

    return update


def test_training_with_fused_updates(small_blocks: None) -> None:
    """Ten steps as with torch.optim.SGD; hidden's gradient is of the weight as it was."""
    given = layer(F32)
    plain, fused = (given["weight"].clone().requires_grad_() for _ in range(2))
    optimizer = torch.optim.SGD([plain], lr=0.5)
    hidden = [given["hidden"].clone().requires_grad_() for _ in range(2)]
    for _ in range(10):
        optimizer.zero_grad()
        linear_cross_entropy(hidden[0], plain, given["target"]).backward()
        optimizer.step()
        seen: list[int] = []
        update = sgd(fused, 0.5, seen)
        loss = linear_cross_entropy(hidden[1], fused, given["target"], fused_update=update)
        assert not seen
        loss.backward(retain_graph=True)
        assert seen == list(range(CLASSES))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    torch.testing.assert_close(fused, plain)
    torch.testing.assert_close(hidden[1].grad, hidden[0].grad)


@pytest.mark.parametrize(("path", "hidden_dtype"), covering(PATHS, [F32, BF16]), ids=str)
def test_autocast(path: str, hidden_dtype: torch.dtype, small_blocks: None) -> None:
    given = layer(F32)
    reduction = "none" if path == "none" else "mean"

    def call(function: Callable[..., Any], **others: Any) -> list[Tensor]:
        hidden = given["hidden"].to(hidden_dtype, copy=True).requires_grad_()
        weight = given["weight"].clone().requires_grad_()
        with torch.autocast("cpu", dtype=BF16):
            loss = function(hidden, weight, given["target"], reduction=reduction, **others)
            loss.backward(torch.ones_like(loss))
        grads = [t.grad if t.grad is not None else updates[0] for t in (hidden, weight)]
        return [t.detach().double() for t in (loss, *grads)]

    updates = [torch.zeros(CLASSES, HIDDEN)]
    fused = {"fused_update": lambda rows, grad: updates[0][rows].copy_(grad)}
    actual = call(linear_cross_entropy, **(fused if path == "fused" else {}))

    def plain(x: Tensor, weight: Tensor, target: Tensor, reduction: str) -> Tensor:
        logits = torch.nn.functional.linear(x, weight)
        return reference(logits, target, wide=F32, reduction=reduction)[0]

    torchs = call(plain)
    for found, other in zip(actual, torchs, strict=True):
        torch.testing.assert_close(found, other, rtol=2**-7, atol=2**-8 * float(other.abs().max()))


@pytest.mark.parametrize("path", PATHS)
def test_compile(path: str, small_blocks: None) -> None:
    given = layer(F32)
    options: dict[str, Any] = {"reduction": "none" if path == "none" else "mean", "softcap": 8.0}

    def step(hidden: Tensor, weight: Tensor, target: Tensor, update: Any) -> Tensor:
        loss = linear_cross_entropy(hidden * 2, weight, target, fused_update=update, **options)
        return loss.sum()

    # The update is the user's code, and may be what dynamo cannot trace.
    fast = torch.compile(step, backend="aot_eager", fullgraph=path != "fused")
    results = []
    for function in (step, fast):
        hidden, weight = (given[name].clone().requires_grad_() for name in ("hidden", "weight"))
        for _ in range(2):
            update = sgd(weight, 0.1, []) if path == "fused" else None
            loss = function(hidden, weight, given["target"], update)
            loss.backward()
        results.append((loss, hidden.grad, weight if path == "fused" else weight.grad))
    torch.testing.assert_close(*results)


# ---- blocks and sums as they are on CUDA, on this machine's memory

MIB = 1 << 20
CUBLAS_WORKSPACE = 32 * MIB  # torch's default on sm_90
TOKEN_BYTES = 24 + 16 + 8  # stats, outputs and targets


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "classes"),
    [(8192, 128256), (16384, 32000), (8192, 50257), (4096, 262144), (8193, 151936), (100, 128256)],
)
def test_blocks_of_tokens_on_cuda_are_whole_tiles_within_300_mib(
    tokens: int, classes: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_blocks, "_is_on_gpu", lambda tensor: True)
    hidden = torch.empty(tokens, 64, dtype=dtype, device="meta")
    weight = torch.empty(classes, 64, dtype=dtype, device="meta")
    blocks = linear_blocks.token_blocks(hidden, weight)
    sizes = [block.stop - block.start for block in blocks]
    assert [block.start for block in blocks] == list(itertools.accumulate(sizes, initial=0))[:-1]
    assert sum(sizes) == tokens
    assert all(size % 128 == 0 for size in sizes[:-1])
    logits = max(sizes) * classes * dtype.itemsize
    assert logits + CUBLAS_WORKSPACE + tokens * TOKEN_BYTES <= 300 * MIB
    if (classes, dtype) == (128256, BF16) and tokens > 1024:
        assert sizes[0] == 1024
        assert logits == 250.5 * MIB
    for block in linear_blocks.class_blocks(hidden, weight)[:-1]:
        assert (block.stop - block.start) % 128 == 0


def test_a_large_weight_has_large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads and writes the sum of its gradient, so there are four and not eight."""
    monkeypatch.setattr(linear_blocks, "_is_on_gpu", lambda tensor: True)
    hidden = torch.empty(8192, 4096, dtype=BF16, device="meta")
    weight = torch.empty(128256, 4096, dtype=BF16, device="meta")
    blocks = linear_blocks.token_blocks(hidden, weight)
    assert [block.stop - block.start for block in blocks] == [2048] * 4


@pytest.fixture
def like_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and sums as on CUDA, on this machine's memory."""
    monkeypatch.setattr(linear_blocks, "_is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(linear_blocks, "CUDA_BLOCK_BYTES", 1)
    monkeypatch.setattr(linear_blocks, "CUDA_PARTS_OF_WEIGHT", 1 << 60)
    monkeypatch.setattr(linear_blocks, "CUDA_TILE", 16)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("accumulate_dtype", [None, BF16, F32], ids=str)
def test_the_sum_of_the_weights_gradient_takes_no_memory_beside_it(
    reduction: str, accumulate_dtype: torch.dtype | None, like_cuda: None
) -> None:
    tokens, width, classes = 128, 256, 2048
    hidden = torch.randn(tokens, width).to(BF16).requires_grad_()
    weight = torch.randn(classes, width).to(BF16).requires_grad_()
    target = torch.randint(classes, (tokens,))

    def step() -> None:
        hidden.grad = weight.grad = None
        options: dict[str, Any] = {"reduction": reduction, "accumulate_dtype": accumulate_dtype}
        linear_cross_entropy(hidden, weight, target, **options).sum().backward()

    step()
    _, most = tensor_bytes(step)
    # Logits of 16 tokens, their gradient, and what is kept of each token.
    extra = most - weight.nbytes - hidden.nbytes
    of_block = 16 * classes * 8 + tokens * 256
    if accumulate_dtype == F32:
        assert extra >= weight.nbytes
    else:
        assert extra <= of_block < weight.nbytes / 2


def test_tensors_from_before_are_not_counted() -> None:
    """The profiler counts their memory as given back if an earlier profile knew its address."""
    kept = [torch.ones(1000), torch.ones(3000)]

    def body() -> None:
        kept[0][1:].add_(torch.ones(999))  # a view of one from before
        kept[1] = torch.ones(500)

    assert tensor_bytes(body) == (999 * 4, 999 * 4)


def test_sums_in_the_gradients_dtype_round_once_for_each_block(like_cuda: None) -> None:
    (*tensors, _), target, (_, exact, _) = long_sums(64)

    def error(accumulate_dtype: torch.dtype | None) -> float:
        rows, weight = (tensor.clone().requires_grad_() for tensor in tensors)
        linear_cross_entropy(rows, weight, target, accumulate_dtype=accumulate_dtype).backward()
        assert weight.grad is not None
        assert weight.grad.dtype == BF16
        return float((weight.grad.double() - exact).abs().max())

    ulp = float(exact.abs().max()) * torch.finfo(BF16).eps
    once = error(F32)
    assert error(BF16) <= once + 4 * ulp / 2  # four blocks
    assert error(BF16) == error(None) != once


@pytest.mark.parametrize("upstream", [1.0, 0.25, 3.0])
def test_gradients_are_scaled_in_place_unless_kept(upstream: float, like_cuda: None) -> None:
    given = layer(BF16)
    inputs = [given[name].requires_grad_() for name in ("hidden", "weight", "bias")]
    rows, weight, bias = inputs
    factor = torch.tensor(upstream)

    def loss() -> Tensor:
        result: Tensor = linear_cross_entropy(rows, weight, given["target"], bias=bias)
        return result

    kept = loss()
    first = torch.autograd.grad(kept, inputs, factor, retain_graph=True)
    copies = [grad.clone() for grad in first]
    last = torch.autograd.grad(kept, inputs, factor)
    for grads in (first, last, torch.autograd.grad(loss(), inputs, factor)):
        for grad, right in zip(grads, copies, strict=True):
            assert torch.equal(grad, right)


def test_no_tokens_give_gradients_of_zero(like_cuda: None) -> None:
    weight = torch.ones(40, 8, dtype=BF16, requires_grad=True)
    hidden, target = torch.empty(0, 8, dtype=BF16), torch.empty(0, dtype=torch.int64)
    linear_cross_entropy(hidden, weight, target, reduction="sum").backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_the_module_passes_the_dtype_of_the_sum_on() -> None:
    given = layer(BF16)
    tensors = given["hidden"], given["weight"], given["target"]
    with pytest.raises(ValueError, match="accumulate_dtype must be float32 or hidden's dtype"):
        nn.LinearCrossEntropyLoss(accumulate_dtype=torch.float16)(*tensors)
    options: dict[str, Any] = {"accumulate_dtype": BF16, "fused_update": lambda rows, grad: None}
    with pytest.raises(ValueError, match="fused_update needs gradients in float32"):
        nn.LinearCrossEntropyLoss(**options)(*tensors)
