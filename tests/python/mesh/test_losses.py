"""A loss says what its mean is over: of torch's and ringcomm's losses it is known."""

from __future__ import annotations

import copy
import itertools
import os
import re
import tempfile
from functools import partial
from typing import Any

import pytest
import torch
from allocations import tensor_bytes
from full_states import full_weights
from loss_rows import (
    CLASSES,
    IN_RANKS,
    ROWS,
    WEIGHT,
    WIDTH,
    flat,
    linear,
    mean,
    not_padding,
    numbers,
    rows,
    sgd,
    summed,
    three,
    tokens,
    tokens_model,
)
from ranks import in_ranks, run_ranks
from steps import apply_steps
from torch import Tensor, nn
from torch.nn import functional as F

import ringcomm.nn
import ringcomm.ops
from ringcomm.parallel import ParallelDims, parallelize, pipeline
from ringcomm.parallel.loss import PartLoss, is_integer

EDGES = (0, 1, 2, 7, ROWS)  # of parts, of which the first has no labels


def labelled(ignored: int = -100) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(ROWS, CLASSES, generator=generator, dtype=torch.float64)
    y = torch.randint(1, CLASSES, (ROWS,), generator=generator)
    y[[0, 3, 4, 9]] = ignored
    return out, y


def pixels() -> tuple[Tensor, Tensor]:
    out, y = labelled()
    return out[:, :, None].repeat(1, 1, 3) * torch.arange(1, 4), y[:, None].repeat(1, 3)


def probabilities() -> tuple[Tensor, Tensor]:
    out, _ = labelled()
    return out, (out * 3).flip(0).softmax(1)


def values() -> tuple[Tensor, Tensor]:
    out, _ = labelled()
    return out, out.flip(0).gt(0).double()


