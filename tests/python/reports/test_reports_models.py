"""What users of other libraries reported of tensor, pipeline and expert parallelism.

Each case is a small program of our own; its oracle is one process and plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import slow
from full_states import full_weights
from ranks import in_ranks
from steps import apply_steps, train_step
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import ringcomm.nn as rnn
from ringcomm.integrations.transformers import expert_parallelize, tensor_parallelize
from ringcomm.parallel import ParallelDims, clip_grad_norm_, expert, parallelize, pipeline, tensor

transformers = pytest.importorskip("transformers")
assert transformers.LlamaForCausalLM  # imported before ranks are forked

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
DIM = 8


def llama(kind: str = "CausalLM", seed: int = 0, **more: Any) -> Any:
    torch.manual_seed(seed)
    made = getattr(transformers, f"LlamaFor{kind}")
    return made(transformers.LlamaConfig(**{**SIZES, **more}))


def ids_of(seed: int = 1, rows: int = 3, length: int = 12) -> Tensor:
    return torch.randint(1, 61, (rows, length), generator=torch.Generator().manual_seed(seed))


def train(model: Any, num_steps: int = 2, seed: int | None = None, **more: Any) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.3), []
    if seed is not None:
        torch.manual_seed(seed)
    for step in range(num_steps):
        ids = ids_of(step)
        loss = model.train()(input_ids=ids, **{"labels": ids, **more}).loss
        losses.append(train_step(loss, optimizer))
    return losses


def check_weights(model: Any, alone: nn.Module, atol: float = 2e-5) -> None:
    found = full_weights(model)
    for name, value in alone.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(found[name].to(value.dtype), value, atol=atol, rtol=1e-3)


def check_training(model: Any, alone: Any, **more: Any) -> None:
    assert train(model, **more) == pytest.approx(train(alone, **more), abs=1e-4)
    check_weights(model, alone)


# ---- random numbers and inputs of tensor-parallel ranks


@in_ranks(2)
def test_dropout_outside_of_split_layers_has_one_mask(rank: int) -> None:
    """https://github.com/awslabs/slapo/issues/21: which dropout needs the same seed on all ranks.

    https://github.com/InternLM/InternLM/pull/405: seeds of tensor-parallel ranks differ.

    With one seed weights are those of one process, with two an error comes before a step.
    """
    options: Any = {"num_labels": 3, "classifier_dropout": 0.2}
    model, alone = tensor_parallelize(llama("TokenClassification", **options)), None
    check_labels = {"labels": ids_of(0) % 3}
    alone = llama("TokenClassification", **options)
    train(model, 1, seed=5, **check_labels)
    train(alone, 1, seed=5, **check_labels)
    check_weights(model, alone)
    with pytest.raises(ValueError, match=r"draw different random numbers.*torch\.manual_seed"):
        train(model, 1, seed=rank, **check_labels)


@in_ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_stochastic_depth(rank: int, sequence_parallel: bool) -> None:
    """https://github.com/pytorch/vision/issues/7722: ranks drop different layers.

    https://github.com/PaddlePaddle/PaddleFleetX/pull/1005: and with sharded tokens one seed is
    wrong, too.
    """
    model = tensor_parallelize(llama(), sequence_parallel=sequence_parallel)
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, __, y: y * (torch.rand(len(y), 1, 1) > 0.1) / 0.9)
    if not sequence_parallel:
        train(model, 1, seed=5)
    with pytest.raises(ValueError, match="random numbers in a Llama"):
        train(model, 1, seed=5 if sequence_parallel else rank)


@in_ranks(2)
@pytest.mark.parametrize("what", ["rows", "labels"])
def test_ranks_with_different_rows(rank: int, what: str) -> None:
    """https://github.com/Simple-Efficient/RL-Factory/pull/46: ranks work on other rows."""
    model, ids = tensor_parallelize(llama()).train(), ids_of(rank)
    with pytest.raises(ValueError, match="different input ids, labels or masks"):
        model(input_ids=ids if what == "rows" else ids_of(), labels=ids)


