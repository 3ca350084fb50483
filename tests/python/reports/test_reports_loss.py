"""What users of other libraries reported about the mean over a batch on several ranks: also losses
whose parts are no means over rows, or which keep something.

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
from steps import apply_steps, train_step
from torch import Tensor, nn
from torch.nn import functional as F

from ringcomm.parallel import ParallelDims, parallelize
from ringcomm.parallel.loss import is_integer

transformers = pytest.importorskip("transformers")
assert transformers.LlamaForCausalLM  # imported before ranks are forked
assert transformers.T5ForConditionalGeneration
assert transformers.BertForMaskedLM
assert transformers.MixtralForCausalLM

VOCAB, ROWS, LENGTH, CLASSES = 11, 8, 6, 3


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for param in params if param.requires_grad], 0.1)


def linear(num: int = CLASSES) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, num)


def test_labels_are_integers() -> None:
    kinds = torch.int64, torch.uint8, torch.bool, torch.float32, torch.bfloat16, torch.complex64
    labels = [kind for kind in kinds if is_integer(torch.empty(0, dtype=kind))]
    assert labels == [torch.int64, torch.uint8]


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
    rank: int,
    model: nn.Module,
    batch: Any,
    loss_fn: Any,
    expected: Any = None,
    evaluates: bool = True,
    **options: Any,
) -> None:
    """Three steps are those of one process. Both have their own `expected`."""
    alone, expected = copy.deepcopy(model), expected or loss_fn
    train, x, y = trained(rank, model, batch, loss_fn, **options)
    optimizer = sgd(alone.parameters())
    for step in range(3):
        wanted = expected(alone(batch[0]), batch[1])
        if evaluates:
            torch.testing.assert_close(train.evaluate(x, y), wanted.detach(), msg=f"{step}")
        torch.testing.assert_close(train.step(x, y), wanted.detach(), msg=f"{step}")
        apply_steps(train.optimizer)
        train_step(wanted, optimizer)
    found = full_weights(train)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


def refused(rank: int, text: str, model: nn.Module, batch: Any, loss_fn: Any, **more: Any) -> None:
    """Every rank raises before a weight is written."""
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TypeError, match=text):
        trained(rank, model, batch, loss_fn, **more)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def refused_in_step(rank: int, text: str, model: nn.Module, batch: Any, loss_fn: Any) -> None:
    train, x, y = trained(rank, model, batch, loss_fn, count_items=len)
    with pytest.raises((TypeError, ValueError), match=text):
        train.step(x, y)


def not_padding(y: Tensor) -> Tensor:
    return y.ne(-100).sum()


def tokens_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, VOCAB))


def tokens(ignored: int) -> tuple[Tensor, Tensor]:
    """Rows of 6, 5, ... labels; the first two have none."""
    torch.manual_seed(1)
    x, y = torch.randint(1, VOCAB, (ROWS, LENGTH)), torch.randint(1, VOCAB, (ROWS, LENGTH))
    for row in range(ROWS):
        y[row, max(0, LENGTH - row) :] = ignored
    y[:2] = ignored
    return x, y


def flat(out: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), **options)


@in_ranks(2)
def test_a_mean_of_the_means_of_rows(rank: int) -> None:
    """https://github.com/vllm-project/speculators/pull/942"""

    def of_rows(out: Tensor, y: Tensor) -> Tensor:
        counted = y != -100
        losses = flat(out, y, reduction="none").view(y.shape)
        return (losses.sum(1) / (counted.sum(1) + 1e-6)).mean()

    def by_number(out: Tensor, y: Tensor, num_items_in_batch: float) -> Tensor:
        return of_rows(out, y) * len(y) / num_items_in_batch

    refused(rank, "pass count_items=", tokens_model(), tokens(-100), of_rows)
    check(rank, tokens_model(), tokens(-100), of_rows, count_items=len)
    more: dict[str, Any] = {"count_items": len, "num_microbatches": 2}
    check(rank, tokens_model(), tokens(-100), by_number, of_rows, **more)


@in_ranks(2)
def test_negatives_in_the_batch(rank: int) -> None:
    """https://github.com/facebookresearch/vissl/issues/474: micro-batches have fewer negatives."""

    def info_nce(out: Tensor, y: Tensor) -> Tensor:
        near = out.flatten(1) @ out.flatten(1).T
        return F.cross_entropy(near, torch.arange(len(out)))

    refused(rank, "count_items=len for one over rows", tokens_model(), tokens(-100), info_nce)
    train, x, y = trained(rank, tokens_model(), tokens(-100), info_nce, count_items=len)
    alone, (every, _) = tokens_model(), tokens(-100)
    of_ranks = [info_nce(alone(part), part) * len(part) / ROWS for part in every.split([2, 6])]
    torch.testing.assert_close(train.step(x, y), sum(of_ranks).detach())  # type: ignore[union-attr]


