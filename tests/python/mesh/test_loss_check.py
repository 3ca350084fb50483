"""A loss function is asked whether the losses of parts of a batch make the loss of the batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ringcomm.parallel.loss import LossError, PartLoss

ROWS, LENGTH, CLASSES = 4, 12, 7
WEIGHT = torch.linspace(0.1, 3, CLASSES)


def flat(call: Callable[..., Tensor], **options: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """A loss over tokens."""
    return lambda out, y: call(out.flatten(0, 1), y.flatten(), **options)


def shifted(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out[:, :-1].flatten(0, 1), y[:, 1:].flatten())


def z_loss(out: Tensor, y: Tensor) -> Tensor:
    lse = out.logsumexp(-1)[y != -100]
    return flat(F.cross_entropy)(out, y) + 1e-2 * lse.square().mean()


def per_row(out: Tensor, y: Tensor) -> Tensor:
    losses = [F.cross_entropy(own, labels) for own, labels in zip(out, y, strict=True)]
    return torch.stack(losses).mean()


def with_dropout(out: Tensor, y: Tensor) -> Tensor:
    return flat(F.cross_entropy)(F.dropout(out, 0.5), y)


def guarded(out: Tensor, y: Tensor) -> Tensor:
    """No NaN for a batch without labels."""
    total = flat(F.cross_entropy, reduction="sum")(out, y)
    return total / y.ne(-100).sum().clamp(min=1)


def of_one_length(out: Tensor, y: Tensor) -> Tensor:
    losses = flat(F.cross_entropy, reduction="none")(out, y).view(y.shape)
    return (losses * torch.ones(LENGTH)).sum() / y.ne(-100).sum()


def summed(out: Tensor, y: Tensor, num_items_in_batch: float, **options: Any) -> Tensor:
    return flat(F.cross_entropy, reduction="sum", **options)(out, y) / num_items_in_batch


def summed_unpadded(out: Tensor, y: Tensor, num_items_in_batch: float) -> Tensor:
    return summed(out, y, num_items_in_batch, ignore_index=0)


def summed_shifted(out: Tensor, y: Tensor, num_items_in_batch: float) -> Tensor:
    return summed(out[:, :-1], y[:, 1:], num_items_in_batch)


def weighted(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, -2), y.flatten(), weight=WEIGHT.to(out.dtype))


def info_nce(out: Tensor, y: Tensor) -> Tensor:
    """Each row has the others as negatives."""
    rows = F.normalize(out.flatten(1), dim=1)
    return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


def masked_mse(out: Tensor, y: Tensor) -> Tensor:
    there = y != 0
    return ((out - y).square() * there).sum() / there.sum()


class Channels(nn.CrossEntropyLoss):
    """Classes in the second dimension, as torch has them."""

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return super().forward(out.transpose(1, 2), y)


class Running(nn.Module):
    """A loss with statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        loss = flat(F.cross_entropy)(out, y)
        self.mean.mul_(0.9).add_(loss.detach())
        return loss


