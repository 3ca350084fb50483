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
    class_weights,
    covering,
    options_of,
    random_logits,
    random_targets,
)
from pair_table import Case
from ranks import in_ranks, place, run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import ringcomm
from ringcomm import MismatchError, nn
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


@in_ranks(3)
def test_subgroups(rank: int) -> None:
    for ranks in ([1, 2], [2], [0, 2]):
        group = dist.new_group(ranks)
        if rank in ranks:
            columns = LAYOUTS["even" if len(ranks) == 2 else "alone"][ranks.index(rank)]
            compare(*columns, group=group, vocab_start=columns[0])
            compare(*columns, group=group)


def even_loss(rank: int, logits: Tensor, target: Tensor, **options: Any) -> Any:
    """Of shards of one size, in rank order."""
    start = rank * logits.shape[-1]
    return cross_entropy(logits, target, group=world(), vocab_start=start, **options)


@in_ranks(3)
def test_error_bound(rank: int) -> None:
    """That of one process's torch, over the same logits."""
    columns = slice(rank * 1000, (rank + 1) * 1000)
    target = random_targets((8,), 1501)
    for name, whole in loss_oracle.hard_logits(8, 3000).items():
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


@in_ranks(2)
def test_not_finite(rank: int) -> None:
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


@in_ranks(3)
def test_nothing_counts_and_ties(rank: int) -> None:
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


# ---- what is exchanged


def calls() -> dict[tuple[str, str], tuple[int, int]]:
    return {
        name: (entry["num_calls"], entry["sent_bytes"]) for name, entry in ringcomm.stats().items()
    }


@in_ranks(2)
def test_one_exchange(rank: int) -> None:
    target = torch.zeros(5, 10, dtype=torch.int64)
    for inplace in (False, True):
        logits = random_logits((5, 10, 4)).requires_grad_()
        options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-3, "outputs": OUTPUTS}
        before = calls()
        loss, _ = even_loss(rank, logits * 1, target, inplace=inplace, **options)
        after = calls()
        ((name, (num_calls, sent_bytes)),) = after.items() - before.items()
        old_calls, old_bytes = before.get(name, (0, 0))
        assert (name[0], num_calls - old_calls) == ("all_reduce", 1)
        assert sent_bytes - old_bytes == 24 * 50 + 24
        loss.backward()
        assert calls() == after


# ---- torch's own checks


def check_operator(rank: int) -> None:
    """On all ranks at once: opcheck calls an operator a fixed number of times."""
    logits, target = random_logits((3, 5), seed=rank), random_targets((3,), 10)
    stats = _ops.softmax_stats(logits, target, None, 5 * rank, 10, -100, 1.0, 0.0, True, True)
    torch.library.opcheck(_ops.merge_softmax_stats.default, (stats, world().group_name))
    for inplace, dtype in ((False, torch.float32), (True, torch.float16)):

        def step(x: Tensor, inplace: bool = inplace) -> Any:
            return even_loss(rank, x * 2, target, inplace=inplace, outputs=OUTPUTS)

        torch.compiler.reset()
        results = []
        for call in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
            leaf = logits.to(dtype).requires_grad_()
            loss, outputs = call(leaf)
            (grad,) = torch.autograd.grad(loss, leaf)
            results.append([loss.detach(), grad, *outputs.values()])
        for actual, expected in zip(*results, strict=True):
            oracle.assert_equal(actual, expected)


@pytest.mark.parametrize("backend", ["ringcomm", "gloo"])
def test_opcheck_and_compile(backend: str) -> None:
    run_ranks(2, check_operator, backend=backend, timeout_s=120)


# ---- DTensor and modules


def check_dtensor(rank: int, mesh_shape: tuple[int, ...], vocab_size: int) -> None:
    mesh = init_device_mesh("cpu", mesh_shape)
    replicated = [Replicate()] * len(mesh_shape)
    placements = [*replicated[1:], Shard(-1)]
    whole, target = random_logits((2, 3, vocab_size)), random_targets((2, 3), vocab_size)
    expected = loss_oracle.evaluate(whole, target, label_smoothing=0.1)
    plain: Any = distribute_tensor(whole, mesh, placements).requires_grad_()
    plain.to_local().sum().backward()  # torch 2.11 gathers gradients of uneven shards
    for indices in (target, distribute_tensor(target, mesh, replicated)):
        logits = distribute_tensor(whole, mesh, placements).requires_grad_()
        result = cross_entropy(logits, indices, label_smoothing=0.1, outputs=OUTPUTS)
        result[0].backward()
        grad = logits.grad
        assert isinstance(grad, DTensor)
        assert grad.placements == plain.grad.placements
        loss_oracle.assert_close(result, grad.full_tensor(), expected)
    module = nn.CrossEntropyLoss(label_smoothing=0.1, inplace=True)
    padded = distribute_tensor(torch.cat([whole, whole + 50], -1), mesh, placements)
    with_padding = cross_entropy(padded, target, vocab_size=vocab_size, label_smoothing=0.1)
    for loss in (module(logits * 1, target), with_padding):
        loss_oracle.assert_within(loss, expected.loss, torch.tensor(1e-5), "loss")
    everywhere = cross_entropy(distribute_tensor(whole, mesh, replicated), target)
    torch.testing.assert_close(everywhere, cross_entropy(whole, target))

    def local(tensor: Tensor, placement: Any) -> DTensor:
        return DTensor.from_local(tensor, mesh, [*placements[:-1], placement])

    part = torch.zeros(2, 3, 1)
    for words, args, options in (
        ("leaf", (logits, target), {"inplace": True}),
        ("bring their group", (logits, target), {"group": world()}),
        ("bring their group", (logits, target), {"vocab_start": 0}),
        ("sharded in their last", (local(part, Shard(0)), target), {}),
        ("sharded in their last", (local(part, Partial()), target), {}),
        ("targets are replicated", (logits, local(target, Shard(0))), {}),
    ):
        with pytest.raises(ValueError, match=words):
            cross_entropy(*args, **options)


