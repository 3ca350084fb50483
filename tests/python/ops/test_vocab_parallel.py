"""ringcomm.ops.cross_entropy over ranks that share the classes, against one process in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import loss_oracle
import oracle
import pytest
import torch
import torch.distributed as dist
from loss_oracle import (
    BY_NAME,
    DTYPES,
    OPTION_AXES,
    OUTPUTS,
    covering,
    options_of,
    random_logits,
    random_targets,
)
from pair_table import Case
from ranks import place, run_ranks
from torch import Tensor

import ringcomm
from ringcomm.ops import cross_entropy

_ops = torch.ops.ringcomm
Layout = list[tuple[int, int]]  # each rank's first class and number of columns

VOCAB_SIZE = 41
LAYOUTS: dict[str, Layout] = {
    "alone": [(0, 41)],
    "even": [(0, 21), (21, 20)],
    "reversed": [(20, 21), (0, 20)],
    "all_but_one": [(40, 1), (0, 40)],
    "empty": [(0, 41), (41, 0)],
    "empty_first": [(0, 0), (0, 41)],
    "empty_elsewhere": [(13, 0), (0, 41)],
    "padded": [(0, 25), (25, 20)],
    "all_padding": [(0, 41), (41, 7)],
    "padding_far_off": [(60, 3), (0, 41)],
    "three": [(30, 11), (0, 29), (29, 1)],
    "four": [(10, 1), (0, 10), (11, 0), (11, 35)],
}


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def own_columns(whole: Tensor, first: int, num_columns: int) -> Tensor:
    """A rank's part; columns behind the vocabulary hold what would be noticed."""
    own = whole.new_full((*whole.shape[:-1], num_columns), 77.0)
    part = whole[..., first : first + num_columns]
    own[..., : part.shape[-1]] = part
    return own


def compare(
    first: int,
    num_columns: int,
    dtype: torch.dtype = torch.float32,
    device: Any = "cpu",
    group: dist.ProcessGroup | None = None,
    vocab_start: int | None = None,
    inplace: bool = False,
    **options: Any,
) -> list[bytes]:
    """Loss, outputs and this rank's gradient against float64; the bits of what all ranks have.

    There is a target on each class, and a row whose first 20 scaled logits are -infinity.
    """
    target = torch.arange(VOCAB_SIZE)
    target[::7] = options.get("ignore_index", -100)
    whole = random_logits((VOCAB_SIZE, VOCAB_SIZE), dtype)
    if not options.get("label_smoothing"):
        whole[30, :20] = -math.inf * options.get("logit_scale", 1.0)
    logits = own_columns(whole, first, num_columns).to(device).requires_grad_()
    given = loss_oracle.on(device, options)
    shards: dict[str, Any] = {"group": group or world(), "vocab_start": vocab_start}
    shards |= {"vocab_size": VOCAB_SIZE, "inplace": inplace}
    result = cross_entropy(logits * 1, target.to(device), outputs=OUTPUTS, **shards, **given)
    loss, outputs = result[0].cpu(), {name: value.cpu() for name, value in result[1].items()}
    factor = torch.linspace(0.5, 2, loss.numel()).view(loss.shape)
    result[0].backward(factor.to(device))
    assert logits.grad is not None
    expected = loss_oracle.evaluate(whole, target, factor.double(), **options)
    grad = expected.grad[:, first : first + num_columns]
    found = logits.grad.cpu()
    num_classes = grad.shape[1]
    loss_oracle.assert_close((loss, outputs), found[:, :num_classes], expected._replace(grad=grad))
    assert (found[:, num_classes:] == 0).all()
    return [oracle.bits(tensor) for tensor in (loss, *outputs.values())]


# ---- values and gradients

CASES = covering(
    {
        "layout": LAYOUTS,
        "backend": ("ringcomm", "gloo"),
        "dtype": BY_NAME,
        "inplace": ("no", "yes"),
        "start": ("given", "in order"),
        **{axis: values for axis, values in OPTION_AXES.items() if axis != "padding"},
    },
    {"inplace": ("yes",), "reduction": ("none",)},
    {
        "start": ("in order",),
        "layout": tuple(name for name, places in LAYOUTS.items() if places != sorted(places)),
    },
)


def check_layout(rank: int, layout: Layout, cases: list[Case], device: str) -> list[bytes]:
    bits = []
    for case in cases:
        bits += compare(
            *layout[rank],
            BY_NAME[case["dtype"]],
            place(device, rank),
            inplace=case["inplace"] == "yes",
            vocab_start=layout[rank][0] if case["start"] == "given" else None,
            **options_of(case, VOCAB_SIZE),
        )
    return bits


