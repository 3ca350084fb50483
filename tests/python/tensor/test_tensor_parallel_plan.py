"""Models of transformers, split by their plans: the training of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import quick
from full_states import full_weights, load_full_weights
from ranks import in_ranks, run_ranks
from steps import apply_steps, train_step
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from zero_models import assert_alike

from ringcomm.integrations.transformers import patch_loss, tensor_parallelize
from ringcomm.parallel import clip_grad_norm_

transformers = pytest.importorskip("transformers")
assert transformers.LlamaForCausalLM  # imported before ranks are forked

BATCH, LENGTH, STEPS, LR, DIM, LAYERS = 2, 12, 3, 0.3, 48, 2
SIZES = {
    "vocab_size": 67,  # divides by no number of ranks
    "hidden_size": DIM,
    "intermediate_size": 50,
    "num_hidden_layers": LAYERS,
    "attn_implementation": "sdpa",
}
# Kind, query heads, key and value heads, options besides.
MODELS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "multi-head": ("Llama", 4, 4, {"attention_bias": True, "mlp_bias": True}),
    "grouped": ("Llama", 6, 3, {}),
    "grouped, tied": ("Llama", 8, 2, {"tie_word_embeddings": True}),
    "multi-query": ("Llama", 12, 1, {}),
    "normed heads": ("Qwen3", 4, 2, {"head_dim": 8}),
}


def make(name: str, **more: Any) -> Any:
    kind, num_heads, num_kv_heads, options = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        num_attention_heads=num_heads, num_key_value_heads=num_kv_heads, **SIZES, **options, **more
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # transformers begins with biases of 0 and norms of 1
        for param in model.parameters():
            param.add_(0.1 * torch.randn(param.shape))
    return model


def batch(step: int) -> dict[str, Tensor]:
    ids = torch.randint(67, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


def torch_clip(model: nn.Module, max_norm: float) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def train(model: Any) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), LR)
    losses = []
    for step in range(STEPS):
        loss = model(**batch(step)).loss
        loss.backward()
        norm = (clip_grad_norm_ if hasattr(model.lm_head, "splits") else torch_clip)(model, 1.0)
        apply_steps(optimizer)
        losses += [float(loss.detach()), float(norm)]
    return losses


@pytest.mark.parametrize(
    ("name", "world_size", "is_sequence_split"),
    [
        ("multi-head", 3, False),
        ("grouped", 3, True),
        ("grouped, tied", 4, False),
        ("multi-query", 4, True),
        ("normed heads", 4, False),
    ],
)
@in_ranks()
def test_the_training_of_one_process(rank: int, name: str, is_sequence_split: bool) -> None:
    model, alone = tensor_parallelize(make(name), sequence_parallel=is_sequence_split), make(name)
    losses, expected = train(model), train(alone)
    assert_alike({"losses": torch.tensor(losses, dtype=torch.float64)})
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(full_weights(model), dict(alone.state_dict()), rtol=0, atol=5e-6)
    num_elems = [sum(param.numel() for param in each.parameters()) for each in (model, alone)]
    assert num_elems[0] < num_elems[1]


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="aot_eager")


def frozen(part: str) -> Any:
    def freeze(model: Any) -> Any:
        for name, param in model.named_parameters():
            param.requires_grad_(part not in name)
        return model

    return freeze


def tied_again(model: Any) -> Any:
    model.tie_weights()
    return model


SPLIT: dict[str, Any] = {"sequence_parallel": True}
# The model, how it is split, and what is done to both before that or after it.
VARIANTS: dict[str, tuple[str, dict[str, Any], Any, Any]] = {
    # https://github.com/NVIDIA/Megatron-LM/issues/7452: gathered logits change losses.
    "gathered logits": ("multi-head", {"gather_logits": True}, None, None),
    # https://github.com/NVIDIA/Megatron-LM/pull/548: frozen parallel layers.
    # https://github.com/pytorch/pytorch/pull/171709: splitting makes frozen weights trainable.
    "frozen layer": ("multi-head", {}, frozen("o_proj"), None),
    "frozen embedding": ("multi-head", SPLIT, None, frozen("embed")),
    "frozen norms": ("multi-head", SPLIT, None, frozen("norm")),
    # https://github.com/pytorch/torchtitan/issues/2252: tied weights come apart.
    "tied once more": ("grouped, tied", {}, None, tied_again),
    # https://github.com/pytorch/pytorch/issues/117042: Dynamo and the mesh of split logits.
    "compiled": ("multi-head", {}, None, compiled),
}


@pytest.mark.parametrize("name", quick(VARIANTS, *(n for n in VARIANTS if n != "compiled")))
@in_ranks(2)
def test_variants_train_as_one_process(rank: int, name: str) -> None:
    kind, options, before, after = VARIANTS[name]
    models: list[Any] = [make(kind), make(kind)]
    if before is not None:
        models = [before(model) for model in models]
    model, alone = tensor_parallelize(models[0], **options), models[1]
    changed = (model, alone) if after is None else (after(model), after(alone))
    losses, expected = map(train, changed)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(full_weights(model), dict(alone.state_dict()), rtol=0, atol=5e-6)


@in_ranks(2)
def test_averages_of_weights(rank: int) -> None:
    """https://github.com/NCAR/miles-credit/issues/414: averaged weights in an evaluation."""
    losses = []
    models = tensor_parallelize(make("multi-head"), **SPLIT), make("multi-head")
    for model in models:
        mean = {name: param.detach().clone() for name, param in model.named_parameters()}
        train(model)
        own = {name: param.data for name, param in model.named_parameters()}
        for name, param in model.named_parameters():
            param.data = mean[name].lerp_(param.detach(), 0.5)
        with torch.no_grad():
            losses.append(float(model.eval()(**batch(0)).loss))
        for name, param in model.named_parameters():
            param.data = own[name]
        train(model.train())
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    weights = full_weights(models[0])
    torch.testing.assert_close(weights, dict(models[1].state_dict()), rtol=0, atol=1e-5)


