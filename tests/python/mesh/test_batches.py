"""Batches as data loaders give them: padding, packed sequences, and ranks with few labels."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import covering, slow
from full_states import full_weights
from ranks import in_ranks, run_ranks
from steps import apply_steps, train_step
from test_parallelize import ids_of, make
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ringcomm.parallel import ParallelDims, parallelize

transformers = pytest.importorskip("transformers")

ROWS, LENGTH, VOCAB, STEPS, LR = 8, 12, 67, 2, 0.3
MESHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dp": ({"dp": 4}, {}),
    "dp, micro-batches": ({"dp": 2}, {"num_microbatches": 2}),
    "dp, tp": ({"dp": 2, "tp": 2}, {}),
    "dp, pp": ({"dp": 2, "pp": 2}, {"num_microbatches": 4}),
    "tp, pp": ({"dp": 1, "tp": 2, "pp": 2}, {}),
    "zero 2, pp": ({"dp": 2, "pp": 2}, {"zero_stage": 2, "recompute": True}),
    "fsdp, micro-batches": ({"dp": 1, "fsdp": 2}, {"num_microbatches": 2}),
}


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for param in params if param.requires_grad], LR)


def batch_of(kind: str, step: int) -> dict[str, Tensor]:
    """Padded on the left by 0 to 8 tokens, or packed; the first quarter of rows has no labels."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCAB, (ROWS, LENGTH), generator=generator)
    labels = ids.clone()
    labels[: ROWS // 4] = -100
    if kind == "padded":
        mask = (torch.arange(LENGTH) >= torch.arange(ROWS).unsqueeze(1)).long()
        labels[:, 1:].masked_fill_(mask[:, :-1] == 0, -100)  # first tokens too
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}
    positions = torch.arange(LENGTH).repeat(ROWS, 1)
    for row, begin in enumerate(range(2, 2 + ROWS)):
        positions[row, begin:] -= begin
        labels[row, begin] = -100
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def sequences(batch: dict[str, Tensor]) -> Any:
    """Each sequence alone, without padding, with its labels."""
    for row, (ids, labels) in enumerate(zip(batch["input_ids"], batch["labels"], strict=True)):
        if "attention_mask" in batch:
            begin = int((batch["attention_mask"][row] == 0).sum())
            yield ids[begin:], labels[begin:]
            continue
        begin = int((batch["position_ids"][row] == 0).nonzero()[-1])
        yield ids[:begin], labels[:begin]
        yield ids[begin:], labels[begin:]


def train_alone(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    model, losses = make(), []
    optimizer = torch.optim.SGD(model.parameters(), LR)
    for step in range(STEPS):
        total, count = torch.zeros(()), 0
        for ids, labels in sequences(batch_of(kind, step)):
            logits = model(input_ids=ids[None]).logits[0, :-1]
            total = total + nn.functional.cross_entropy(logits, labels[1:], reduction="sum")
            count += int((labels[1:] != -100).sum())
        (total / count).backward()
        losses.append(float(total) / count)
        apply_steps(optimizer)
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def train_on_mesh(rank: int, kind: str, mesh: str) -> tuple[list[float], dict[str, Tensor]]:
    sizes, options = MESHES[mesh]
    dims, losses = ParallelDims(**sizes), []
    train = parallelize(make(seed=rank), dims, sgd, **options)
    place = dims["batch"].get_local_rank()
    for step in range(STEPS):
        whole = batch_of(kind, step)
        mine = {k: v.chunk(dims["batch"].size())[place] for k, v in whole.items()}
        batch = transformers.BatchEncoding(mine)
        before = float(train.evaluate(batch))
        losses.append(float(train.step(batch)))
        assert before == pytest.approx(losses[-1], rel=1e-5)
        apply_steps(train.optimizer)
    return losses, full_weights(train)


@pytest.mark.parametrize(("mesh", "kind"), covering(MESHES, ["padded", "packed"]))
def test_the_mean_over_all_labels(mesh: str, kind: str) -> None:
    """Some ranks and micro-batches have no labels, and all models but rank 0's other weights."""
    sizes, _ = MESHES[mesh]
    world = sizes["dp"] * sizes.get("fsdp", 1) * sizes.get("pp", 1) * sizes.get("tp", 1)
    losses, weights = train_alone(kind)
    for found, values in run_ranks(world, train_on_mesh, kind, mesh):
        assert found == pytest.approx(losses, rel=2e-6)
        for name, value in weights.items():
            torch.testing.assert_close(values[name], value, rtol=1e-4, atol=2e-6, msg=name)


def own_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def counted(labels: Tensor) -> Tensor:
    return labels.ne(-100).sum()


def own_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 11))


def own_batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, y = torch.randint(11, (8, 5)), torch.randint(11, (8, 5))
    y[:2] = -100
    y[5, 1:] = -100
    return x, y


