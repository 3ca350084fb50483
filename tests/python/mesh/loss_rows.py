"""Losses of users with the models and batches that they are for, for test_losses.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS, CLASSES, WIDTH = 12, 7, 5
WEIGHT = torch.linspace(0.1, 3, CLASSES, dtype=torch.float64)


def linear() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for param in params if param.requires_grad], 0.5)


def rows() -> tuple[Tensor, Tensor]:
    """Micro-batches of the ranks have 0, 2, 3, 3 labels."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (ROWS,), generator=generator)
    y[:4] = -100
    return x, y


def tokens_model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 11))


def tokens() -> tuple[Tensor, Tensor]:
    """Rows of 6, 5, ... labels; the first two have none."""
    torch.manual_seed(1)
    x, y = torch.randint(1, 11, (8, 6)), torch.randint(1, 11, (8, 6))
    for row in range(8):
        y[row, max(0, 6 - row) :] = -100
    y[:2] = -100
    return x, y


def shifted_tokens() -> tuple[Tensor, Tensor]:
    x, _ = tokens()
    y = x.clone()
    y[0] = y[1, 1:] = y[3, 2:] = -100
    return x, y


def three(num: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, num)


class Forbids(nn.Linear):
    """The first class."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.tensor([float("-inf"), 0, 0, 0])


def forbidding() -> nn.Module:
    torch.manual_seed(0)
    return Forbids(WIDTH, 4)


def numbers() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    return torch.randn(8, WIDTH, generator=random), torch.randn(8, 3, generator=random)


def with_gaps() -> tuple[Tensor, Tensor]:
    x, y = numbers()
    y[4, 0] = y[5, :2] = y[6, 1:] = float("nan")
    return x, y


def with_unknown() -> tuple[Tensor, Tensor]:
    x, y = with_gaps()
    return x, y.gt(0).float().where(~y.isnan(), -1)


def with_weights() -> tuple[Tensor, Tensor]:
    x, y = numbers()
    weights = torch.ones(8, 1)
    weights[3], weights[5] = 5.0, 0.1
    return x, torch.cat([y, weights], 1)


def few_labels() -> tuple[Tensor, Tensor]:
    return numbers()[0], torch.tensor([-100, -100, 1, 2, 3, 1, 2, 3])


def of_pixels(num: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Conv2d(3, num, 1)


def images(ignored: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(8, 3, 2, 2, generator=random)
    y = torch.randint(0, 5, (8, 2, 2), generator=random)
    if ignored is not None:
        y[0] = y[1, 1:] = ignored
    return x, y.to(dtype)


def summed(out: Tensor, y: Tensor, num_items_in_batch: float) -> Tensor:
    return F.cross_entropy(out, y, reduction="sum") / num_items_in_batch


def mean(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y)


def flat(out: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), **options)


def flat_sum(out: Tensor, y: Tensor, num_items_in_batch: float) -> Tensor:
    return flat(out, y, reduction="sum") / num_items_in_batch


def of_rows(out: Tensor, y: Tensor) -> Tensor:
    losses = flat(out, y, reduction="none").view(y.shape)
    return (losses.sum(1) / ((y != -100).sum(1) + 1e-6)).mean()


def of_rows_by_number(out: Tensor, y: Tensor, num_items_in_batch: float) -> Tensor:
    return of_rows(out, y) * len(y) / num_items_in_batch


def info_nce(out: Tensor, y: Tensor) -> Tensor:
    near = out.flatten(1) @ out.flatten(1).T
    return F.cross_entropy(near, torch.arange(len(out)))


def info_nce_of_ranks(out: Tensor, y: Tensor) -> Any:
    return sum(info_nce(part, part) * len(part) / 8 for part in out.split([2, 6]))


def causal_lm_loss() -> Any:
    loss_utils = pytest.importorskip("transformers.loss.loss_utils")
    return partial(loss_utils.ForCausalLMLoss, vocab_size=11)


def mean_of_known(out: Tensor, y: Tensor) -> Tensor:
    return (out - y.nan_to_num())[~y.isnan()].square().mean()


def mean_of_labelled(out: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(out[y >= 0], y[y >= 0])


def mean_by_weights(out: Tensor, y: Tensor) -> Tensor:
    losses = (out - y[:, :-1]).square().mean(1)
    return (losses * y[:, -1]).sum() / y[:, -1].sum()


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


def annealed_in_closure() -> Any:
    made = Annealed()
    return lambda out, y: 1 * made(out, y)


def counting() -> Any:
    num = 0

    def loss_fn(out: Tensor, y: Tensor) -> Tensor:
        nonlocal num
        num += 1
        return F.mse_loss(out, y) * num

    return loss_fn


@dataclasses.dataclass(frozen=True)
class Row:
    """A loss of a user.

    Attributes:
        loss_fn, of_whole: of a system, and of one process if that is another.
        model, batch: make them; ranks of data parallelism have a third of the rows and the rest.
        count_items: or None.
        is_refused: without count_items, before a weight is written.
        is_made, is_counting: loss_fn makes one; which changes with each call.
        num_parts: micro-batches.
    """

    loss_fn: Any
    model: Callable[[], Any] = linear
    batch: Callable[[], tuple[Tensor, Tensor]] = rows
    count_items: Any = None
    of_whole: Any = None
    is_refused: bool = False
    is_made: bool = False
    is_counting: bool = False
    num_parts: int = 2
    systems: tuple[str, ...] = ("dp",)


SMOOTHED = partial(F.cross_entropy, weight=WEIGHT, label_smoothing=0.1)
of_few = nn.CrossEntropyLoss(ignore_index=255)
of_weights = nn.CrossEntropyLoss(torch.tensor([0.1, 1, 3, 1, 1]))
few_pixels = partial(Row, model=partial(of_pixels, 5), batch=partial(images, 255, torch.int64))
anywhere = partial(Row, systems=("dp", "pp"))
of_tokens = partial(Row, model=tokens_model, batch=tokens)
refused = partial(Row, model=three, is_refused=True)


def not_padding(y: Tensor) -> Tensor:
    return y.ne(-100).sum()


IN_RANKS: dict[str, Row] = {
    "weights and smoothing": anywhere(SMOOTHED),
    # https://github.com/allenai/OLMo-core/pull/657: a count of 0 on a rank.
    "num_items_in_batch": anywhere(summed, of_whole=mean),
    "count_items": anywhere(mean, count_items=not_padding),
    # https://github.com/huggingface/transformers/issues/37766,
    # https://github.com/huggingface/transformers/pull/35438: one's own loss gets the number.
    "tokens, num_items_in_batch": anywhere(flat_sum, tokens_model, tokens, of_whole=flat),
    "tokens, count_items": anywhere(flat, tokens_model, tokens, not_padding),
    # https://github.com/vllm-project/speculators/pull/942
    "means of rows": of_tokens(of_rows, count_items=len, is_refused=True, num_parts=1),
    "means of rows by number": of_tokens(of_rows_by_number, count_items=len, of_whole=of_rows),
    # https://github.com/facebookresearch/vissl/issues/474: micro-batches have fewer negatives.
    "negatives in the batch": of_tokens(
        info_nce, count_items=len, of_whole=info_nce_of_ranks, is_refused=True, num_parts=1
    ),
    # https://github.com/huggingface/transformers/issues/35066: does the loss shift them? A user's
    # loss that does: the axis loss of test_pairs.py.
    "labels that are shifted in the loss": Row(
        causal_lm_loss, tokens_model, shifted_tokens, is_made=True
    ),
    # https://github.com/chemprop/chemprop/pull/1303
    "missing values": refused(
        mean_of_known, batch=with_gaps, count_items=lambda y: (~y.isnan()).sum()
    ),
    # https://github.com/londonaicentre/FLIP/pull/766
    "missing labels": refused(
        mean_of_labelled, batch=with_unknown, count_items=lambda y: y.ge(0).sum(), num_parts=1
    ),
    # https://github.com/sb-ai-lab/RePlay/issues/91, https://github.com/tianzhi0549/FCOS/issues/228,
    # https://github.com/PrimeIntellect-ai/prime-rl/pull/1960 and
    # https://github.com/radixark/miles/pull/2796: a mask beside the labels.
    "weights of rows": refused(
        mean_by_weights, batch=with_weights, count_items=lambda y: y[:, -1].sum(), num_parts=1
    ),
    # https://github.com/StanfordASL/Trajectron-plus-plus/issues/85: annealed before its time.
    **{
        f"annealed {name}": Row(
            *(make, three, numbers, len, whole), is_made=True, is_counting=True, num_parts=1
        )
        for name, make, whole in (
            ("module", Annealed, Annealed),
            ("in a closure", annealed_in_closure, Annealed),
            ("method", lambda: Annealed().forward, Annealed),
            ("by nonlocal", counting, counting),
        )
    },
    # Its loss is 0, not NaN: https://github.com/NVIDIA-NeMo/Automodel/issues/3796.
    "forbidden classes on a rank without labels": Row(
        F.cross_entropy, forbidding, few_labels, num_parts=1
    ),
    # -100 is 156 in a byte: https://github.com/yassouali/pytorch-segmentation/pull/76.
    "labels of bytes": Row(
        lambda out, y: F.cross_entropy(out, y.long()),
        *(partial(of_pixels, 157), partial(images, 156, torch.uint8), torch.numel),
        num_parts=1,
    ),
    "partial": few_pixels(partial(of_few)),
    "compiled": few_pixels(torch.compile(of_few, backend="eager")),
    "compiled with weights": few_pixels(
        torch.compile(of_weights, backend="eager"), batch=partial(images, None, torch.int64)
    ),
}
