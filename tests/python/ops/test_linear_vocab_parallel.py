"""linear_cross_entropy against float64: alone, and over a vocabulary in shards."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from linear_loss import (
    CLASSES,
    F32,
    F64,
    HIDDEN,
    TOKENS,
    check_near,
    gradients,
    layer,
    reference,
    run,
    set_blocks,
)
from loss_oracle import BY_NAME, OPTION_AXES, OUTPUTS, covering, named, options_of
from pair_table import Case
from ranks import in_ranks, place, run_ranks
from torch import Tensor

from ringcomm.nn import LinearCrossEntropyLoss
from ringcomm.ops import linear_cross_entropy

# Each rank's (first class, number of classes): uneven, with nothing, out of order.
SHARDS: dict[str, list[tuple[int, int]]] = {
    "alone": [(0, CLASSES)],
    "two": [(0, 200), (200, 133)],
    "two, the later first": [(133, 200), (0, 133)],
    "two, one empty": [(0, 0), (0, 333)],
    "three": [(0, 100), (100, 1), (101, 232)],
    "three, the later first": [(233, 100), (0, 233), (0, 0)],
}
IN_ORDER = ("alone", "two", "two, one empty", "three")
SHARED = tuple(name for name in SHARDS if name != "alone")
AXES: dict[str, Iterable[str]] = {
    "dtype": BY_NAME,
    "path": ("gradient", "module", "fused update"),
    "blocks": ("many", "one"),
    **OPTION_AXES,
}
ALONE = covering(AXES)
CASES = covering(
    {
        "shards": SHARED,
        "backend": ("ringcomm", "gloo"),
        "tokens": ("all", "shares"),
        "start": ("given", "in order"),
        **{axis: values for axis, values in AXES.items() if axis != "padding"},
    },
    {"start": ("in order",), "shards": tuple(name for name in SHARED if name not in IN_ORDER)},
)


def call_by_module(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor, num_items: Any = None, **o: Any
) -> Any:
    module = LinearCrossEntropyLoss(num_columns=len(weight), **o)
    return module(hidden, weight, target, bias, num_items)


def check_case(rank: int, case: Case, device: torch.device) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if case["blocks"] == "many":
            set_blocks(patch.setattr)
        dtype, options = BY_NAME[case["dtype"]], options_of(case, CLASSES)
        start, size = SHARDS[case.get("shards", "alone")][rank]
        given = layer(dtype, **options)
        exact = run(reference, given, F64, outputs=OUTPUTS, **options)
        torchs = run(reference, given, dtype, wide=F32, outputs=OUTPUTS, **options)
        rows, tokens = slice(start, start + size), slice(None)
        how: dict[str, Any] = {}
        if "shards" in case:
            how["group"] = dist.group.WORLD
            how["vocab_start"] = start if case["start"] == "given" else None
            how["sequence_parallel"] = case["tokens"] == "shares"
            if case["tokens"] == "shares":
                share = TOKENS // dist.get_world_size()
                tokens = slice(share * rank, share * (rank + 1))
        mine = {**given, "weight": given["weight"][rows], "bias": given["bias"][rows]}
        mine["hidden"] = given["hidden"][tokens]
        call = call_by_module if case["path"] == "module" else linear_cross_entropy
        updates = torch.full([size, HIDDEN], torch.nan, device=device)
        options["updates"] = updates if case["path"] == "fused update" else None
        call = functools.partial(call, **how)
        actual = run(call, mine, dtype, device=device, outputs=OUTPUTS, **options)
    parts = [slice(None)] * len(exact)
    parts[1:4] = [tokens, rows, rows]
    for found, right, other, part in zip(actual, exact, torchs, parts, strict=True):
        here = (right, other) if right.dim() == 0 else (right[part], other[part])
        check_near(found, *here, dtype)


@pytest.mark.parametrize("case", ALONE, ids=named)
def test_against_float64(case: Case, device: str) -> None:
    """Every pair of options, types and ways to the weight's gradient."""
    check_case(0, case, place(device, 0))


def check_shards(rank: int, cases: list[Case], device: str) -> None:
    for case in cases:
        check_case(rank, case, place(device, rank))


@pytest.mark.parametrize("backend", ["ringcomm", "gloo"])
@pytest.mark.parametrize("name", SHARED)
def test_shards(name: str, backend: str, device: str) -> None:
    """The same with every pair of shards and ways."""
    cases = [c for c in CASES if (c["shards"], c["backend"]) == (name, backend)]
    assert cases
    run_ranks(len(SHARDS[name]), check_shards, cases, device, backend=backend, timeout_s=120)


@in_ranks(2)
def test_strides(rank: int) -> None:
    """Hidden states whose gradient, as torch makes it, is not in rows of tokens."""
    group = dist.group.WORLD
    given = layer(F32)
    target = given["target"].view(8, 9).t()
    weight = given["weight"][rank::2]
    inputs = [given["hidden"].view(8, 9, HIDDEN).clone().requires_grad_() for _ in range(2)]
    everywhere = reference(
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


@in_ranks(2)
def test_edges_of_shards(rank: int) -> None:
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
    # The group works on.
    assert linear_cross_entropy(hidden, weight, given["target"], group=group).isfinite()