# ---- models of transformers that compute their loss themselves

TINY = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
DROPS = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)


class Shifting(transformers.BertForMaskedLM):  # type: ignore[name-defined]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.loss = own_loss(output.logits[:, :-1], kwargs["labels"][:, 1:])
        return output


def t5() -> Any:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(
        vocab_size=VOCAB, dropout_rate=0.0, decoder_start_token_id=0, **sizes
    )
    return transformers.T5ForConditionalGeneration(config)


def bert(kind: Any) -> Any:
    return kind(transformers.BertConfig(vocab_size=VOCAB, num_hidden_layers=1, **TINY, **DROPS))


OWN_LOSSES: dict[str, tuple[Callable[[], Any], Any]] = {
    # https://github.com/unslothai/unsloth-zoo/pull/1023: the number of labels is passed, and the
    # loss is a mean.
    "T5": (t5, None),
    # https://github.com/huggingface/transformers/issues/10480: with and without a shift.
    "Bert": (partial(bert, transformers.BertForMaskedLM), None),
    "shifting": (partial(bert, Shifting), lambda labels: labels[:, 1:].ne(-100).sum()),
}


@pytest.mark.parametrize("name", OWN_LOSSES)
@in_ranks(2)
def test_models_with_losses_of_their_own(rank: int, name: str) -> None:
    """On rows of other numbers of labels; the first two have none."""
    build, count_items = OWN_LOSSES[name]
    torch.manual_seed(0)
    model = build()
    alone, batch = copy.deepcopy(model), batch_of("padded", 0)
    batch["labels"][:, 0] = batch["input_ids"][:, 0]
    batch["labels"][:2] = -100
    batch.pop("attention_mask")
    if count_items is not None:
        with pytest.raises(TypeError, match=r"Shifting has a loss of its own.* pass count_items="):
            parallelize(model, ParallelDims(dp=2), sgd)
    train = parallelize(model, ParallelDims(dp=2), sgd, count_items=count_items)
    mine = slice(0, 3) if rank == 0 else slice(3, None)
    loss = train.step({key: value[mine] for key, value in batch.items()})
    train.optimizer.step()
    assert float(loss) == pytest.approx(
        train_step(alone(**batch).loss, sgd(alone.parameters())), rel=1e-5
    )
    found = full_weights(train)
    for key, value in alone.state_dict().items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6, msg=key)


@in_ranks(2)
@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe"])
def test_the_routers_loss_is_not_multiplied_by_the_number_of_ranks(
    rank: int, kind: str, ep: int
) -> None:
    """https://github.com/huggingface/transformers/pull/48706 and issues/48690.

    With a dense layer among the sparse ones (issues/39203).
    """
    num = {"num_experts": 4} if kind == "Qwen3Moe" else {}
    model = make(kind, output_router_logits=True, router_aux_loss_coef=0.5, **num)
    alone, halves = copy.deepcopy(model), ids_of(0).chunk(2)
    losses = [alone(input_ids=half, labels=half).loss for half in halves]
    (sum(losses) / 2).backward()
    train = parallelize(model, ParallelDims(dp=2, ep=ep), sgd)
    loss = train.step({"input_ids": halves[rank], "labels": halves[rank]})
    torch.testing.assert_close(loss, torch.stack(losses).mean().detach())
    wanted = {name: param.grad for name, param in alone.named_parameters()}
    for name, param in train.model.named_parameters():
        num_rows = len(param)  # of stacked experts this rank's
        other = wanted[name].split(num_rows)[rank if num_rows < len(wanted[name]) else 0]
        torch.testing.assert_close(param.grad, other, rtol=1e-4, atol=1e-6)


