"""Losses over ranks that share the classes: what is exchanged, torch's checks, bad calls."""

from __future__ import annotations

import copy
import io
import math
from functools import partial
from typing import Any

import loss_oracle
import oracle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import slow
from loss_oracle import OUTPUTS, random_logits, random_targets
from ranks import in_ranks, run_ranks
from test_cross_entropy_edges import even_loss
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import ringcomm
from ringcomm import MismatchError, nn
from ringcomm.ops import cross_entropy, linear_cross_entropy

_ops = torch.ops.ringcomm


def calls() -> dict[tuple[str, str], tuple[int, int]]:
    stats = ringcomm.stats()
    return {name: (entry["num_calls"], entry["sent_bytes"]) for name, entry in stats.items()}


@in_ranks(2)
def test_one_exchange(rank: int) -> None:
    """Of all that is known of a token; a module asks for the others' sizes once."""
    target = torch.zeros(5, 10, dtype=torch.int64)
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-3, "outputs": OUTPUTS}
    module = nn.CrossEntropyLoss(group=dist.group.WORLD, num_columns=4, **options)
    calls_of = [partial(even_loss, rank, inplace=i, **options) for i in (False, True)]
    every: list[Any] = [*calls_of, module]
    for call in every:
        logits = random_logits((5, 10, 4)).requires_grad_()
        before = calls()
        loss, _ = call(logits * 1, target)
        after = calls()
        ((name, (num_calls, sent_bytes)),) = after.items() - before.items()
        old_calls, old_bytes = before.get(name, (0, 0))
        assert (name[0], num_calls - old_calls) == ("all_reduce", 1)
        assert sent_bytes - old_bytes == 24 * 50 + 24
        loss.backward()
        assert calls() == after


def check_operator(rank: int) -> None:
    """On all ranks at once: opcheck calls an operator a fixed number of times."""
    logits, target = random_logits((3, 5), seed=rank), random_targets((3,), 10)
    group: Any = dist.group.WORLD
    stats = _ops.softmax_stats(logits, target, None, 5 * rank, 10, -100, 1.0, 0.0, True, True)
    torch.library.opcheck(_ops.merge_softmax_stats.default, (stats, group.group_name))
    for inplace, dtype in ((False, torch.float32), (True, torch.float16), (True, torch.float32)):

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


@pytest.mark.parametrize("backend", ["ringcomm", slow("gloo")])
def test_opcheck_and_compile(backend: str) -> None:
    run_ranks(2, check_operator, backend=backend, timeout_s=120)


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
        ("determines group", (logits, target), {"group": dist.group.WORLD}),
        ("determines group", (logits, target), {"vocab_start": 0}),
        ("sharded in their last", (local(part, Shard(0)), target), {}),
        ("sharded in their last", (local(part, Partial()), target), {}),
        ("targets must be replicated", (logits, local(target, Shard(0))), {}),
    ):
        with pytest.raises(ValueError, match=words):
            cross_entropy(*args, **options)


@pytest.mark.parametrize(("mesh_shape", "vocab_size"), [((2,), 41), ((4,), 5), ((2, 2), 7)])
def test_dtensor(mesh_shape: tuple[int, ...], vocab_size: int) -> None:
    """Of 5 classes the fourth rank has none."""
    run_ranks(math.prod(mesh_shape), check_dtensor, mesh_shape, vocab_size)