class Adapter(nn.Module):
    """Low-rank weights beside a layer."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        self.a = nn.Linear(DIM, 2, bias=False)
        self.b = nn.Parameter(torch.zeros(len(layer.weight), 2))

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) + nn.functional.linear(self.a(x), self.b)


@in_ranks(2)
def test_adapters_added_to_split_layers(rank: int) -> None:
    """https://github.com/modelscope/mcore-bridge/pull/173: adapters whose gradients nobody sums."""
    model = tensor_parallelize(make("multi-head"))
    attention = model.model.layers[0].self_attn
    attention.q_proj = adapter = Adapter(attention.q_proj)
    with pytest.raises(ValueError, match=r"q_proj, a Adapter, was added after tensor_parallelize"):
        train(model)
    adapter.requires_grad_(False)
    train(model)


@pytest.mark.parametrize("has_labels", [True, False])
@in_ranks(2)
def test_distillation_beside_the_loss(rank: int, has_labels: bool) -> None:
    """https://github.com/NVIDIA-NeMo/Automodel/pull/1499: a divergence of split logits."""
    models, given = (tensor_parallelize(make("multi-head")), make("multi-head")), batch(0)
    with torch.no_grad():
        wanted = make("grouped")(**given).logits.log_softmax(-1)
    for model in models:
        optimizer, output = torch.optim.SGD(model.parameters(), LR), model(**given)
        logits = output.logits if has_labels else model(input_ids=given["input_ids"]).logits
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        divergence = nn.functional.kl_div(logits.log_softmax(-1), wanted, log_target=True)
        train_step(output.loss + divergence, optimizer)
    weights = full_weights(models[0])
    torch.testing.assert_close(weights, dict(models[1].state_dict()), rtol=0, atol=5e-6)


# ---- random numbers and inputs of tensor-parallel ranks


def one_step(model: Any, seed: int) -> None:
    torch.manual_seed(seed)
    labels = batch(0)["input_ids"]
    loss = model.train()(input_ids=labels, labels=labels % model.config.num_labels).loss
    train_step(loss, torch.optim.SGD(model.parameters(), LR))


@in_ranks(2)
def test_dropout_outside_of_split_layers_has_one_mask(rank: int) -> None:
    """https://github.com/awslabs/slapo/issues/21: which dropout needs the same seed on all ranks.

    https://github.com/InternLM/InternLM/pull/405: seeds of tensor-parallel ranks differ.

    With one seed weights are those of one process, with two an error comes before a step.
    """
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        config = make("multi-head", num_labels=3, classifier_dropout=0.2).config
        models.append(transformers.LlamaForTokenClassification(config))
    model, alone = tensor_parallelize(models[0]), models[1]
    for each in (model, alone):
        one_step(each, 5)
    weights = full_weights(model)
    torch.testing.assert_close(weights, dict(alone.state_dict()), rtol=0, atol=5e-6)
    with pytest.raises(ValueError, match=r"draw different random numbers.*torch\.manual_seed"):
        one_step(model, rank)