class Adapted(nn.Module):
    """Like PEFT's wrapper."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base_model, self.config = model, model.config
        self.active_peft_config = SimpleNamespace(is_prompt_learning=False)

    def get_base_model(self) -> Any:
        return self.base_model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)


def with_peft(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    options = {"target_modules": ["q_proj"], "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(r=2, **options))


WRAPPERS: dict[str, Any] = {
    "adapter": Adapted,
    "checkpoint_wrapper": checkpoint_wrapper,
    "torch.compile": lambda model: torch.compile(model, backend="eager"),
    "PEFT": with_peft,
}


def wrapped_loss(rank: int, wrapper: str) -> float:
    train = parallelize(WRAPPERS[wrapper](make()), ParallelDims(dp=2), sgd)
    mine = {name: value.chunk(2)[rank] for name, value in batch_of("padded", 0).items()}
    before, loss = float(train.evaluate(mine)), float(train.step(mine))
    assert before == pytest.approx(loss)
    return loss


SLOW = slow("torch.compile")


@pytest.mark.parametrize("wrapper", ["adapter", "checkpoint_wrapper", SLOW, "PEFT"])
def test_a_model_in_a_wrapper(wrapper: str) -> None:
    torch.manual_seed(0)
    model = with_peft(make()) if wrapper == "PEFT" else make()
    expected = model(**batch_of("padded", 0)).loss.item()
    assert run_ranks(2, wrapped_loss, wrapper) == pytest.approx([expected] * 2, rel=1e-5)


@in_ranks(2)
def test_what_does_not_split_a_wrapped_model(rank: int) -> None:
    for dims in (ParallelDims(tp=2), ParallelDims(pp=2)):
        with pytest.raises(TypeError, match=r"Adapted of PEFT has no plan for tp . and pp .: use"):
            parallelize(Adapted(make()), dims, sgd)
    prompt = Adapted(make())
    prompt.active_peft_config.is_prompt_learning = True
    with pytest.raises(TypeError, match="adds tokens, whose labels are unknown: pass"):
        parallelize(prompt, ParallelDims(dp=2), sgd)


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"pp": 2}, {"tp": 2}, {"fsdp": 2, "dp": 1}], ids=str)
@in_ranks(2)
def test_logits_without_labels(rank: int, sizes: dict[str, Any]) -> None:
    batch = batch_of("padded", 0)
    train = parallelize(make(seed=rank), ParallelDims(**sizes), sgd)
    found = train(batch)
    batch.pop("labels")
    with torch.no_grad():
        expected = make()(**batch).logits
    seen = batch["attention_mask"] == 1
    torch.testing.assert_close(found[seen], expected[seen], rtol=1e-5, atol=1e-5)


@in_ranks(2)
def test_batches_that_cannot_be_used(rank: int) -> None:
    def refused(train: Any, text: str, *args: Any, kind: Any = ValueError) -> None:
        with pytest.raises(kind, match=re.escape(text)):
            train.step(*args)

    train = parallelize(make(), ParallelDims(dp=2), sgd)
    batch = batch_of("padded", 0)
    unlabelled = {name: value for name, value in batch.items() if name != "labels"}
    ids, labels = batch["input_ids"], batch["labels"]
    refused(train, 'no "labels", only input_ids, attention_mask: add', unlabelled)
    refused(train, 'the batch has "labels": do not pass targets', batch, labels)
    refused(train, "inputs that are tensors need targets", ids)
    refused(train, "got list", ids.tolist(), labels, kind=TypeError)
    refused(train, "takes one tensor, input_ids, or a dict", (ids, ids), labels, kind=TypeError)
    refused(train, "no labels on any rank", ids, torch.full_like(labels, -100))
    # https://github.com/unslothai/unsloth-zoo/pull/1217: after the shift no label is left.
    refused(train, "no labels on any rank", ids[:, :1], ids[:, :1])
    text = "another rank cannot use its batch" if rank else 'no "labels"'
    refused(train, text, batch if rank else unlabelled)
    split = parallelize(make(), ParallelDims(tp=2), sgd)
    refused(split, text, batch if rank else unlabelled)
    packed = batch_of("packed", 0)
    refused(train, "leave it out", {**packed, "attention_mask": torch.ones_like(ids)})
    lengths = {"input_ids": ids, "labels": labels, "cu_seq_lens_q": torch.tensor([0, 4, 12])}
    refused(train, "cu_seq_lens_q is for flash attention only", lengths)
    train.model.config._attn_implementation = "flash_attention_2"
    refused(train, "pack all sequences into one row", packed)
    train.model.config._attn_implementation = "sdpa"
    own_options: Any = {"loss_fn": own_loss, "count_items": counted}
    pipe = parallelize(make(), ParallelDims(pp=2), sgd)
    refused(pipe, "takes input_ids, attention_mask and position_ids, got", {**packed, "x": ids})
    refused(pipe, "7 rows do not divide into 4", ids[:7], labels[:7])
    own = parallelize(own_model(), ParallelDims(pp=2), sgd, **own_options)
    refused(own, "the first block of a pipeline takes a tensor", batch, kind=TypeError)
    # A TensorDataset's batches are lists.
    listed = parallelize(own_model(), ParallelDims(dp=2), sgd, **own_options)
    x, y = own_batch()
    assert listed.evaluate([x[4:]], y[4:]).equal(listed.evaluate(x[4:], y[4:]))
    # A rank without labels, and a model whose loss is float64.
    module = nn.Sequential(nn.Linear(4, 3)).double()
    double = parallelize(module, ParallelDims(dp=2), sgd, loss_fn=nn.CrossEntropyLoss())
    x, y = torch.randn(4, 4, dtype=torch.float64), torch.full((4,), rank - 100 * (1 - rank))
    assert double.evaluate(x, y).dtype == torch.float32
    assert float(train.step({**batch, "position_ids": torch.arange(LENGTH)[None]})) > 0