@pytest.mark.parametrize(("mesh_shape", "vocab_size"), [((2,), 41), ((4,), 5), ((2, 2), 7)])
def test_dtensor(mesh_shape: tuple[int, ...], vocab_size: int) -> None:
    """Of 5 classes the fourth rank has none."""
    run_ranks(math.prod(mesh_shape), check_dtensor, mesh_shape, vocab_size)


@in_ranks(2)
def test_module(rank: int) -> None:
    whole, target, weight = random_logits((6, 9)), random_targets((6,), 9), class_weights(9)
    sizes, firsts = [4, 6], [0, 4]  # one column of padding
    logits = own_columns(whole, firsts[rank], sizes[rank])
    module = nn.CrossEntropyLoss(weight, group=world(), num_columns=sizes[rank], z_loss=1e-3)
    expected = loss_oracle.evaluate(whole, target, class_weight=weight, z_loss=1e-3)
    before = calls()
    for _ in range(2):
        loss_oracle.assert_within(module(logits, target), expected.loss, torch.tensor(1e-5), "loss")
    assert {name[0] for name, _ in calls().items() - before.items()} == {"all_reduce"}
    with pytest.raises(ValueError, match="num_columns"):
        nn.CrossEntropyLoss(group=world())


# ---- bad calls


TWO: Layout = [(0, 4), (4, 4)]
WRONG_SHARDS: list[tuple[Layout, dict[str, Any], str]] = [
    ([(0, 4), (0, 4)], {}, "8 classes together.*vocab_start"),
    ([(0, 4), (5, 4)], {}, "8 classes together.*vocab_start"),
    ([(1, 2), (1, 2)], {}, "4 classes together.*vocab_start"),
    ([(0, 0), (0, 0)], {}, "have 0 classes"),
    (TWO, {"vocab_size": 9}, "8 classes of the vocabulary's 9"),
    (TWO, {"vocab_size": [8, 7]}, "differ in vocab_size"),
    (TWO, {"outputs": [["entropy"], []]}, "differ in .*outputs"),
    (TWO, {"softcap": [None, 2.0]}, "differ in .*softcap"),
    (TWO, {"label_smoothing": [0.0, 0.1]}, "differ in .*label_smoothing"),
    ([(0, 4), (2, 4), (8, 4)], {}, "12 classes together.*vocab_start"),
    ([*TWO, (8, 4)], {"logit_scale": [1.0, 1.0, 2.0]}, "differ in .*logit_scale"),
]


def check_wrong(rank: int) -> None:
    target = torch.zeros(3, dtype=torch.int64)
    for layout, options, words in WRONG_SHARDS:
        if len(layout) != dist.get_world_size():
            continue
        first, num_columns = layout[rank]
        own = {k: value[rank] if isinstance(value, list) else value for k, value in options.items()}
        logits = torch.zeros(3, num_columns)
        with pytest.raises(ValueError, match=words):
            cross_entropy(logits, target, group=world(), vocab_start=first, **own)
        loss = even_loss(rank, torch.zeros(3, 4), target)
        torch.testing.assert_close(loss, torch.tensor(4.0 * len(layout)).log())


@pytest.mark.parametrize("backend", ["ringcomm", "gloo"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_wrong_shards(world_size: int, backend: str) -> None:
    """ValueError on all ranks, and the group works on."""
    run_ranks(world_size, check_wrong, backend=backend)


@in_ranks(2)
def test_wrong_arguments(rank: int) -> None:
    for bad in (8, -1):
        with pytest.raises(IndexError, match=f"target 1 is {bad}, and there are 8"):
            even_loss(rank, torch.zeros(2, 4), torch.tensor([0, bad]))
    target = torch.zeros(2, dtype=torch.int64)
    weight = {"vocab_size": 9, "class_weight": torch.ones(8)}
    for words, wanted, options in (
        ("vocab_start is a number from 0 on, got -1", target, {"vocab_start": -1}),
        ("got 0", target, {"vocab_start": 0, "vocab_size": 0}),
        ("16777216.*got 99999999", target, {"vocab_start": 0, "vocab_size": 99_999_999}),
        ("9 classes, got shape", target, {"vocab_start": 0, **weight}),
        ("know no group", torch.zeros(2, 4), {"vocab_start": 0}),
    ):
        with pytest.raises(ValueError, match=words):
            cross_entropy(torch.zeros(2, 4), wanted, group=world(), **options)


@in_ranks(2, fresh=True)
def test_different_numbers_of_tokens(rank: int) -> None:
    num_tokens = 3 + rank
    with pytest.raises(MismatchError, match="softmax_stats"):
        even_loss(rank, torch.zeros(num_tokens, 4), torch.zeros(num_tokens, dtype=torch.int64))