@pytest.mark.parametrize("is_sequence_split", [False, True])
@in_ranks(2)
def test_stochastic_depth(rank: int, is_sequence_split: bool) -> None:
    """https://github.com/pytorch/vision/issues/7722: ranks drop different layers.

    https://github.com/PaddlePaddle/PaddleFleetX/pull/1005: and with sharded tokens one seed is
    wrong, too.
    """
    model = tensor_parallelize(make("multi-head"), sequence_parallel=is_sequence_split)
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, __, y: y * (torch.rand(len(y), 1, 1) > 0.1) / 0.9)
    if not is_sequence_split:
        one_step(model, 5)
    with pytest.raises(ValueError, match="random numbers in a Llama"):
        one_step(model, 5 if is_sequence_split else rank)


# Families of transformers, and whether they are refused: always, or with sequence parallelism.
FAMILIES = {
    **dict.fromkeys(("mistral", "phi", "gpt_neox", "gemma", "gemma2", "gemma3_text"), "never"),
    **dict.fromkeys(("cohere2", "starcoder2", "granite", "smollm3"), "never"),
    "nanochat": "tokens",  # a norm before the layers, too
    **dict.fromkeys(("mixtral", "qwen3_moe"), "tokens"),  # experts on all ranks
    **dict.fromkeys(("phi3", "olmo2"), "always"),
}


for _kind in FAMILIES:  # imported before ranks are forked
    assert transformers.models.auto.configuration_auto.CONFIG_MAPPING[_kind]
    _of = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[_kind]
    assert getattr(transformers, _of)


def make_family(kind: str) -> Any:
    torch.manual_seed(0)
    sizes = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes |= dict.fromkeys(("attn_implementation", "experts_implementation"), "eager")
    token_ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    dropouts = dict.fromkeys(("residual_dropout", "embedding_dropout", "attention_dropout"), 0.0)
    config = transformers.AutoConfig.for_model(kind, **sizes, **token_ids, **dropouts)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn(param.shape))
    return model


def loss_and_squares(model: Any, grads_of: Any) -> tuple[float, float]:
    """The loss, and the norm of its gradient by torch or over the ranks."""
    loss = model(**batch(0)).loss
    loss.backward()
    return float(loss.detach()), float(grads_of(model, 1.0))


def looks_of(model: Any) -> Any:
    """What a refusal must leave as it was."""
    modules = [
        (name, type(module), len(module._forward_pre_hooks), len(module._forward_hooks))
        for name, module in model.named_modules()
    ]
    params = [(name, id(p), p._version, p._backward_hooks) for name, p in model.named_parameters()]
    return modules, params, model.loss_function