@in_ranks(2)
def test_labels_that_are_shifted_in_the_loss(rank: int) -> None:
    """https://github.com/huggingface/transformers/issues/35066: does the loss shift them?

    A user's loss that does: the axis loss of test_pairs.py.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    shifts, (x, _) = partial(ForCausalLMLoss, vocab_size=VOCAB), tokens(-100)
    y = x.clone()
    y[0] = y[1, 1:] = y[3, 2:] = -100
    check(rank, tokens_model(), (x, y), shifts, num_microbatches=2)


@in_ranks(2)
def test_rows_of_one_token(rank: int) -> None:
    """https://github.com/unslothai/unsloth-zoo/pull/1217: after the shift no label is left."""
    train = parallelize(llama(), ParallelDims(dp=2), sgd)
    with pytest.raises(ValueError, match="no labels on any rank"):
        train.step(torch.ones(2, 1, dtype=torch.long), torch.ones(2, 1, dtype=torch.long))


@in_ranks(2)
def test_weights_that_are_unfrozen_later(rank: int) -> None:
    """https://github.com/facebookresearch/detectron2/issues/2486,
    https://github.com/huggingface/transformers/issues/416
    """
    model: Any = tokens_model()
    first, (x, y) = model[0], tokens(-100)
    first.requires_grad_(False)
    alone = copy.deepcopy(model)
    mine = slice(0, 4) if rank == 0 else slice(4, None)
    optimizers = []

    def make(params: Any) -> torch.optim.Optimizer:
        optimizers.append(torch.optim.SGD(params, 0.5))
        return optimizers[0]

    options: dict[str, Any] = {"loss_fn": flat, "count_items": not_padding}
    train = parallelize(model, ParallelDims(dp=2), make, **options)
    others = torch.optim.SGD(alone.parameters(), 0.5)
    for step, frozen in enumerate((True, False, False, True)):
        for part in (model, alone):
            part[0].requires_grad_(not frozen)
        train.step(x[mine], y[mine])
        flat(alone(x), y).backward()
        apply_steps(train.optimizer, others)
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], value, msg=f"{step} {name}")
    first.requires_grad_(rank == 0)
    with pytest.raises(ValueError, match=r"unfrozen on 1 of 2 ranks"):
        train.step(x[mine], y[mine])


# ---- losses whose parts are no means over rows, or which keep something


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
        refused(rank, "pass count_items=", linear(), (x, targets), loss_fn)
    count = lambda y: (~y.isnan()).sum()  # noqa: E731
    check(rank, linear(), (x, y), mean_of_known, count_items=count, num_microbatches=2)
    count = lambda y: y.ge(0).sum()  # noqa: E731
    check(rank, linear(), (x, labels), mean_of_labelled, count_items=count)


@in_ranks(2)
def test_weights_of_rows(rank: int) -> None:
    """https://github.com/sb-ai-lab/RePlay/issues/91,
    https://github.com/tianzhi0549/FCOS/issues/228,
    https://github.com/PrimeIntellect-ai/prime-rl/pull/1960 and
    https://github.com/radixark/miles/pull/2796: a mask beside the labels.
    """
    x, y = rows()
    weights = torch.ones(ROWS, 1)
    weights[3], weights[5] = 5.0, 0.1
    batch = x, torch.cat([y, weights], 1)
    refused(rank, "pass count_items=", linear(), batch, mean_by_weights)
    check(rank, linear(), batch, mean_by_weights, count_items=lambda y: y[:, -1].sum())


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
    of_both = lambda params: sgd([*params, *loss_fn.parameters()])  # noqa: E731
    with pytest.raises(ValueError, match=r"parameter of shape .* not in the model"):
        parallelize(linear(), ParallelDims(dp=2), of_both, loss_fn=loss_fn, count_items=len)
    for trains in (loss_fn, lambda out, y: 2 * loss_fn(out, y), loss_fn.forward):
        refused_in_step(rank, "trains a tensor of shape", linear(), batch, trains)
    model = linear()
    penalty = lambda: sum(param.square().sum() for param in model.parameters())  # noqa: E731
    alone = copy.deepcopy(model)
    own = lambda: sum(param.square().sum() for param in alone.parameters())  # noqa: E731

    def with_penalty(penalty: Callable[[], Any], out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y) + 0.1 * penalty()

    train, x, y = trained(rank, model, batch, partial(with_penalty, penalty), count_items=len)
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
        check(rank, linear(), rows(), loss_fn, expected, evaluates=False, count_items=len)