@pytest.mark.parametrize(
    ("world_size", "sizes", "module"),
    [(2, {"tp": 2}, "Sequential"), slow(4, {"tp": 2, "pp": 2}, "StageModule")],
)
@in_ranks()
def test_own_layers_with_dropout_between_them(rank: int, sizes: Any, module: str) -> None:
    """https://github.com/ecmwf/anemoi-core/issues/595: dropout in a model that ranks share.

    https://github.com/tenstorrent/tt-metal/issues/55947: masks of one tensor group differ.
    """
    dims = ParallelDims(**sizes)

    def block() -> nn.Module:
        where: Any = {"group": dims.group("tp")}
        layers = rnn.ColumnParallelLinear(DIM, 16, **where), rnn.RowParallelLinear(16, DIM, **where)
        return nn.Sequential(*layers, nn.Dropout(0.3))

    torch.manual_seed(0)
    model = nn.Sequential(block(), block())
    train_ = parallelize(model, dims, lambda p: torch.optim.SGD(p, 0.1), loss_fn=F.mse_loss)
    x = torch.ones(8, DIM)
    if dims.pp == 1:
        torch.manual_seed(3)
        train_.step(x, x)
    torch.manual_seed(rank)
    with pytest.raises(ValueError, match=f"draw different random numbers in a {module}"):
        train_.step(x, x)


# ---- layers of tensor parallelism


@in_ranks(2)
def test_embeddings_resized_too_late(rank: int) -> None:
    """https://github.com/deepspeedai/DeepSpeedExamples/issues/728: when to resize."""
    with pytest.raises(TypeError, match="VocabParallelEmbedding"):
        tensor_parallelize(llama()).resize_token_embeddings(70)


@in_ranks(2)
def test_labels_with_gathered_logits(rank: int) -> None:
    """https://github.com/NVIDIA/Megatron-LM/issues/7452: gathered logits change losses."""
    check_training(tensor_parallelize(llama(), gather_logits=True), llama())


@in_ranks(2)
@pytest.mark.parametrize(
    ("part", "is_late", "sequence_parallel"),
    [("o_proj", False, False), ("embed", True, True), ("norm", True, True)],
)
def test_frozen_parts(rank: int, part: str, is_late: bool, sequence_parallel: bool) -> None:
    """https://github.com/NVIDIA/Megatron-LM/pull/548: frozen parallel layers.

    https://github.com/pytorch/pytorch/pull/171709: splitting makes frozen weights trainable.
    """

    def freeze(model: nn.Module) -> None:
        for name, param in model.named_parameters():
            param.requires_grad_(part not in name)

    model, alone = llama(), llama()
    freeze(alone)
    if not is_late:
        freeze(model)
    model = tensor_parallelize(model, sequence_parallel=sequence_parallel)
    if is_late:
        freeze(model)
    check_training(model, alone)


@in_ranks(2)
def test_weights_tied_once_more(rank: int) -> None:
    """https://github.com/pytorch/torchtitan/issues/2252: tied weights come apart."""
    model = tensor_parallelize(llama(tie_word_embeddings=True))
    model.tie_weights()
    check_training(model, llama(tie_word_embeddings=True))


@in_ranks(2)
def test_outputs_that_would_be_parts(rank: int) -> None:
    """https://github.com/bytedance/Bernini/issues/66: hidden states of a part of the tokens.

    https://github.com/vllm-project/vllm/pull/39707: heads of one rank taken for all heads.
    """
    model, alone, ids = tensor_parallelize(llama()).eval(), llama().eval(), ids_of()
    found, wanted = (m(input_ids=ids, output_hidden_states=True) for m in (model, alone))
    torch.testing.assert_close(found.hidden_states, wanted.hidden_states, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="output_attentions would return"):
        model(input_ids=ids, output_attentions=True)
    model = tensor_parallelize(llama(), sequence_parallel=True).eval()
    with pytest.raises(ValueError, match="output_hidden_states would return"):
        model(input_ids=ids, output_hidden_states=True)
    alone, model = (llama(attn_implementation="eager").eval() for _ in range(2))
    model = tensor_parallelize(model, dist.new_subgroups(1)[0])  # whose parts are whole
    found, wanted = (m(input_ids=ids, output_attentions=True) for m in (model, alone))
    torch.testing.assert_close(found.attentions, wanted.attentions)