def split_families(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind, refused in FAMILIES.items():
        for is_sequence_split in (False, True):
            model = make_family(kind)
            if refused == "always" or (refused == "tokens" and is_sequence_split):
                before = looks_of(model)
                with pytest.raises(ValueError, match=r"not supported|sequence_parallel needs"):
                    tensor_parallelize(model, sequence_parallel=is_sequence_split)
                assert looks_of(model) == before, kind
                continue
            tensor_parallelize(model, sequence_parallel=is_sequence_split)
            found[f"{kind} {is_sequence_split}"] = loss_and_squares(model, clip_grad_norm_)
    return found


def test_families_equal_one_process_or_are_refused_unchanged() -> None:
    expected = {
        kind: loss_and_squares(make_family(kind), torch_clip)
        for kind, refused in FAMILIES.items()
        if refused != "always"
    }
    for found in run_ranks(2, split_families, timeout_s=120):
        assert {key.split()[0] for key in found} == expected.keys()
        for key, value in found.items():
            assert value == pytest.approx(expected[key.split()[0]], rel=2e-5), key


@in_ranks(4)
def test_a_model_that_no_rank_ever_has_whole(rank: int) -> None:
    """Frozen on the meta device when it is split; thawed, loaded, and trained with checkpoints.

    Sums of the gradients of norms, copied heads and biases survive all of that.
    """
    alone = make("normed heads", attention_bias=True)
    state = {name: value.clone() for name, value in alone.state_dict().items()}
    expected = train(alone)
    with torch.device("meta"):
        model = make("normed heads", attention_bias=True).requires_grad_(False)
    tensor_parallelize(model, sequence_parallel=True).requires_grad_(True)
    load_full_weights(model, state)
    with pytest.raises(ValueError, match=r"rotary_emb\.inv_freq is a buffer on the meta device"):
        model(**batch(0))
    model.model.rotary_emb = make("normed heads").model.rotary_emb  # no part of checkpoints
    patch_loss(model, inplace=True)
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(train(model.train()), expected, rtol=1e-5, atol=1e-5)


@in_ranks(4)
def test_what_cannot_be_split(rank: int) -> None:
    """https://github.com/pytorch/torchtitan/issues/1306: a length that ranks do not divide.

    https://github.com/NVIDIA/Fuser/issues/3123: heads on each rank need dropout masks of their own.
    """
    model = make("grouped")
    with pytest.raises(ValueError, match="4 ranks cannot split 6 query heads with 3 key and value"):
        tensor_parallelize(model)
    assert isinstance(model.lm_head, nn.Linear)  # as it was
    with pytest.raises(TypeError, match="Linear is not a model of transformers"):
        tensor_parallelize(nn.Linear(2, 2))
    model = tensor_parallelize(make("multi-head"), sequence_parallel=True)
    with pytest.raises(ValueError, match="already tensor-parallel"):
        tensor_parallelize(model)
    with pytest.raises(ValueError, match="needs input_ids"):
        model(inputs_embeds=torch.zeros(1, 4, DIM))
    with pytest.raises(ValueError, match="4 ranks cannot split 6 tokens evenly: pad the seq"):
        model(input_ids=torch.zeros(1, 6, dtype=torch.long))
    odd = make("multi-head")
    odd.model.layers[0].mlp.extra = nn.Linear(DIM, DIM)
    with pytest.raises(ValueError, match="extra of a LlamaMLP is not in the model's plan"):
        tensor_parallelize(odd)
    strange: Any = make("multi-head")
    strange.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"layers.1.mlp.up_proj, a Linear, does not compute"):
        tensor_parallelize(strange)
    strange = make("multi-head")
    strange.model.embed_tokens.forward = lambda ids: ids
    with pytest.raises(ValueError, match="the embedding, a Embedding, does not compute"):
        tensor_parallelize(strange)
    dropping = tensor_parallelize(make("multi-head", attention_dropout=0.1)).train()
    with pytest.raises(ValueError, match=r"self_attn has a dropout of 0\.1, but the"):
        dropping(**batch(0))
    dropping.eval()(**batch(0))


@in_ranks(2)
def test_calls_that_are_refused(rank: int) -> None:
    """https://github.com/Simple-Efficient/RL-Factory/pull/46: ranks work on other rows.

    https://github.com/deepspeedai/DeepSpeedExamples/issues/728: when to resize.
    """
    model = tensor_parallelize(make("multi-head"))
    ids, others = batch(0)["input_ids"], batch(rank)["input_ids"]
    for rows in (ids, others):
        with pytest.raises(ValueError, match="different input ids, labels or masks"):
            model(input_ids=rows, labels=others)
    with pytest.raises(TypeError, match="VocabParallelEmbedding"):
        model.resize_token_embeddings(70)


@in_ranks(2)
def test_outputs_that_would_be_parts(rank: int) -> None:
    """https://github.com/bytedance/Bernini/issues/66: hidden states of a part of the tokens.

    https://github.com/vllm-project/vllm/pull/39707: heads of one rank taken for all heads.
    """
    model, alone = tensor_parallelize(make("multi-head")).eval(), make("multi-head").eval()
    ids = batch(0)["input_ids"]
    found, wanted = (m(input_ids=ids, output_hidden_states=True) for m in (model, alone))
    torch.testing.assert_close(found.hidden_states, wanted.hidden_states, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="output_attentions would return"):
        model(input_ids=ids, output_attentions=True)
    model = tensor_parallelize(make("multi-head"), **SPLIT).eval()
    with pytest.raises(ValueError, match="output_hidden_states would return"):
        model(input_ids=ids, output_hidden_states=True)
    alone, model = (make("multi-head").eval() for _ in range(2))
    for each in (alone, model):
        each.set_attn_implementation("eager")
    model = tensor_parallelize(model, dist.new_subgroups(1)[0])  # whose parts are whole
    found, wanted = (m(input_ids=ids, output_attentions=True) for m in (model, alone))
    torch.testing.assert_close(found.attentions, wanted.attentions)