OPTIONS: dict[str, Any] = {"weight": WEIGHT, "ignore_index": 0, "label_smoothing": 0.2}
SHORT: dict[str, Any] = {"weight": WEIGHT, "ignore_index": 0}
KNOWN: dict[str, tuple[Any, Any]] = {
    "cross_entropy": (F.cross_entropy, labelled()),
    # https://github.com/pytorch/pytorch/issues/31579: a rank has most of the ignored pixels.
    "cross_entropy of pixels": (F.cross_entropy, pixels()),
    "cross_entropy of probabilities": (nn.CrossEntropyLoss(WEIGHT), probabilities()),
    # https://github.com/pytorch/pytorch/issues/72047: weights are in the denominator of the mean.
    # https://github.com/NVIDIA-NeMo/Automodel/issues/1336: a pad id between the classes.
    # https://github.com/huggingface/transformers/issues/34242: the pad id is a class.
    "partial": (partial(F.cross_entropy, **OPTIONS), labelled(0)),
    "module": (nn.CrossEntropyLoss(**OPTIONS), labelled(0)),
    # https://github.com/karpathy/nanochat/pull/623: -1 is the label of padding.
    "partial of a module": (partial(nn.CrossEntropyLoss(ignore_index=-1)), labelled(-1)),
    "nll": (partial(F.nll_loss, **SHORT), labelled(0)),
    "NLL": (nn.NLLLoss(**SHORT), labelled(0)),
    # https://github.com/Lightning-AI/pytorch-lightning/issues/2924,
    # https://github.com/huggingface/transformers/issues/24839: a smaller last batch.
    "mse": (F.mse_loss, values()),
    "MSE": (nn.MSELoss(), values()),
    "l1": (F.l1_loss, values()),
    "L1": (nn.L1Loss(), values()),
    "bce": (
        partial(F.binary_cross_entropy, weight=WEIGHT),
        (values()[0].sigmoid(), values()[1]),
    ),
    "BCE with logits": (nn.BCEWithLogitsLoss(pos_weight=WEIGHT), values()),
    "ringcomm's": (partial(ringcomm.ops.cross_entropy, **OPTIONS, z_loss=0.1), labelled(0)),
    "ringcomm's module": (ringcomm.nn.CrossEntropyLoss(**OPTIONS), labelled(0)),
    "torch.compile of a module": (
        torch.compile(nn.CrossEntropyLoss(ignore_index=-1), backend="eager"),
        labelled(-1),
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_loss_of_parts_is_that_of_the_whole(name: str) -> None:
    loss_fn, (out, y) = KNOWN[name]
    whole = out.clone().requires_grad_()
    expected = loss_fn(whole, y)
    expected.backward()
    loss, parts = PartLoss(loss_fn), out.clone().requires_grad_()
    assert not loss.problem
    cuts = [slice(*pair) for pair in itertools.pairwise(EDGES)]
    counts = [loss.labels(y[cut])[0] for cut in cuts]
    found: Any = sum(
        loss(parts[cut], y[cut], num, sum(counts)) for cut, num in zip(cuts, counts, strict=True)
    )
    found.backward()
    torch.testing.assert_close(found.double(), expected)
    torch.testing.assert_close(parts.grad, whole.grad)


class Own(nn.CrossEntropyLoss):
    """Another mean."""

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return super().forward(out[:-1], y[1:])


def of_words(out: Tensor, y: Tensor, **words: Any) -> Tensor:
    return F.cross_entropy(out, y, **words)


MSE: Any = F.mse_loss
SAYS = "does not say which labels its mean is over: pass count_items=, such as count_items=lambda"
REFUSED: dict[str, tuple[Any, str]] = {
    "lambda": (lambda out, y: 2 * F.cross_entropy(out, y), rf"<lambda> {SAYS}"),
    "any words": (of_words, SAYS),
    "own forward": (Own(), f"Own {SAYS}"),
    "method": (nn.CrossEntropyLoss().forward, SAYS),
    "another loss": (nn.KLDivLoss(reduction="batchmean"), SAYS),
    "by position": (partial(F.cross_entropy, torch.ones(2)), SAYS),
    "old sum": (partial(F.mse_loss, size_average=False), SAYS),
    "weights of values": (partial(MSE, weight=torch.ones(ROWS, 1)), SAYS),
    "divided": (partial(ringcomm.ops.cross_entropy, num_items=5), SAYS),
    # https://github.com/pytorch/pytorch/issues/37359: ranks' gradients of a sum are averaged.
    "sum": (nn.MSELoss(reduction="sum"), "must have reduction='mean', got 'sum'"),
    "none": (partial(F.nll_loss, reduction="none"), "must have reduction='mean', got 'none'"),
    "ringcomm's sum": (ringcomm.nn.CrossEntropyLoss(reduction="sum"), "got 'sum'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_loss_is_refused_when_a_system_is_made(name: str) -> None:
    loss_fn, text = REFUSED[name]
    assert re.search(text, PartLoss(loss_fn).problem)
    assert not PartLoss(loss_fn, is_whole=True).problem
    is_kept = "reduction" in text or "got" in text  # count_items does not make it a mean
    assert bool(PartLoss(loss_fn, len).problem) == is_kept
    of_sums = PartLoss(loss_fn, is_sum=True).problem
    assert bool(of_sums) == text.endswith("'none'")


def test_labels_are_integers() -> None:
    kinds = torch.int64, torch.uint8, torch.bool, torch.float32, torch.bfloat16, torch.complex64
    labels = [kind for kind in kinds if is_integer(torch.empty(0, dtype=kind))]
    assert labels == [torch.int64, torch.uint8]


def test_what_count_items_returns() -> None:
    for wrong in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="count_items must return a number of labels, got"):
            PartLoss(F.mse_loss, torch.prod).labels(torch.tensor([wrong]))


# ---- in ranks


@pytest.mark.parametrize(
    ("name", "sizes"),
    [(name, {system: 2}) for name, row in IN_RANKS.items() for system in row.systems],
    ids=str,
)
@in_ranks(2)
def test_the_mean_of_one_process(rank: int, name: str, sizes: dict[str, Any]) -> None:
    """With parts that have different numbers of labels, and one that has none."""
    row = IN_RANKS[name]
    dims, model, alone, (x, y) = ParallelDims(**sizes), row.model(), row.model(), row.batch()
    loss_fn, of_whole = row.loss_fn, row.of_whole or row.loss_fn
    if row.is_made:
        loss_fn, of_whole = loss_fn(), of_whole()
    if row.is_refused:
        with pytest.raises(TypeError, match=r"pass count_items=, .*=len for one over"):
            parallelize(model, dims, sgd, loss_fn=loss_fn)
        torch.testing.assert_close(model.state_dict(), alone.state_dict(), rtol=0, atol=0)
    options: Any = {"num_microbatches": row.num_parts if "dp" in sizes else 4}
    options |= {"loss_fn": loss_fn, "count_items": row.count_items}
    train = parallelize(model, dims, sgd, **options)
    edges = [0, len(x) // 3, len(x)] if "dp" in sizes else [0, len(x)]
    mine = slice(*edges[dims["batch"].get_local_rank() :][:2])
    optimizer = sgd(alone.parameters())
    for _ in range(3):
        expected = of_whole(alone(x), y)
        if not row.is_counting:
            wanted = float(train.evaluate(x[mine], y[mine]))
            assert wanted == pytest.approx(float(expected.detach()), rel=1e-6, abs=1e-7)
        found = train.step(x[mine], y[mine])
        assert float(found) == pytest.approx(float(expected.detach()), rel=1e-6, abs=1e-7)
        expected.backward()
        apply_steps(optimizer, train.optimizer)
    weights = full_weights(train)
    for name, value in alone.state_dict().items():
        how: Any = {} if value.dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(weights[name], value, **how, msg=name)


class Learned(nn.Module):
    """The weight of a task is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.log_var = nn.Parameter(torch.zeros(()))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y) * (-self.log_var).exp() + self.log_var


@in_ranks(2)
def test_losses_that_are_refused(rank: int) -> None:
    """https://github.com/KevinMusgrave/pytorch-metric-learning/issues/710,
    https://github.com/facebookresearch/ClassyVision/pull/394: with weights of their own.
    https://github.com/huggingface/trl/pull/5951: more than one number.
    """
    loss_fn, (x, y) = Learned(), numbers()
    of_both = lambda params: sgd([*params, *loss_fn.parameters()])  # noqa: E731
    with pytest.raises(ValueError, match=r"parameter of shape .* not in the model"):
        parallelize(three(), ParallelDims(dp=2), of_both, loss_fn=loss_fn, count_items=len)
    cases: list[tuple[Any, str]] = [
        (loss_fn, "trains a tensor of shape"),
        (lambda out, y: 2 * loss_fn(out, y), "trains a tensor of shape"),
        (loss_fn.forward, "trains a tensor of shape"),
        (lambda out, y: (F.mse_loss(out, y), {"of": 1}), "must return a scalar tensor"),
        (lambda out, y: {"loss": F.mse_loss(out, y)}, "must return a scalar tensor"),
        (lambda out, y: F.mse_loss(out, y)[None], "must return a scalar tensor"),
    ]
    for wrong, text in cases:
        train = parallelize(three(), ParallelDims(dp=2), sgd, loss_fn=wrong, count_items=len)
        with pytest.raises((TypeError, ValueError), match=text):
            train.step(x, y)


@in_ranks(2)
def test_a_penalty_of_weights_in_the_loss(rank: int) -> None:
    def with_penalty(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
        penalty = sum(param.square().sum() for param in model.parameters())
        return F.mse_loss(out, y) + 0.1 * penalty

    model, alone, (x, y) = three(), three(), numbers()
    options: Any = {"loss_fn": partial(with_penalty, model), "count_items": len}
    mine = slice(0, 2) if rank == 0 else slice(2, None)
    parallelize(model, ParallelDims(dp=2), sgd, **options).step(x[mine], y[mine])
    with_penalty(alone, alone(x), y).backward()
    for param, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param.grad, other.grad)


@in_ranks(2)
def test_weights_that_are_unfrozen_later(rank: int) -> None:
    """https://github.com/facebookresearch/detectron2/issues/2486,
    https://github.com/huggingface/transformers/issues/416
    """
    model, alone, (x, y) = tokens_model(), tokens_model(), tokens()
    model[0].requires_grad_(False)
    mine = slice(0, 4) if rank == 0 else slice(4, None)
    every = lambda params: torch.optim.SGD(params, 0.5)  # noqa: E731
    options: dict[str, Any] = {"loss_fn": flat, "count_items": not_padding}
    train = parallelize(model, ParallelDims(dp=2), every, **options)
    optimizer = every(alone.parameters())
    for step, frozen in enumerate((True, False, False, True)):
        for part in (model, alone):
            part[0].requires_grad_(not frozen)
        train.step(x[mine], y[mine])
        flat(alone(x), y).backward()
        apply_steps(train.optimizer, optimizer)
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], value, msg=f"{step} {name}")
    model[0].requires_grad_(rank == 0)
    with pytest.raises(ValueError, match=r"unfrozen on 1 of 2 ranks"):
        train.step(x[mine], y[mine])


@in_ranks(2)
def test_ranks_with_different_losses(rank: int) -> None:
    """An error on all ranks, before a weight is written."""
    by_rank: list[tuple[Any, Any]] = [
        (F.cross_entropy, F.nll_loss),
        (F.cross_entropy, partial(F.cross_entropy, ignore_index=-1)),
        (nn.CrossEntropyLoss(WEIGHT), nn.CrossEntropyLoss(WEIGHT + 1)),
        (F.cross_entropy, mean),
        (summed, mean),
    ]
    for losses in by_rank:
        loss_fn, model = losses[rank], linear()
        before = copy.deepcopy(model.state_dict())
        text = r"ranks disagree on the (problem of the arguments|loss)"
        with pytest.raises(ValueError, match=text):
            parallelize(model, ParallelDims(dp=2), sgd, loss_fn=loss_fn)
        with pytest.raises(ValueError, match=text):
            pipeline.Pipeline(model, loss_fn, num_microbatches=2)
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    with pytest.raises(TypeError, match="mean does not say"):
        pipeline.Pipeline(linear(), mean, num_microbatches=2)
    with pytest.raises(ValueError, match='loss_reduction must be "mean" or "sum"'):
        pipeline.Pipeline(linear(), mean, loss_reduction="max")


@in_ranks(2)
def test_one_part_may_have_any_loss(rank: int) -> None:
    """On one data-parallel rank, in one micro-batch."""
    (x, y), alone = rows(), linear()
    one: Any = {"schedule": "gpipe", "num_microbatches": 1}
    for loss_fn in (mean, partial(F.cross_entropy, reduction="sum")):
        train = parallelize(linear(), ParallelDims(pp=2), sgd, loss_fn=loss_fn, **one)
        torch.testing.assert_close(train.step(x, y).double(), loss_fn(alone(x), y).detach())


class Task:
    """Has its data, as many a training program."""

    def __init__(self) -> None:
        self.tokens = torch.ones(1 << 24)

    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y)


@in_ranks(2)
def test_nothing_that_a_loss_refers_to_is_copied(rank: int) -> None:
    task, (x, y) = Task(), rows()
    count = lambda y: y.ne(-100).sum()  # noqa: E731
    for dims in (ParallelDims(dp=2), ParallelDims(pp=2)):
        options: Any = {"loss_fn": task.loss, "count_items": count, "num_microbatches": 2}
        train = parallelize(linear(), dims, sgd, **options)
        _, peak = tensor_bytes(lambda: train.step(x, y))  # noqa: B023
        assert peak < task.tokens.nbytes // 8


# ---- DDP's gradients


def said_by_ddp(rank: int) -> str:
    """What two steps write to stderr."""
    x, y = rows()
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            train = parallelize(linear(), ParallelDims(dp=2), sgd, loss_fn=F.cross_entropy)
            for _ in range(2):
                train.step(x, y)
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        return file.read().decode()


def test_ddp_says_nothing() -> None:
    """Its warning of find_unused_parameters was written by C++ on every rank."""
    for said in run_ranks(2, said_by_ddp):
        assert "find_unused_parameters" not in said


class Chosen(nn.Module):
    """Uses one of its layers; `c` never."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(WIDTH, CLASSES) for name in "abc"})
        self.choice = "ab"

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layers[name](x) for name in self.choice]).sum(0)


@pytest.mark.parametrize("num", [1, 2])
@in_ranks(2)
def test_weights_that_are_unused_in_some_steps(rank: int, num: int) -> None:
    """Their gradient is the mean with zeros, and None where no rank uses them."""
    choices = [("ab", "ab"), ("a", "ab"), ("b", "a"), ("a", "a"), ("abc", "a"), ("ab", "ab")]
    torch.manual_seed(0)
    model = Chosen().double()
    alone, (x, y) = copy.deepcopy(model), rows()
    adamw = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    y = torch.arange(ROWS) % CLASSES
    train = parallelize(
        model, ParallelDims(dp=2), adamw, loss_fn=F.cross_entropy, num_microbatches=num
    )
    optimizer = adamw(alone.parameters())
    for step, chosen in enumerate(choices):
        for choice, own, labels in zip(chosen, x.chunk(2), y.chunk(2), strict=True):
            alone.choice = choice
            (F.cross_entropy(alone(own), labels) / 2).backward()
        model.choice = chosen[rank]
        train.step(x.chunk(2)[rank], y.chunk(2)[rank])
        for (name, param), other in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert (param.grad is None) == (other.grad is None), f"{step} {name}"
        keeps = step == 1  # gradients of zeros instead of None from then on
        for each in (optimizer, train.optimizer):
            each.step()
            each.zero_grad(set_to_none=not keeps)
        torch.testing.assert_close(model.state_dict(), alone.state_dict(), msg=f"{step}")