class Adapter(nn.Module):
    """Low-rank weights beside a layer."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        self.a = nn.Linear(32, 2, bias=False)
        self.b = nn.Parameter(torch.zeros(len(layer.weight), 2))

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) + F.linear(self.a(x), self.b)


@in_ranks(2)
def test_adapters_added_to_split_layers(rank: int) -> None:
    """https://github.com/modelscope/mcore-bridge/pull/173: adapters whose gradients nobody sums."""
    model = tensor_parallelize(llama())
    attention = model.model.layers[0].self_attn
    attention.q_proj = adapter = Adapter(attention.q_proj)
    with pytest.raises(ValueError, match=r"q_proj, a Adapter, was added after tensor_parallelize"):
        train(model, 1)
    adapter.requires_grad_(False)
    train(model, 1)


@in_ranks(2)
@pytest.mark.parametrize("how", ["full_tensor", "without labels"])
def test_distillation_beside_the_loss(rank: int, how: str) -> None:
    """https://github.com/NVIDIA-NeMo/Automodel/pull/1499: a divergence of split logits."""
    teacher, ids, models = llama(seed=7), ids_of(), (tensor_parallelize(llama()), llama())
    with torch.no_grad():
        wanted = teacher(input_ids=ids).logits.log_softmax(-1)
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), 0.3)
        output = model(input_ids=ids, labels=ids)
        logits = output.logits if how == "full_tensor" else model(input_ids=ids).logits
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        divergence = F.kl_div(logits.log_softmax(-1), wanted, log_target=True, reduction="sum")
        (output.loss + 0.1 * divergence).backward()
        optimizer.step()
    check_weights(*models)


@in_ranks(2)
def test_a_projection_of_which_a_part_bypasses_the_split_layer(rank: int) -> None:
    """https://github.com/pytorch/torchtitan/pull/1373: the gradient of rotary keys of one rank."""

    def run(down: nn.Linear, up: Any, scale: Tensor, enter: Callable[[Tensor], Tensor]) -> Tensor:
        inner, beside = down(torch.ones(3, DIM)).split([4, 4], -1)
        return (up(inner).unflatten(-1, (-1, 4)) * scale[:, None] * enter(beside)[:, None]).sum()

    torch.manual_seed(0)
    down, whole, scale = nn.Linear(DIM, 8), nn.Linear(4, 16), torch.arange(4.0)
    run(down, whole, scale, lambda x: x).backward()
    wanted, down.weight.grad = down.weight.grad, None
    up = rnn.ColumnParallelLinear.from_linear(whole)
    run(down, up, scale[2 * rank : 2 * rank + 2], tensor.copy_to_tp).backward()
    torch.testing.assert_close(down.weight.grad, wanted)


@in_ranks(2)
def test_gradients_that_are_not_contiguous(rank: int) -> None:
    """https://github.com/NVIDIA/Megatron-LM/issues/5337: a sum that stays in a copy."""
    x = torch.ones(3, 4, requires_grad=True)
    tensor.copy_to_tp(x).t().mul(torch.full((4, 3), rank + 1.0)).sum().backward()
    assert x.grad is not None
    assert x.grad.eq(3).all()
    y = tensor.reduce_from_tp(torch.full((4, 3), rank + 1.0).t())
    assert y.eq(3).all()


@in_ranks(2)
def test_averages_of_weights(rank: int) -> None:
    """https://github.com/NCAR/miles-credit/issues/414: averaged weights in an evaluation."""
    losses = []
    models = tensor_parallelize(llama(), sequence_parallel=True), llama()
    for model in models:
        mean = {name: param.detach().clone() for name, param in model.named_parameters()}
        train(model, 1)
        own = {name: param.data for name, param in model.named_parameters()}
        for name, param in model.named_parameters():
            param.data = mean[name].lerp_(param.detach(), 0.5)
        with torch.no_grad():
            losses.append(float(model.eval()(input_ids=ids_of(), labels=ids_of()).loss))
        for name, param in model.named_parameters():
            param.data = own[name]
        train(model, 1)
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    check_weights(*models)


