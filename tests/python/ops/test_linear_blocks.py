"""linear_cross_entropy's blocks and sums as they are on CUDA, on this machine's memory."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from allocations import tensor_bytes
from loss_oracle import evaluate_layer
from test_linear_cross_entropy import layer
from torch import Tensor

from ringcomm import nn
from ringcomm.ops import linear_cross_entropy
from ringcomm.ops.losses import linear_blocks

F32, BF16 = torch.float32, torch.bfloat16
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
    random = torch.Generator().manual_seed(1)
    hidden = (1 + torch.rand(64, 8, generator=random)).to(BF16)
    tensors = [hidden, torch.randn(40, 8, generator=random).to(BF16)]
    target = torch.randint(40, (64,), generator=random)
    wide = [*(tensor.double() for tensor in tensors), torch.zeros(40).double()]
    exact = evaluate_layer(wide, target, 1.0)[1][1]

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
def test_gradients_are_scaled_in_place_unless_the_graph_is_kept(
    upstream: float, like_cuda: None
) -> None:
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
