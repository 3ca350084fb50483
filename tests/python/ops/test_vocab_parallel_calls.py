"""cross_entropy over ranks as an operator: torch's checks, DTensor, modules, bad calls."""

from __future__ import annotations

import math
from typing import Any

import loss_oracle
import oracle
import pytest
import torch
from loss_oracle import OUTPUTS, class_weights, random_logits, random_targets
from ranks import run_ranks
from test_vocab_parallel import Layout, calls, even_loss, own_columns, world
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ringcomm import MismatchError, nn
from ringcomm.ops import cross_entropy

_ops = torch.ops.ringcomm


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
    for indices in (target, distribute_tensor(target, mesh, replicated)):
        logits = distribute_tensor(whole, mesh, placements).requires_grad_()
        result = cross_entropy(logits, indices, label_smoothing=0.1, outputs=OUTPUTS)
        result[0].backward()
        grad = logits.grad
        assert isinstance(grad, DTensor)
        assert grad.placements == (*placements[:-1], Shard(2))
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


def check_module(rank: int) -> None:
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


def test_module() -> None:
    run_ranks(2, check_module)


# ---- bad calls


def check_wrong(rank: int, layout: Layout, options: dict[str, Any], words: str) -> None:
    first, num_columns = layout[rank]
    own = {
        name: value[rank] if isinstance(value, list) else value for name, value in options.items()
    }
    target = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=words):
        cross_entropy(torch.zeros(3, num_columns), target, group=world(), vocab_start=first, **own)
    loss = even_loss(rank, torch.zeros(3, 4), target)
    torch.testing.assert_close(loss, torch.tensor(4.0 * len(layout)).log())


TWO: Layout = [(0, 4), (4, 4)]


@pytest.mark.parametrize(
    ("layout", "options", "words"),
    [
        ([(0, 4), (0, 4)], {}, "8 classes together.*vocab_start"),
        ([(0, 4), (5, 4)], {}, "8 classes together.*vocab_start"),
        ([(1, 4), (5, 4)], {}, "8 classes together.*vocab_start"),
        ([(0, 4), (2, 4), (8, 4)], {}, "12 classes together.*vocab_start"),
        ([(1, 2), (1, 2)], {}, "4 classes together.*vocab_start"),
        ([(0, 0), (0, 0)], {}, "have 0 classes"),
        (TWO, {"vocab_size": 9}, "8 classes of the vocabulary's 9"),
        (TWO, {"vocab_size": [8, 7]}, "differ in vocab_size"),
        (TWO, {"outputs": [["entropy"], []]}, "differ in .*outputs"),
        (TWO, {"softcap": [None, 2.0]}, "differ in .*softcap"),
        (TWO, {"label_smoothing": [0.0, 0.1]}, "differ in .*label_smoothing"),
        ([*TWO, (8, 4)], {"logit_scale": [1.0, 1.0, 2.0]}, "differ in .*logit_scale"),
    ],
)
def test_wrong_shards(layout: Layout, options: dict[str, Any], words: str) -> None:
    """ValueError on all ranks, and the group works on."""
    for backend in ("ringcomm", "gloo"):
        run_ranks(len(layout), check_wrong, layout, options, words, backend=backend)


def check_wrong_arguments(rank: int) -> None:
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
    # A negative control: shards that add up, but are the other rank's, give another loss.
    whole, target = random_logits((6, 8)), random_targets((6,), 8)
    own = whole[:, 4 * rank : 4 * rank + 4]
    right = even_loss(rank, own, target)
    torch.testing.assert_close(right, cross_entropy(whole, target))
    assert abs(even_loss(1 - rank, own, target) - right) > 0.1


def test_wrong_arguments() -> None:
    run_ranks(2, check_wrong_arguments)


def check_tokens(rank: int) -> None:
    num_tokens = 3 + rank
    with pytest.raises(MismatchError, match="softmax_stats"):
        even_loss(rank, torch.zeros(num_tokens, 4), torch.zeros(num_tokens, dtype=torch.int64))


def test_different_numbers_of_tokens() -> None:
    run_ranks(2, check_tokens, fresh=True)