@in_ranks(2)
@pytest.mark.slow
def test_a_compiled_model_with_labels(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/117042: Dynamo and the mesh of split logits."""
    model, alone = tensor_parallelize(llama()), llama()
    compiled = torch.compile(model, backend="aot_eager")
    assert train(compiled) == pytest.approx(train(alone), abs=1e-4)
    check_weights(model, alone)


@in_ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"do_sample": True, "num_return_sequences": 2},
        {"cache_implementation": "static"},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 3},
    ],
    ids=["beams", "samples", "static", "processors"],
)
def test_generation_of_padded_rows(rank: int, options: dict[str, Any]) -> None:
    """https://github.com/huggingface/transformers/issues/47651: rows padded at the left.

    https://github.com/huggingface/transformers/pull/39164: a static cache of all heads.
    """
    ids, tokens = ids_of(), []
    mask = torch.ones_like(ids)
    mask[1, :5] = mask[2, :2] = 0
    given = {"attention_mask": mask, "max_new_tokens": 5, "pad_token_id": 0, "do_sample": False}
    for model in (tensor_parallelize(llama()), llama()):
        torch.manual_seed(5)
        tokens.append(model.eval().generate(ids, **{**given, **options}))
    assert torch.equal(*tokens)


@in_ranks(2)
def test_assisted_generation(rank: int) -> None:
    """https://github.com/vllm-project/vllm/pull/4808: a draft model on several ranks."""
    model, draft = (tensor_parallelize(llama(seed=seed)).eval() for seed in (0, 3))
    given = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    found = model.generate(ids_of(rows=1), assistant_model=draft, **given)
    assert torch.equal(found, llama().eval().generate(ids_of(rows=1), **given))


# ---- pipelines


class Twice(nn.Module):
    """A weight before and after another one, and beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.outer(self.inner(self.outer(x).tanh()).tanh())
        return y + self.inner(x)


class Pair(nn.Module):
    """Returns a second tensor that the next block does not use."""

    def __init__(self, is_last: bool = False) -> None:
        super().__init__()
        self.linear, self.is_last = nn.Linear(DIM, DIM), is_last

    def forward(self, x: Tensor, _: Tensor | None = None) -> Any:
        y = self.linear(x).tanh()
        return y if self.is_last else (y, y * 2)


class Writes(nn.Module):
    """Writes into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x.relu_())


def linears() -> list[nn.Module]:
    return [nn.Linear(DIM, DIM) for _ in range(6)]


def frozen_start() -> list[nn.Module]:
    made = linears()
    for block in made[:4]:
        block.requires_grad_(False)
    return made


BLOCKS: dict[str, Callable[[], list[nn.Module]]] = {
    "shared": lambda: [Twice() for _ in range(5)],
    "unused": lambda: [*(Pair() for _ in range(4)), Pair(is_last=True)],
    "in place": lambda: [nn.Linear(DIM, DIM), *(Writes() for _ in range(4))],
    "frozen": frozen_start,
}


def run_blocks(blocks: Any, x: Tensor) -> Any:
    value: Any = x
    for block in blocks:
        value = block(*value) if isinstance(value, tuple) else block(value)
    return value