NONE = torch.zeros(2, dtype=torch.int64)
Layout = list[tuple[int, int]]  # each rank's first class and number of columns
TWO: Layout = [(0, 4), (4, 4)]
WRONG_SHARDS: list[tuple[Layout, dict[str, Any], str]] = [
    ([(0, 4), (0, 4)], {}, "8 classes together.*vocab_start"),
    ([(0, 4), (5, 4)], {}, "8 classes together.*vocab_start"),
    ([(1, 2), (1, 2)], {}, "4 classes together.*vocab_start"),
    ([(0, 0), (0, 0)], {}, "have 0 classes"),
    (TWO, {"vocab_size": 9}, "8 classes (of the vocabulary's|in all, but the vocabulary has) 9"),
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
            cross_entropy(logits, target, group=dist.group.WORLD, vocab_start=first, **own)
        loss = even_loss(rank, torch.zeros(3, 4), target)
        torch.testing.assert_close(loss, torch.tensor(4.0 * len(layout)).log())


@pytest.mark.parametrize("backend", ["ringcomm", "gloo"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_wrong_shards(world_size: int, backend: str) -> None:
    """ValueError on all ranks, and the group works on."""
    run_ranks(world_size, check_wrong, backend=backend)


# What is said of logits (False) or a linear layer (True), with these targets and options.
WRONG: list[tuple[bool, type[Exception], str, Tensor, dict[str, Any]]] = [
    (False, IndexError, r"target\[1\] = 8 is out of range 0 to 7", torch.tensor([0, 8]), {}),
    (False, IndexError, r"target\[1\] = -1", torch.tensor([0, -1]), {}),
    (False, ValueError, "must be 0 or more, got -1", NONE, {"vocab_start": -1}),
    (False, ValueError, "got 0", NONE, {"vocab_size": 0}),
    (False, ValueError, "16777216.*got 99999999", NONE, {"vocab_size": 99_999_999}),
    (False, ValueError, "9 classes, got shape", NONE,
     {"vocab_size": 9, "weight": torch.ones(8)}),
    (False, ValueError, "do not support group", torch.zeros(2, 4), {}),
    (True, ValueError, "do not add up|must be adjacent", NONE, {"vocab_start": 5}),
    (True, ValueError, "targets must have", NONE, {"sequence_parallel": True}),  # of one rank's
    (True, IndexError, r"target\[0\] = 8", NONE + 8, {}),
]  # fmt: skip


@in_ranks(2)
def test_wrong_arguments(rank: int) -> None:
    """Said on all ranks, and the group works on."""
    group, hidden, weight = dist.group.WORLD, torch.zeros(2, 3), torch.zeros(4, 3)
    given: dict[str, Any] = {"group": group, "vocab_start": 4 * rank}
    for is_linear, error, words, target, options in WRONG:
        args = (hidden, weight, target) if is_linear else (torch.zeros(2, 4), target)
        with pytest.raises(error, match=words):
            (linear_cross_entropy if is_linear else cross_entropy)(*args, **{**given, **options})
    given["sequence_parallel"] = True
    with pytest.raises(ValueError, match="sequence_parallel"):
        linear_cross_entropy(hidden[0], weight, NONE[0], **given)
    with pytest.raises(ValueError, match="num_columns"):
        nn.CrossEntropyLoss(group=group)
    for tokens in (0, 2):  # of each rank, all of them ignored
        x = hidden[:tokens].clone().requires_grad_()
        loss = linear_cross_entropy(x, weight, torch.full((2 * tokens,), -100), **given)
        assert loss.isnan()
        assert not torch.autograd.grad(loss, x)[0].any()


@in_ranks(2, fresh=True)
def test_different_numbers_of_tokens(rank: int) -> None:
    num_tokens = 3 + rank
    with pytest.raises(MismatchError, match="softmax_stats"):
        even_loss(rank, torch.zeros(num_tokens, 4), torch.zeros(num_tokens, dtype=torch.int64))


# ---- what users of other libraries reported

CLASSES = 10
LOGITS, TARGET = random_logits((6, CLASSES)), torch.tensor([1, 9, 0, 4, -100, 3])
LAYER = random_logits((6, 4), seed=1), random_logits((CLASSES, 4), seed=2)


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
        torch.testing.assert_close(loss, right)
    target = TARGET.clamp(max=8)
    padded = F.cross_entropy(LOGITS[:, :9], target, weight=weight[:9])
    given: dict[str, Any] = {"group": group, "vocab_start": 5 * rank, "vocab_size": 9}
    torch.testing.assert_close(cross_entropy(own, target, weight=weight[:9], **given), padded)
    mesh = init_device_mesh("cpu", (2,))
    part = distribute_tensor(LOGITS, mesh, [Shard(1)])
    torch.testing.assert_close(cross_entropy(part, TARGET, weight=weight), right)
    with pytest.raises(ValueError, match=r"class weights .* 10 classes"):
        cross_entropy(part, TARGET, weight=weight[:9])
    with pytest.raises(ValueError, match=r"class weights .* 10 classes"):
        nn.CrossEntropyLoss(weight[:9], group=group, num_columns=5)


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
    hidden = LAYER[0].clone().requires_grad_()
    weight = LAYER[1][5 * rank : 5 * rank + 5].clone().requires_grad_(rank == 0)
    given: dict[str, Any] = {"group": dist.group.WORLD, "vocab_start": 5 * rank}
    loss = linear_cross_entropy(hidden, weight, TARGET, vocab_size=CLASSES, **given)
    loss.backward()
    whole: list[Any] = [x.clone().requires_grad_() for x in LAYER]
    F.cross_entropy(F.linear(*whole), TARGET).backward()
    torch.testing.assert_close(hidden.grad, whole[0].grad)
    if rank == 0:
        torch.testing.assert_close(weight.grad, whole[1].grad[:5])
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
        torch.testing.assert_close(found[0](own, TARGET), F.cross_entropy(LOGITS, TARGET))
        right = F.cross_entropy(F.linear(*LAYER), TARGET)
        torch.testing.assert_close(found[1](LAYER[0], rows, TARGET), right)
