"""What users of other libraries reported about the mean over a batch on several ranks.

Each case names its report. Expected values come from one process that has the whole batch.
"""

from __future__ import annotations

import copy
import re
from functools import partial
from typing import Any

import pytest
import torch
from full_states import full_weights
from ranks import in_ranks
from torch import Tensor, nn
from torch.nn import functional as F

from ringcomm.parallel import ParallelDims, parallelize

transformers = pytest.importorskip("transformers")
assert transformers.LlamaForCausalLM  # imported before ranks are forked
assert transformers.T5ForConditionalGeneration
assert transformers.BertForMaskedLM
assert transformers.MixtralForCausalLM

VOCAB, ROWS, LENGTH = 11, 8, 6


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for param in params if param.requires_grad], 0.5)


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


def check(rank: int, model: nn.Module, batch: Any, loss_fn: Any, **options: Any) -> Any:
    """Trains a step on two ranks, which have 2 and 6 rows, and compares it with one process."""
    alone, (x, y) = copy.deepcopy(model), batch
    expected_loss = options.pop("expected", loss_fn)(alone(x), y)
    expected_loss.backward()
    sgd(alone.parameters()).step()
    mine = slice(0, 2) if rank == 0 else slice(2, None)
    train = parallelize(model, ParallelDims(dp=2), sgd, loss_fn=loss_fn, **options)
    before = train.evaluate(x[mine], y[mine])
    loss = train.step(x[mine], y[mine])
    train.optimizer.step()
    torch.testing.assert_close(torch.stack([before, loss]), expected_loss.detach().expand(2))
    found = full_weights(train)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)


def refused(rank: int, text: str, batch: Any, loss_fn: Any, **options: Any) -> None:
    """One rank says why; the other that it did. Nothing is trained."""
    train = parallelize(tokens_model(), ParallelDims(dp=2), sgd, loss_fn=loss_fn, **options)
    mine = slice(0, 4) if rank == 0 else slice(4, None)
    with pytest.raises(ValueError, match=rf"{re.escape(text)}|is refused by another rank"):
        train.step(batch[0][mine], batch[1][mine])


@in_ranks(2)
def test_only_padding_in_a_micro_batch(rank: int) -> None:
    """https://github.com/karpathy/nanochat/pull/623, where -1 is the label of padding."""
    batch, minus_one = tokens(-1), partial(flat, ignore_index=-1)
    check(rank, tokens_model(), batch, minus_one, num_microbatches=2)
    check(
        rank,
        tokens_model(),
        batch,
        lambda out, y: flat(out, y, ignore_index=-1),
        num_microbatches=2,
        count_items=lambda y: y.ne(-1).sum(),
    )
    refused(rank, "Pass count_items=", batch, lambda out, y: flat(out, y, ignore_index=-1))


@in_ranks(2)
def test_padding_that_comes_later(rank: int) -> None:
    """The first batch has no padding, as in https://github.com/karpathy/nanochat/pull/623."""
    loss_fn = lambda out, y: flat(out, y, ignore_index=-1)  # noqa: E731
    train = parallelize(tokens_model(), ParallelDims(dp=2), sgd, loss_fn=loss_fn)
    x, y = tokens(-1)
    train.step(x, x)
    with pytest.raises(ValueError, match=r"Pass count_items=|refused by another rank"):
        train.step(x[2:], y[2:] if rank else x[2:])


@in_ranks(2)
def test_a_pad_id_that_comes_later(rank: int) -> None:
    """https://github.com/huggingface/transformers/issues/34242, with a pad id that is a class."""
    loss_fn = lambda out, y: flat(out, y, ignore_index=0)  # noqa: E731
    x, y = tokens(0)
    for dims in (ParallelDims(dp=2), ParallelDims(pp=2)):
        train = parallelize(tokens_model(), dims, sgd, loss_fn=loss_fn)
        for _ in range(3):
            train.step(x, x)
        refused = r"Pass count_items=|is refused by"
        with pytest.raises(ValueError, match=refused):  # noqa: PT012
            for _ in range(2):
                train.step(x[4:], y[4:])


@in_ranks(2)
def test_no_label_on_a_rank(rank: int) -> None:
    """https://github.com/allenai/OLMo-core/pull/657: a sum, divided by a count of 0 on a rank."""

    def summed(out: Tensor, y: Tensor, num_items_in_batch: float = 24) -> Tensor:
        return flat(out, y, reduction="sum") / num_items_in_batch

    batch = tokens(-100)
    num_items = int((batch[1] != -100).sum())
    check(
        rank,
        tokens_model(),
        batch,
        summed,
        expected=partial(summed, num_items_in_batch=num_items),
    )