SCHEDULES = ("1f1b", "zero-bubble", "zbv")


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        # https://github.com/pytorch/pytorch/pull/181365: split backward passes and shared weights.
        *(("shared", schedule) for schedule in SCHEDULES),
        # https://github.com/pytorch/pytorch/issues/152827: an input that a stage does not use.
        *(("unused", schedule) for schedule in SCHEDULES),
        # https://github.com/pytorch/pytorch/issues/727: in-place operations on leaves. A stage's
        # input is a leaf, which in one process it is not.
        *(("in place", schedule) for schedule in ("gpipe", "interleaved", "zbv")),
        # https://github.com/pytorch/pytorch/issues/162822: stages without a backward pass.
        *(("evaluated", schedule) for schedule in ("1f1b", "zbv")),
        # https://github.com/pytorch/torchtitan/issues/1733: earlier gradients are scaled again.
        ("two batches", "1f1b"),
        # https://github.com/deepspeedai/DeepSpeed/issues/3895: messages that need no gradient.
        *(("frozen", schedule) for schedule in ("1f1b", "zero-bubble")),
    ],
)
@in_ranks(2)
def test_pipelines(rank: int, kind: str, schedule: str) -> None:
    """As one process that runs the same micro-batches."""
    make, every = BLOCKS.get(kind, linears), 2 if kind == "two batches" else 1
    torch.manual_seed(0)
    alone = nn.Sequential(*make())
    torch.manual_seed(0)
    pipe = pipeline.Pipeline(make(), F.mse_loss, schedule, num_microbatches=4)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (alone, pipe)]
    batches = torch.randn(4, 2, 8, DIM, generator=torch.Generator().manual_seed(1))
    if kind == "evaluated":
        pipe.evaluate(batches[0, 0], batches[0, 0])
        pipe.forward(batches[0, 0, :4])
    for idx, (x, target) in enumerate(batches):
        total = 0.0
        for part, wanted in zip(x.chunk(4), target.chunk(4), strict=True):
            loss = F.mse_loss(run_blocks(alone, part.clone()), wanted) / 4
            loss.backward()
            total += float(loss.detach())
        assert float(pipe.step(x.clone(), target)) == pytest.approx(total, abs=1e-5)
        apply_steps(*optimizers if idx % every == every - 1 else ())
    check_weights(pipe, alone)


@in_ranks(2)
def test_dropout_that_is_recomputed(rank: int) -> None:
    """https://github.com/allenai/OLMo-core/pull/828: other masks in the recomputation."""
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.5)) for _ in range(4)]
        options: dict[str, Any] = {"num_microbatches": 4, "recompute": recompute}
        pipe = pipeline.Pipeline(blocks, F.mse_loss, **options)
        torch.manual_seed(rank)
        loss = pipe.step(torch.ones(8, DIM), torch.ones(8, DIM))
        found.append([loss, *(param.grad for param in pipe.parameters())])
    torch.testing.assert_close(*found)


def own_group() -> dist.ProcessGroup:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    made = groups[dist.get_rank()]
    assert isinstance(made, dist.ProcessGroup)
    return made


def layer(group: dist.ProcessGroup | None = None) -> rnn.MixtureOfExperts:
    torch.manual_seed(0)
    return rnn.MixtureOfExperts(DIM, lambda: nn.Linear(DIM, DIM), 4, 2, group=group)


@in_ranks(2)
@pytest.mark.parametrize("kind", ["all", "no tokens", "two experts", "router", "experts", "again"])
def test_gradients_of_experts(rank: int, kind: str) -> None:
    """https://github.com/pytorch/pytorch/issues/160285: gradients of experts are twice as large.

    https://github.com/huggingface/transformers/pull/48205: a rank's part of a router's gradient.
    https://github.com/NVIDIA-NeMo/Automodel/pull/3680: a rank without tokens, or experts without.
    https://github.com/NVIDIA-NeMo/Automodel/pull/2635: a layer that is recomputed.
    https://github.com/NVIDIA/Megatron-LM/pull/5916: experts that the norm leaves out.
    """
    model, alone = layer(), layer(own_group())
    num_tokens = [6, 0] if kind == "no tokens" else [6, 4]
    for made in (model, alone):
        if kind in ("router", "experts"):
            getattr(made, kind).requires_grad_(False)
        if kind == "two experts":
            nn.init.zeros_(made.router.weight)

    def loss_of(made: rnn.MixtureOfExperts, source: int) -> Tensor:
        x = torch.randn(num_tokens[source], DIM, generator=torch.Generator().manual_seed(source))
        y = made(x)
        if kind == "again":
            y = torch.utils.checkpoint.checkpoint(made, x, use_reentrant=False)
        assert made.routing is not None
        loss: Tensor = y.square().sum() / 10
        return loss + 0.3 * made.routing.load_balancing_loss

    for source in range(2):
        (loss_of(alone, source) / 2).backward()
    loss_of(model, rank).backward()
    expert.average_gradients(model)
    norm = float(nn.utils.clip_grad_norm_(alone.parameters(), 0.1))
    assert float(clip_grad_norm_(model, 0.1)) == pytest.approx(norm, rel=1e-4)
    for made in (model, alone):
        torch.optim.SGD(made.parameters(), 0.3).step()
    check_weights(model, alone)