@pytest.mark.parametrize("backend", ["ringcomm", "gloo"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str, backend: str, device: str) -> None:
    """Every pair of options, types and layouts, and all ranks have the same bits."""
    cases = [c for c in CASES if (c["layout"], c["backend"]) == (name, backend)]
    layout = LAYOUTS[name]
    results = run_ranks(len(layout), check_layout, layout, cases, device, backend=backend)
    assert cases
    assert all(result == results[0] for result in results)


def check_subgroup(rank: int) -> None:
    for ranks in ([1, 2], [2], [0, 2]):
        group = dist.new_group(ranks)
        if rank in ranks:
            columns = LAYOUTS["even" if len(ranks) == 2 else "alone"][ranks.index(rank)]
            compare(*columns, group=group, vocab_start=columns[0])
            compare(*columns, group=group)


def test_subgroups() -> None:
    run_ranks(3, check_subgroup)


def even_loss(rank: int, logits: Tensor, target: Tensor, **options: Any) -> Any:
    """Of shards of one size, in rank order."""
    start = rank * logits.shape[-1]
    return cross_entropy(logits, target, group=world(), vocab_start=start, **options)


def check_error_bound(rank: int, num_shards: int) -> None:
    size = 3000
    columns = slice(rank * size // num_shards, (rank + 1) * size // num_shards)
    target = random_targets((8,), size // 2 + 1)
    for name, whole in loss_oracle.hard_logits(8, size).items():
        for dtype, smoothing in itertools.product(DTYPES, (0.0, 0.1)):
            logits = whole.to(dtype)
            options: dict[str, Any] = {"label_smoothing": smoothing, "reduction": "none"}
            own = logits[:, columns].clone().requires_grad_()
            loss, outputs = even_loss(rank, own, target, outputs=["lse"], **options)
            loss.sum().backward()
            assert own.grad is not None, name
            loss_oracle.assert_as_good_as_torch(
                loss, outputs["lse"], own.grad, logits, target, columns, **options
            )


def test_error_bound() -> None:
    """That of one process's torch, over the same logits."""
    run_ranks(3, check_error_bound, 3)


def check_not_finite(rank: int) -> None:
    """NaN and infinities on one shard reach all; without any logit but -infinity it is NaN."""
    whole = random_logits((5, 8))
    whole[0, 1], whole[1, 6], whole[2], whole[3, 2] = torch.nan, torch.inf, -torch.inf, -torch.inf
    target = torch.tensor([5, 0, 0, 2, 3])
    own = whole[:, rank * 4 : rank * 4 + 4].clone().requires_grad_()
    loss = even_loss(rank, own, target, reduction="none")
    theirs = whole.clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(theirs, target, reduction="none")
    (grad,) = torch.autograd.grad(loss.sum(), own)
    (wanted,) = torch.autograd.grad(expected.sum(), theirs)
    close = torch.testing.assert_close
    close(loss, expected, equal_nan=True)
    close(grad, wanted[:, rank * 4 : rank * 4 + 4], rtol=1e-5, atol=1e-6, equal_nan=True)


def test_not_finite() -> None:
    run_ranks(2, check_not_finite)


def check_edges(rank: int) -> None:
    for num_tokens, dtype, inplace in itertools.product((0, 3), DTYPES, (False, True)):
        target = torch.full((num_tokens,), -100)
        logits = random_logits((num_tokens, 4), dtype).requires_grad_()
        loss = even_loss(rank, logits * 1, target, inplace=inplace)
        (grad,) = torch.autograd.grad(loss, logits)
        assert loss.isnan()
        assert (grad == 0).all()
    # Of equal logits the first class is the largest, wherever it is.
    target = torch.arange(12)
    for lowest in (0, 3, 4, 11):
        whole = torch.zeros(12, 12)
        whole[:, :lowest] = -1
        own = whole[:, 4 * rank : 4 * rank + 4]
        _, outputs = even_loss(rank, own, target, outputs=["accuracy"])
        assert outputs["accuracy"].tolist() == (target == lowest).float().tolist()


def test_nothing_counts_and_ties() -> None:
    run_ranks(3, check_edges)


# ---- what is exchanged


def calls() -> dict[tuple[str, str], tuple[int, int]]:
    return {
        name: (entry["num_calls"], entry["sent_bytes"]) for name, entry in ringcomm.stats().items()
    }


def check_exchange(rank: int, inplace: bool) -> None:
    world_size = dist.get_world_size()
    target = torch.zeros(5, 10, dtype=torch.int64)
    logits = random_logits((5, 10, 4)).requires_grad_()
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-3, "outputs": OUTPUTS}
    before = calls()
    loss, _ = even_loss(rank, logits * 1, target, inplace=inplace, **options)
    after = calls()
    ((name, (num_calls, sent_bytes)),) = after.items() - before.items()
    old_calls, old_bytes = before.get(name, (0, 0))
    assert name[0] == "all_reduce"
    assert num_calls - old_calls == 1
    num_bytes = 24 * 50 + 24
    num_times = world_size - 1 if name[1] == "one_shot" else 2 * (world_size - 1) / world_size
    assert sent_bytes - old_bytes == num_times * num_bytes
    loss.backward()
    assert calls() == after


@pytest.mark.parametrize(("world_size", "inplace"), [(2, True), (4, False)])
def test_one_exchange(world_size: int, inplace: bool) -> None:
    run_ranks(world_size, check_exchange, inplace)
