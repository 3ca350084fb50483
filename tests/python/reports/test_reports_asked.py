"""Losses of other libraries' users whose parts are no means over rows, or which keep something.

Each case names its report. Expected values come from one process that has the whole batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from full_states import full_weights
from ranks import in_ranks
from torch import Tensor, nn
from torch.nn import functional as F

from ringcomm.parallel import ParallelDims, parallelize

ROWS, CLASSES = 8, 3
OF_ANOTHER = "is refused by another rank"


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1)


def linear(num: int = CLASSES) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, num)


def rows() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    return torch.randn(ROWS, 5, generator=random), torch.randn(ROWS, CLASSES, generator=random)


def trained(rank: int, model: nn.Module, batch: Any, loss_fn: Any, **options: Any) -> Any:
    """A model on two ranks, which have a quarter of the rows and the others."""
    x, y = batch
    cut = len(x) // 4 or 1
    mine = slice(0, cut) if rank == 0 else slice(cut, None)
    train = parallelize(model, ParallelDims(dp=2), sgd, loss_fn=loss_fn, **options)
    return train, x[mine], y[mine]


def check(
    rank: int, model: nn.Module, batch: Any, loss_fn: Any, expected: Any = None, **options: Any
) -> None:
    """Three steps are those of one process. Both have their own `expected`."""
    alone, expected = copy.deepcopy(model), expected or loss_fn
    train, x, y = trained(rank, model, batch, loss_fn, **options)
    optimizer = sgd(alone.parameters())
    for step in range(3):
        loss = train.step(x, y)
        train.optimizer.step()
        train.optimizer.zero_grad()
        wanted = expected(alone(batch[0]), batch[1])
        wanted.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(loss, wanted.detach(), msg=f"{step}")
    found = full_weights(train)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


def refused(rank: int, text: str, model: nn.Module, batch: Any, loss_fn: Any, **more: Any) -> None:
    """Every rank raises before a weight is written."""
    train, x, y = trained(rank, model, batch, loss_fn, **more)
    with pytest.raises(ValueError, match=rf"{text}|{OF_ANOTHER}"):
        train.step(x, y)


def mean_of_known(out: Tensor, y: Tensor) -> Tensor:
    known = ~y.isnan()
    return (out - y.nan_to_num())[known].square().mean()


def mean_of_labelled(out: Tensor, y: Tensor) -> Tensor:
    known = y >= 0
    return F.binary_cross_entropy_with_logits(out[known], y[known])


def mean_by_weights(out: Tensor, y: Tensor) -> Tensor:
    losses = (out - y[:, :-1]).square().mean(1)
    return (losses * y[:, -1]).sum() / y[:, -1].sum()


@in_ranks(2)
def test_values_that_are_missing(rank: int) -> None:
    """Masks of NaN and of -1: https://github.com/chemprop/chemprop/pull/1303,
    https://github.com/londonaicentre/FLIP/pull/766
    """
    x, y = rows()
    y[4, 0] = y[5, :2] = y[6, 1:] = float("nan")
    labels = y.gt(0).float().where(~y.isnan(), -1)
    for targets, loss_fn in ((y, mean_of_known), (labels, mean_of_labelled)):
        refused(rank, "Pass count_items=", linear(), (x, targets), loss_fn)
        two = x[1:5:3], targets[1:5:3]  # one row on each rank
        refused(rank, "Pass count_items=", linear(), two, loss_fn)
    count = lambda y: (~y.isnan()).sum()  # noqa: E731
    check(rank, linear(), (x, y), mean_of_known, count_items=count, num_microbatches=2)
    check(rank, linear(), (x, labels.gt(0)), lambda out, y: mean_of_labelled(out, y.float()))
    train, mine, _ = trained(rank, linear(), (x, y), mean_of_known)
    train.step(mine, mine[:, :3])  # nothing is missing yet
    with pytest.raises(ValueError, match=rf"Pass count_items=|{OF_ANOTHER}"):
        train.step(mine, y[: len(mine)] if rank == 0 else y[-len(mine) :])


@in_ranks(2)
def test_weights_of_rows(rank: int) -> None:
    """https://github.com/sb-ai-lab/RePlay/issues/91,
    https://github.com/tianzhi0549/FCOS/issues/228
    """
    x, y = rows()
    weights = torch.ones(ROWS, 1)
    weights[3], weights[5] = 5.0, 0.1
    batch = x, torch.cat([y, weights], 1)
    refused(rank, "Pass count_items=", linear(), batch, mean_by_weights)
    refused(rank, "Pass count_items=", linear(), [part[2:4] for part in batch], mean_by_weights)
    check(rank, linear(), batch, mean_by_weights, count_items=lambda y: y[:, -1].sum())


@in_ranks(2)
def test_a_mask_beside_the_labels(rank: int) -> None:
    """https://github.com/PrimeIntellect-ai/prime-rl/pull/1960,
    https://github.com/radixark/miles/pull/2796
    """
    x, y = rows()
    mask = torch.ones(ROWS, CLASSES)
    mask[2, 1:] = mask[4, 1:] = mask[5, :1] = 0

    def of_mask(out: Tensor, y: Tensor) -> Tensor:
        return ((out - y[..., 0]).square() * y[..., 1]).sum() / y[..., 1].sum()

    batch = x, torch.stack([y, mask], -1)
    refused(rank, "Pass count_items=", linear(), batch, of_mask)
    check(rank, linear(), batch, of_mask, count_items=lambda y: y[..., 1].sum())


@in_ranks(2)
def test_a_loss_that_is_not_divided(rank: int) -> None:
    """It takes num_items_in_batch: https://github.com/huggingface/transformers/issues/37766,
    https://github.com/huggingface/transformers/pull/35438
    """
    (x, y), classes = rows(), torch.arange(ROWS) % CLASSES
    for targets, mean in ((y, F.mse_loss), (classes, F.cross_entropy)):
        ignores = lambda out, y, num_items_in_batch=None, mean=mean: mean(out, y)  # noqa: E731
        refused(rank, "not half as large", linear(), (x, targets), ignores)
        refused(rank, "not half as large", linear(), (x, targets), ignores, count_items=len)


@in_ranks(2)
def test_a_pad_id_between_the_classes(rank: int) -> None:
    """https://github.com/NVIDIA-NeMo/Automodel/issues/1336: Qwen's pad id is not the largest."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
    ids = torch.tensor([[1, 9, 2, 8, 3, 10], [1, 10, 2, 5, 5, 5]])

    def of_pads(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=5)

    refused(rank, "Pass count_items=", model, (ids, ids), of_pads)