def tokens(pad: int | None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(ROWS, LENGTH, CLASSES, generator=generator)
    y = torch.randint(1, CLASSES, (ROWS, LENGTH), generator=generator)
    if pad is not None:
        y[1, 5:] = pad
        y[3, 9:] = pad
    return out, y


def rows() -> tuple[Tensor, Tensor]:
    out, y = tokens(None)
    return out[:, 0], y[:, 0]


def values() -> tuple[Tensor, Tensor]:
    out = tokens(None)[0]
    return out, torch.where(torch.arange(ROWS)[:, None, None] > 1, out * 0.5, out * 0)


def sure() -> tuple[Tensor, Tensor]:
    """Labels have no gradient, because their logits are so much greater than the others."""
    y = tokens(-100)[1]
    return 1000.0 * F.one_hot(y.clamp(min=0), CLASSES), y


RIGHT: dict[str, tuple[Any, Any]] = {
    "mean": (flat(F.cross_entropy), tokens(-100)),
    "mean without padding": (flat(F.cross_entropy), tokens(None)),
    "shifted without padding": (shifted, tokens(None)),
    "smoothed": (flat(F.cross_entropy, label_smoothing=0.1), tokens(-100)),
    "z-loss": (z_loss, tokens(-100)),
    "guarded": (guarded, tokens(-100)),
    "one length": (of_one_length, tokens(-100)),
    "random": (with_dropout, tokens(-100)),
    "sum divided by a count": (summed, tokens(-100)),
    "sum of a sure model": (summed, sure()),
    "running statistics": (Running(), tokens(-100)),
    "module with ignore_index": (Channels(ignore_index=-1), tokens(-1)),
    "module with class weights": (Channels(weight=WEIGHT), tokens(-100)),
    "weights and smoothing": (Channels(weight=WEIGHT, label_smoothing=0.1), tokens(-100)),
    "partial with ignore_index": (partial(F.cross_entropy, ignore_index=3), rows()),
    "partial with class weights": (partial(F.cross_entropy, weight=WEIGHT), rows()),
    "rows": (F.cross_entropy, rows()),
    "mse": (F.mse_loss, values()),
    "bce": (F.binary_cross_entropy_with_logits, (tokens(None)[0], tokens(None)[0].gt(0).float())),
    "one row": (flat(F.cross_entropy), tuple(x[1:2] for x in tokens(-100))),
    "one label": (
        flat(F.cross_entropy),
        (tokens(None)[0][:1], torch.tensor([[-100] * (LENGTH - 1) + [2]])),
    ),
    "infinite output": (shifted, (tokens(-100)[0] / 0, tokens(-100)[1])),
}
WRONG: dict[str, tuple[Any, Any]] = {
    "shifted": (shifted, tokens(-100)),
    "ignore_index -1": (flat(F.cross_entropy, ignore_index=-1), tokens(-1)),
    "ignore_index -1, one row": (
        flat(F.cross_entropy, ignore_index=-1),
        tuple(x[1:2] for x in tokens(-1)),
    ),
    "pad id": (flat(F.cross_entropy, ignore_index=0), tokens(0)),
    "class weights": (weighted, tokens(-100)),
    "class weights of rows": (weighted, rows()),
    "means of rows": (per_row, tokens(-100)),
    "sum": (flat(F.cross_entropy, reduction="sum"), tokens(-100)),
    "shifted sum divided by a count": (summed_shifted, tokens(None)),
    "sum without a pad id": (summed_unpadded, tokens(0)),
    "contrastive": (info_nce, tokens(-100)),
    "masked values": (masked_mse, values()),
    "untrained model": (shifted, (tokens(-100)[0] * 0, tokens(-100)[1])),
}


def ask(loss_fn: Any, batch: Any, **options: Any) -> LossError | None:
    loss = PartLoss(loss_fn, **options)
    out, y = batch
    out = out.clone().requires_grad_()
    labels = loss.labels(y)
    loss.expect(labels.kinds)
    loss(out, y, labels.counts[0], labels.counts[0])
    return loss.answer()


@pytest.mark.parametrize("name", RIGHT)
def test_a_mean_over_labels_is_taken(name: str) -> None:
    assert ask(*RIGHT[name]) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WRONG)
def test_another_loss_is_refused(name: str, dtype: torch.dtype) -> None:
    loss_fn, (out, y) = WRONG[name]
    error = ask(loss_fn, (out.to(dtype), y))
    assert "count_items" in str(error)


@pytest.mark.parametrize("name", ["shifted", "pad id", "class weights", "ignore_index -1"])
def test_count_items_says_what_counts(name: str) -> None:
    counts: dict[str, Callable[[Tensor], Any]] = {
        "shifted": lambda y: y[:, 1:].ne(-100).sum(),
        "pad id": lambda y: int((y != 0).sum()),
        "class weights": lambda y: WEIGHT[y[y != -100]].sum(),
        "ignore_index -1": lambda y: y.ne(-1).sum(),
    }
    loss_fn, batch = WRONG[name]
    if name == "shifted":
        assert ask(loss_fn, batch, count_items=counts["pad id"]) is not None
    assert ask(loss_fn, batch, count_items=counts[name]) is None
