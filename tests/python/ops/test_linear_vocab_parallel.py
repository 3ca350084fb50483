"""linear_cross_entropy over a vocabulary in shards, tokens in shares or not."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from linear_loss import (
    BF16,
    CLASSES,
    F16,
    F32,
    F64,
    HIDDEN,
    OPTIONS,
    check_near,
    gradients,
    layer,
    reference,
    run,
    set_blocks,
)
from ranks import run_ranks
from torch import Tensor

from ringcomm.nn import LinearCrossEntropyLoss
from ringcomm.ops import linear_cross_entropy

# Each rank's (first class, number of classes): uneven, with nothing, out of order.
SHARDS: dict[int, list[list[tuple[int, int]]]] = {
    2: [[(0, 200), (200, 133)], [(133, 200), (0, 133)], [(0, 0), (0, 333)]],
    3: [[(0, 100), (100, 1), (101, 232)], [(233, 100), (0, 233), (0, 0)]],
}


def cases() -> Iterator[tuple[dict[str, Any], torch.dtype, bool]]:
    for name, options in OPTIONS.items():
        if name != "padded":
            yield options, F32, name in ("plain", "capped_none")
    yield OPTIONS["plain"], BF16, False
    yield OPTIONS["weighted_none"], F16, True


def check_shards(rank: int, is_fused: bool) -> None:
    set_blocks()
    world_size, group = dist.get_world_size(), dist.group.WORLD
    for shards, (options, dtype, in_order) in itertools.product(SHARDS[world_size], cases()):
        start, size = shards[rank]
        is_sorted = shards == sorted(shards) and in_order
        given = layer(dtype, tokens=72, **options)
        exact = run(reference, given, F64, **options)
        torchs = run(reference, given, dtype, wide=F32, **options)
        rows = slice(start, start + size)
        updates = torch.zeros(size, HIDDEN)
        mine = {**given, "weight": given["weight"][rows], "bias": given["bias"][rows]}
        for is_gathered in (False, True):
            tokens = slice(72 // world_size * rank, 72 // world_size * (rank + 1))
            share = {**mine, "hidden": given["hidden"][tokens]} if is_gathered else mine
            call = functools.partial(
                linear_cross_entropy,
                group=group,
                vocab_start=None if is_sorted else start,
                sequence_parallel=is_gathered,
            )
            if is_fused:
                actual = run_fused(call, share, updates, **options)
            else:
                actual = run(call, share, dtype, **options)
            parts = [slice(None)] * len(exact)
            parts[1:4] = [tokens if is_gathered else slice(None), rows, rows]
            for found, right, other, part in zip(actual, exact, torchs, parts, strict=True):
                if right.dim() == 0:
                    check_near(found, right, other, dtype)
                elif right[part].numel() > 0:
                    check_near(found, right[part], other[part], dtype)
                else:
                    assert found.shape == right[part].shape


def run_fused(
    function: Callable[..., Any], given: dict[str, Tensor], updates: Tensor, **options: Any
) -> list[Tensor]:
    """As run(), the weight's gradient through the update."""

    def update(rows: slice, grad: Tensor) -> None:
        updates[rows] = grad

    inputs = [given[name].clone().requires_grad_() for name in ("hidden", "weight", "bias")]
    hidden, weight, bias = inputs
    result = function(hidden, weight, given["target"], bias=bias, fused_update=update, **options)
    loss, named = result if isinstance(result, tuple) else (result, {})
    loss.backward(torch.linspace(0.5, 2, loss.numel()).view_as(loss))
    assert weight.grad is None
    assert hidden.grad is not None
    assert bias.grad is not None
    wanted = [named[name] for name in options.get("outputs", ())]
    return [t.detach().double() for t in (loss, hidden.grad, updates, bias.grad, *wanted)]


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("backend", ["ringcomm", "gloo"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_shards(world_size: int, backend: str, is_fused: bool) -> None:
    run_ranks(world_size, check_shards, is_fused, backend=backend, timeout_s=120)


def check_strides(rank: int) -> None:
    """Hidden states whose gradient, as torch makes it, does not lie in rows of tokens."""
    group = dist.group.WORLD
    given = layer(F32, tokens=72)
    target = given["target"].view(8, 9).t()
    weight = given["weight"][rank::2]
    inputs = [given["hidden"].view(8, 9, HIDDEN).clone().requires_grad_() for _ in range(2)]
    everywhere, _ = reference(
        inputs[0].transpose(0, 1), torch.cat([given["weight"][r::2] for r in (0, 1)]), target
    )
    everywhere.backward()
    half = slice(5 * rank, 5 * rank + 5)
    for is_gathered in (False, True):
        hidden = inputs[1].transpose(0, 1)
        wide = torch.cat([hidden, hidden[:1]]) if is_gathered else hidden
        loss = linear_cross_entropy(
            wide.transpose(0, 2).contiguous().transpose(0, 2)[half] if is_gathered else hidden,
            weight,
            torch.cat([target, torch.full((1, 8), -100)]) if is_gathered else target,
            group=group,
            sequence_parallel=is_gathered,
        )
        (grad,) = torch.autograd.grad(loss, inputs[1])
        if is_gathered:
            dist.all_reduce(grad)
        torch.testing.assert_close(loss, everywhere.float())
        torch.testing.assert_close(grad, inputs[0].grad)


@pytest.mark.parametrize("backend", ["ringcomm", "gloo"])
def test_strides(backend: str) -> None:
    run_ranks(2, check_strides, backend=backend)


def check_edges_of_shards(rank: int) -> None:
    group = dist.group.WORLD
    given = layer(F32, tokens=6)
    weight = given["weight"][rank::2].requires_grad_()
    hidden = given["hidden"].requires_grad_()
    module = LinearCrossEntropyLoss(group=group, num_columns=len(weight), sequence_parallel=True)
    assert module.options["vocab_start"] == (0 if rank == 0 else (CLASSES + 1) // 2)
    for tokens in (0, 6):
        loss = module(hidden[:tokens], weight, torch.full((2 * tokens,), -100))
        assert loss.isnan()
        grads = gradients(loss, hidden, weight)
        assert not grads[0].any()
        assert not grads[1].any()
    with pytest.raises(ValueError, match="sequence_parallel"):
        module(hidden[0], weight, given["target"][0])
    with pytest.raises(ValueError, match="do not add up"):
        linear_cross_entropy(hidden, weight, given["target"], group=group, vocab_start=5)
    with pytest.raises(ValueError, match="targets have shape"):
        module(hidden, weight, given["target"])  # of all ranks' tokens, not of this one's
    target = torch.full((6,), CLASSES)
    with pytest.raises(IndexError, match="target 0 is 333"):
        linear_cross_entropy(hidden, weight, target, group=group)
    with pytest.raises(ValueError, match="num_columns"):
        LinearCrossEntropyLoss(group=group)
    # The group is whole after all this.
    assert linear_cross_entropy(hidden, weight, given["target"], group=group).isfinite()


def test_edges_of_shards() -> None:
    run_ranks(2, check_edges_of_shards)