class Learned(nn.Module):
    """The weight of a task is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.log_var = nn.Parameter(torch.zeros(()))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y) * (-self.log_var).exp() + self.log_var


@in_ranks(2)
def test_a_loss_with_weights_of_its_own(rank: int) -> None:
    """https://github.com/KevinMusgrave/pytorch-metric-learning/issues/710,
    https://github.com/facebookresearch/ClassyVision/pull/394
    """
    loss_fn, batch = Learned(), rows()
    with pytest.raises(ValueError, match=r"parameter of shape .* not in the model"):
        parallelize(
            linear(),
            ParallelDims(dp=2),
            lambda params: sgd([*params, *loss_fn.parameters()]),
            loss_fn=loss_fn,
        )
    for asked in (loss_fn, lambda out, y: 2 * loss_fn(out, y), loss_fn.forward):
        refused(rank, "trains a tensor of shape", linear(), batch, asked)
    model = linear()
    penalty = lambda: sum(param.square().sum() for param in model.parameters())  # noqa: E731
    alone = copy.deepcopy(model)
    own = lambda: sum(param.square().sum() for param in alone.parameters())  # noqa: E731

    def with_penalty(penalty: Callable[[], Any], out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y) + 0.1 * penalty()

    train, x, y = trained(rank, model, batch, partial(with_penalty, penalty))
    train.step(x, y)
    with_penalty(own, alone(batch[0]), batch[1]).backward()
    for param, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param.grad, other.grad)


class Annealed(nn.Module):
    """Counts its calls in an attribute, a list and a buffer."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.num, self.seen = 0, [1.0]
        self.register_buffer("total", torch.zeros(()))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        self.num += 1
        self.seen.append(1.0)
        self.total = self.total + 1
        return F.mse_loss(out, y) * self.num * len(self.seen) * self.total / 30


def counting() -> Callable[[Tensor, Tensor], Tensor]:
    num = 0

    def loss_fn(out: Tensor, y: Tensor) -> Tensor:
        nonlocal num
        num += 1
        return F.mse_loss(out, y) * num

    return loss_fn


@in_ranks(2)
def test_a_loss_that_counts_its_calls(rank: int) -> None:
    """https://github.com/StanfordASL/Trajectron-plus-plus/issues/85: annealed before its time."""
    of_closure = Annealed()
    for loss_fn, expected in (
        (Annealed(), Annealed()),
        (lambda out, y: 1 * of_closure(out, y), Annealed()),
        (Annealed().forward, Annealed()),
        (counting(), counting()),
    ):
        check(rank, linear(), rows(), loss_fn, expected)


@in_ranks(2)
def test_what_a_loss_returns(rank: int) -> None:
    """https://github.com/huggingface/trl/pull/5951: more than one number."""
    for loss_fn in (
        lambda out, y: (F.mse_loss(out, y), {"of": 1}),
        lambda out, y: {"loss": F.mse_loss(out, y)},
        lambda out, y: F.mse_loss(out, y)[None],
        nn.MSELoss(reduction="none"),
    ):
        refused(rank, "must return a scalar tensor", linear(), rows(), loss_fn)


@in_ranks(2)
def test_forbidden_classes_on_a_rank_without_labels(rank: int) -> None:
    """Its loss is 0, not NaN: https://github.com/NVIDIA-NeMo/Automodel/issues/3796."""

    class Forbids(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.tensor([float("-inf"), 0, 0, 0])

    torch.manual_seed(0)
    y = torch.tensor([-100, -100, 1, 2, 3, 1, 2, 3])
    check(rank, Forbids(5, 4), (rows()[0], y), F.cross_entropy)


@in_ranks(2)
def test_labels_of_bytes_and_wrapped_losses(rank: int) -> None:
    """-100 is 156 in a byte: https://github.com/yassouali/pytorch-segmentation/pull/76."""
    random = torch.Generator().manual_seed(0)
    images = torch.randn(ROWS, 3, 2, 2, generator=random)
    y = torch.randint(0, 5, (ROWS, 2, 2), generator=random).to(torch.uint8)
    many, few = y.clone(), y.clone()
    many[0] = many[1, 1:] = 156
    few[0] = few[1, 1:] = 255
    torch.manual_seed(0)
    check(
        rank,
        nn.Conv2d(3, 157, 1),
        (images, many),
        lambda out, y: F.cross_entropy(out, y.long()),
    )
    of_few, weight = nn.CrossEntropyLoss(ignore_index=255), torch.tensor([0.1, 1, 3, 1, 1])
    for loss_fn, targets in (
        (partial(of_few), few.long()),
        (torch.compile(of_few, backend="eager"), few.long()),
        (torch.compile(nn.CrossEntropyLoss(weight), backend="eager"), y.long()),
    ):
        check(rank, nn.Conv2d(3, 5, 1), (images, targets), loss_fn, num_microbatches=2)