@in_ranks(2)
def test_class_weights(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/72047: they are in the denominator of the mean."""
    weight = torch.linspace(0.1, 3, VOCAB)
    torch.manual_seed(0)
    rows = torch.randn(ROWS, 5), torch.randint(VOCAB, (ROWS,))
    for loss_fn in (nn.CrossEntropyLoss(weight), partial(F.cross_entropy, weight=weight)):
        check(rank, nn.Linear(5, VOCAB), rows, loss_fn, num_microbatches=2)
    refused(rank, "Pass count_items=", tokens(-100), partial(flat, weight=weight))


@in_ranks(2)
def test_ignored_pixels(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/31579: a rank has most of the ignored pixels."""
    torch.manual_seed(0)
    images, labels = torch.randn(ROWS, 3, 4, 4), torch.randint(5, (ROWS, 4, 4))
    labels[0] = labels[1, 1:] = 255
    check(rank, nn.Conv2d(3, 5, 1), (images, labels), nn.CrossEntropyLoss(ignore_index=255))


@in_ranks(2)
def test_a_mean_of_the_means_of_rows(rank: int) -> None:
    """https://github.com/vllm-project/speculators/pull/942"""

    def of_rows(out: Tensor, y: Tensor) -> Tensor:
        counted = y != -100
        losses = flat(out, y, reduction="none").view(y.shape)
        return (losses.sum(1) / (counted.sum(1) + 1e-6)).mean()

    refused(rank, "not the weighted mean", tokens(-100), of_rows)
    check(
        rank,
        tokens_model(),
        tokens(-100),
        lambda out, y, num_items_in_batch: of_rows(out, y) * len(y) / num_items_in_batch,
        expected=of_rows,
        count_items=len,
        num_microbatches=2,
    )


@in_ranks(2)
def test_negatives_in_the_batch(rank: int) -> None:
    """https://github.com/facebookresearch/vissl/issues/474: micro-batches have fewer negatives."""

    def info_nce(out: Tensor, y: Tensor) -> Tensor:
        near = out.flatten(1) @ out.flatten(1).T
        return F.cross_entropy(near, torch.arange(len(out)))

    refused(rank, "give it a parameter num_items_in_batch", tokens(-100), info_nce)


@in_ranks(2)
def test_labels_that_are_shifted_in_the_loss(rank: int) -> None:
    """https://github.com/huggingface/transformers/issues/35066: does the loss shift them?"""
    from transformers.loss.loss_utils import ForCausalLMLoss

    shifts, (x, _) = partial(ForCausalLMLoss, vocab_size=VOCAB), tokens(-100)
    y = x.clone()
    y[0] = y[1, 1:] = y[3, 2:] = -100
    refused(rank, "it uses", (x, y), shifts)
    count = lambda labels: labels[:, 1:].ne(-100).sum()  # noqa: E731
    check(rank, tokens_model(), (x, y), shifts, count_items=count, num_microbatches=2)


@in_ranks(2)
def test_rows_of_one_token(rank: int) -> None:
    """https://github.com/unslothai/unsloth-zoo/pull/1217: after the shift no label is left."""
    train = parallelize(llama(), ParallelDims(dp=2), sgd)
    with pytest.raises(ValueError, match="no labels on any rank"):
        train.step(torch.ones(2, 1, dtype=torch.long), torch.ones(2, 1, dtype=torch.long))


@in_ranks(2)
def test_a_smaller_last_batch(rank: int) -> None:
    """https://github.com/Lightning-AI/pytorch-lightning/issues/2924,
    https://github.com/huggingface/transformers/issues/24839
    """
    torch.manual_seed(0)
    rows = torch.randn(7, 5), torch.randn(7, 3)
    check(rank, nn.Linear(5, 3), rows, F.mse_loss)
    check(rank, nn.Linear(5, 3), (rows[0], rows[1].gt(0).float()), nn.BCEWithLogitsLoss())


@in_ranks(2)
def test_a_sum_is_not_averaged(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/37359: ranks' gradients of a sum are averaged."""
    torch.manual_seed(0)
    rows = torch.randn(ROWS, 5), torch.randn(ROWS, 3)
    train = parallelize(
        nn.Linear(5, 3), ParallelDims(dp=2), sgd, loss_fn=nn.MSELoss(reduction="sum")
    )
    with pytest.raises(ValueError, match="return a sum divided by it"):
        train.step(*rows)


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

    train = parallelize(model, ParallelDims(dp=2), make, loss_fn=flat)
    others = torch.optim.SGD(alone.parameters(), 0.5)
    for step, frozen in enumerate((True, False, False, True)):
        for part in (model, alone):
            part[0].requires_grad_(not frozen)
        train.step(x[mine], y[mine])
        flat(alone(x), y).backward()
        for optimizer in (train.optimizer, others):
            optimizer.step()
            optimizer.zero_grad()
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], value, msg=f"{step} {name}")
    first.requires_grad_(rank == 0)
    with pytest.raises(ValueError, match=r"unfrozen on 1 of 2 ranks"):
        train.step(x[mine], y[mine])


# ---- models of transformers that compute their loss themselves


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=VOCAB, **sizes, **heads, **options)
    return transformers.LlamaForCausalLM(config)


def check_own(rank: int, model: Any, batch: dict[str, Tensor]) -> None:
    """As check(), for the loss of a model."""
    alone = copy.deepcopy(model)
    expected = alone(**batch).loss
    expected.backward()
    sgd(alone.parameters()).step()
    mine = slice(0, 3) if rank == 0 else slice(3, None)
    train = parallelize(model, ParallelDims(dp=2), sgd)
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

    train = parallelize(Shifting(config), ParallelDims(dp=2), sgd)
    with pytest.raises(ValueError, match=r"Shifting has a loss of its own|refused by another"):
        train.step({"input_ids": x, "labels": y})


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
        block, _, number = name.rpartition(".experts.")
        if ep > 1 and block:
            idx, last = number.split(".")
            other = wanted[f"{block}.experts.{last}"][int(idx)]
        else:
            other = wanted[name]
        torch.testing.assert_close(param.grad, other, rtol=1e-4, atol=1e-6)