@in_ranks(2)
def test_ranks_that_generate_different_numbers_of_tokens(rank: int) -> None:
    """https://github.com/NVIDIA/Megatron-LM/pull/2470: ranks without work wait for experts."""

    def build() -> Any:
        torch.manual_seed(0)
        config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
        return transformers.MixtralForCausalLM(config).eval()

    given = {"max_new_tokens": 2 + 3 * rank, "do_sample": False, "pad_token_id": 0}
    found = expert_parallelize(build()).generate(ids_of(rank), synced_gpus=True, **given)
    assert torch.equal(found, build().generate(ids_of(rank), **given))


# ---- torch's own tensor parallelism


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(13, 10), nn.LayerNorm(10)
        self.up, self.down = nn.Linear(10, 14), nn.Linear(14, 10)
        self.out = nn.Linear(10, 13, bias=False)

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        return self.out(x + self.down(F.gelu(self.up(self.norm(x)))))


def split_by_torch(mesh: Any) -> nn.Module:
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "out": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    return parallelize_module(Net(), mesh, plan)


@in_ranks(2)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_parallel_with_ignored_labels(rank: int, reduction: str) -> None:
    """https://github.com/pytorch/pytorch/issues/190746: losses over split classes, uneven here."""
    model, alone = split_by_torch(init_device_mesh("cpu", (2,))), Net()
    ids = torch.arange(15).view(3, 5) % 13
    labels = ids.flatten().masked_fill(torch.arange(15) < 4, -100)
    with loss_parallel():
        F.cross_entropy(model(ids).flatten(0, 1), labels, reduction=reduction).backward()
    F.cross_entropy(alone(ids).flatten(0, 1), labels, reduction=reduction).backward()
    for made in (model, alone):
        torch.optim.SGD(made.parameters(), 0.1).step()
    check_weights(model, alone)


@in_ranks([2, 3])
def test_shards_of_different_sizes(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/103306: a DTensor grows when it is gathered."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for num_rows in (1, 2, 5, 7):
        whole = torch.arange(num_rows * 3.0).view(num_rows, 3)
        for placement in (Shard(0), Shard(1), Replicate()):
            for other in (Shard(0), Shard(1), Replicate()):
                placed = distribute_tensor(whole, mesh, [placement]).redistribute(mesh, [other])
                assert torch.equal(placed.full_tensor(), whole)
            total = DTensor.from_local(whole, mesh, [Partial()]).redistribute(mesh, [placement])
            assert torch.equal(total.full_tensor(), whole * mesh.size())


@in_ranks(4)
@pytest.mark.slow
def test_the_norm_of_torchs_shards_on_two_meshes(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/180346: gradients on different meshes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, alone = split_by_torch(mesh["tp"]), Net()
    fully_shard(model, mesh=mesh["dp"])
    rows = [torch.arange(12).view(3, 4) % (13 - source) for source in range(2)]
    ids = rows[mesh["dp"].get_local_rank()]
    with loss_parallel():
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    for source in rows:
        (F.cross_entropy(alone(source).flatten(0, 1), source.flatten()) / 2).backward()
    norm = float(nn.utils.clip_grad_norm_(alone.parameters(), 0.5))
    assert float(clip_grad_norm_(model, 0.5)) == pytest.approx(norm, rel=1e-4)
    for made in (model, alone):
        torch.optim.SGD(made.parameters(), 0.1).step()
    check_weights(model, alone)