@in_ranks(2)
def test_what_a_loss_returns(rank: int) -> None:
    """https://github.com/huggingface/trl/pull/5951: more than one number."""
    for loss_fn in (
        lambda out, y: (F.mse_loss(out, y), {"of": 1}),
        lambda out, y: {"loss": F.mse_loss(out, y)},
        lambda out, y: F.mse_loss(out, y)[None],
    ):
        refused_in_step(rank, "must return a scalar tensor", linear(), rows(), loss_fn)


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
    of_bytes = lambda out, y: F.cross_entropy(out, y.long())  # noqa: E731
    check(rank, nn.Conv2d(3, 157, 1), (images, many), of_bytes, count_items=torch.numel)
    of_few, weight = nn.CrossEntropyLoss(ignore_index=255), torch.tensor([0.1, 1, 3, 1, 1])
    for loss_fn, targets in (
        (partial(of_few), few.long()),
        (torch.compile(of_few, backend="eager"), few.long()),
        (torch.compile(nn.CrossEntropyLoss(weight), backend="eager"), y.long()),
    ):
        check(rank, nn.Conv2d(3, 5, 1), (images, targets), loss_fn, num_microbatches=2)


# ---- models of transformers that compute their loss themselves


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=VOCAB, **sizes, **heads, **options)
    return transformers.LlamaForCausalLM(config)


def check_own(rank: int, model: Any, batch: dict[str, Tensor], **options: Any) -> None:
    """As check(), for the loss of a model."""
    alone = copy.deepcopy(model)
    expected = alone(**batch).loss
    expected.backward()
    sgd(alone.parameters()).step()
    mine = slice(0, 3) if rank == 0 else slice(3, None)
    train = parallelize(model, ParallelDims(dp=2), sgd, **options)
    loss = train.step({name: value[mine] for name, value in batch.items()})
    train.optimizer.step()
    torch.testing.assert_close(loss, expected.detach())
    found = full_weights(train)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)


@in_ranks(2)
def test_a_model_that_ignores_the_number_of_labels(rank: int) -> None:
    """https://github.com/unslothai/unsloth-zoo/pull/1023: it is passed, and the loss is a mean."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(
        vocab_size=VOCAB, dropout_rate=0.0, decoder_start_token_id=0, **sizes
    )
    x, y = tokens(-100)
    check_own(rank, transformers.T5ForConditionalGeneration(config), {"input_ids": x, "labels": y})


@in_ranks(2)
def test_models_with_and_without_a_shift(rank: int) -> None:
    """https://github.com/huggingface/transformers/issues/10480"""
    torch.manual_seed(0)
    x, y = tokens(-100)
    y[:, 0] = x[:, 0]
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        **sizes,
        intermediate_size=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    check_own(rank, transformers.BertForMaskedLM(config), {"input_ids": x, "labels": y})
    check_own(rank, llama(), {"input_ids": x, "labels": y})

    class Shifting(transformers.BertForMaskedLM):  # type: ignore[name-defined]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.loss = flat(output.logits[:, :-1], kwargs["labels"][:, 1:])
            return output

    with pytest.raises(TypeError, match=r"Shifting has a loss of its own.* pass count_items="):
        parallelize(Shifting(config), ParallelDims(dp=2), sgd)
    count = lambda labels: labels[:, 1:].ne(-100).sum()  # noqa: E731
    check_own(rank, Shifting(config), {"input_ids": x, "labels": y}, count_items=count)


@in_ranks(2)
@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe"])
def test_the_routers_loss_is_not_multiplied_by_the_number_of_ranks(
    rank: int, kind: str, ep: int
) -> None:
    """https://github.com/huggingface/transformers/pull/48706 and issues/48690.

    With a dense layer among the sparse ones (issues/39203).
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 4}
    own = {"mlp_only_layers": [0], "moe_intermediate_size": 8} if kind == "Qwen3Moe" else {}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCAB, **sizes, **heads, **own, output_router_logits=True,
        router_aux_loss_coef=0.5, num_experts_per_tok=2,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    alone, x = copy.deepcopy(model), tokens(-100)[0]
    halves = [alone(input_ids=half, labels=half).loss for half in x.chunk(2)]
    (sum(halves) / 2).backward()
    train = parallelize(model, ParallelDims(dp=2, ep=ep), sgd)
    mine = x.chunk(2)[rank]
    loss = train.step({"input_ids": mine, "labels": mine})
    torch.testing.assert_close(loss, torch.stack(halves).mean().detach())
    wanted = {name: param.grad for name, param in alone.named_parameters()}
    for name, param in train.model.named_parameters():
        num_rows = len(param)  # of stacked experts this rank's
        other = wanted[name].split(num_rows)[rank if num_rows < len(wanted[name]) else 0]
        torch.testing.assert_close(param.grad, other, rtol=1e-4, atol=1e-6)
