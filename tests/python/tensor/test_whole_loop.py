"""What users do between the steps of a tensor-parallel model: generate, evaluate, save and load."""

from __future__ import annotations

import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import slow
from ranks import in_ranks, run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict as get_by_torch
from torch.distributed.tensor import DTensor, Replicate
from torch.testing import assert_close

from ringcomm import ops
from ringcomm.integrations.transformers import tensor_parallelize
from ringcomm.nn import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from ringcomm.parallel import ParallelDims, get_state_dict, parallelize

transformers = pytest.importorskip("transformers")

VOCAB = 66  # 17, 17, 17 and 15 on four ranks, as torch.chunk has it
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,  # each on two of four ranks
    "head_dim": 12,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 4},
    "mixtral": {"num_local_experts": 2, "intermediate_size": 52},
    "phi": {},
    "gemma": {},
    "gemma2": {},  # whose logits pass a softcap
}
for _kind in KINDS:  # imported before ranks are forked
    assert transformers.models.auto.configuration_auto.CONFIG_MAPPING[_kind]
    _of = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[_kind]
    assert getattr(transformers, _of)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "without a cache": {"do_sample": False, "use_cache": False},
    "beams": {"do_sample": False, "num_beams": 2},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 20, "num_return_sequences": 2},
}
PADDED = {"do_sample": False, "attention_mask": torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])}
# Of one kind, and of rows that are padded at the left.
# https://github.com/huggingface/transformers/issues/47651: such rows.
# https://github.com/huggingface/transformers/pull/39164: a static cache of all heads.
MORE_WAYS: dict[str, dict[str, Any]] = {
    "padded": PADDED,
    "padded beams": {**PADDED, "num_beams": 3},
    "padded samples": {**PADDED, "do_sample": True, "num_return_sequences": 2},
    "static": {**PADDED, "cache_implementation": "static"},
    "processors": {
        **PADDED,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "min_new_tokens": 3,
    },
}


def make(kind: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind]})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn(param.shape))
        for name, buffer in model.named_buffers():
            if name.endswith("inv_freq"):  # random features have such buffers, too
                buffer.mul_(1 + 0.1 * torch.rand(()))
    return model


def ids_of(num_tokens: int) -> Tensor:
    return torch.randint(3, VOCAB, (2, num_tokens), generator=torch.Generator().manual_seed(5))


def spoken(model: Any) -> dict[str, Any]:
    """Tokens, and the logits of a forward pass without labels, also as a tuple."""
    found: dict[str, Any] = {}
    is_llama = model.config.model_type == "llama"
    for way, options in (WAYS | MORE_WAYS if is_llama else WAYS).items():
        torch.manual_seed(3)
        found[way] = model.generate(ids_of(4), max_new_tokens=4, **options)
    with torch.no_grad():
        found["logits"] = model(input_ids=ids_of(7)).logits
        found["tuple"] = model(input_ids=ids_of(7), return_dict=False)[0]
    return found


@pytest.mark.parametrize("world_size", [2, slow(4)])
@pytest.mark.parametrize("kind", KINDS)
@in_ranks()
def test_generates_the_tokens_of_one_process(rank: int, kind: str, world_size: int) -> None:
    """Of the model of rank 0: the other ranks come with different weights and buffers."""
    expected, model = spoken(make(kind)), make(kind, rank)
    if kind in ("mixtral", "qwen3"):
        model = parallelize(model, ParallelDims(tp=world_size), torch.optim.AdamW).model
    else:
        model = tensor_parallelize(model, gather_logits=kind == "phi")
    found = spoken(model)
    assert_close(found.pop("logits"), expected["logits"], rtol=1e-4, atol=1e-4)
    assert_close(found.pop("tuple"), expected["logits"], rtol=1e-4, atol=1e-4)
    for way, tokens in found.items():
        assert torch.equal(tokens, expected[way]), way


@in_ranks(2)
def test_assisted_generation(rank: int) -> None:
    """https://github.com/vllm-project/vllm/pull/4808: a draft model on several ranks."""
    model, draft = (tensor_parallelize(make("llama", seed)) for seed in (0, 3))
    given = {"max_new_tokens": 6, "do_sample": False}
    found = model.generate(ids_of(4)[:1], assistant_model=draft, **given)
    assert torch.equal(found, make("llama").generate(ids_of(4)[:1], **given))


@in_ranks(2)
def test_logits_have_the_type_of_what_they_are(rank: int) -> None:
    ids, whole = ids_of(7), make("gemma2")
    expected = whole(input_ids=ids, labels=ids)
    model = tensor_parallelize(make("gemma2"))
    output = model(input_ids=ids, labels=ids)
    assert isinstance(output.logits, DTensor)
    assert output.logits.shape == expected.logits.shape
    assert_close(output.logits.full_tensor(), expected.logits, rtol=1e-4, atol=1e-4)
    chosen: Any = output.logits.argmax(-1)
    assert torch.equal(chosen.full_tensor(), expected.logits.argmax(-1))
    with pytest.raises(RuntimeError, match="DTensor"):
        (output.logits.argmax(-1) == ids).sum()
    # A loss of the user's own, over whole logits and over the DTensor; both have gradients.
    target = ids.flatten()
    nn.functional.cross_entropy(expected.logits.flatten(0, 1), target).backward()
    wanted = whole.model.layers[0].mlp.up_proj.weight.grad
    split = model.model.layers[0].mlp.up_proj.splits["weight"]
    for logits, loss_of in (
        (output.logits, lambda x: ops.cross_entropy(x.flatten(0, 1), target)),
        (
            model(input_ids=ids).logits,
            lambda x: nn.functional.cross_entropy(x.flatten(0, 1), target),
        ),
    ):
        model.zero_grad()
        loss_of(logits).backward()
        grad = model.model.layers[0].mlp.up_proj.weight.grad
        assert_close(grad, split.cut(wanted), rtol=1e-4, atol=1e-5)
    always = tensor_parallelize(make("gemma2"), gather_logits=True)
    assert_close(always(input_ids=ids, labels=ids).logits, expected.logits, rtol=1e-4, atol=1e-4)


@in_ranks(2)
def test_ranks_that_draw_different_tokens_are_told(rank: int) -> None:
    model = tensor_parallelize(make("qwen2"))
    torch.manual_seed(rank)
    with pytest.raises(ValueError, match=r"different input ids.*one seed on all ranks"):
        model.generate(ids_of(4), max_new_tokens=20, do_sample=True)


@in_ranks(2)
def test_generation_with_tokens_in_parts_is_refused(rank: int) -> None:
    model = tensor_parallelize(make("llama"), sequence_parallel=True)
    with pytest.raises(ValueError, match="2 ranks cannot split 1 tokens evenly"):
        model.generate(ids_of(4), max_new_tokens=3, do_sample=False)


# ---- saving and loading


@cache
def states() -> dict[str, Tensor]:
    return {name: value.clone() for name, value in make("llama").state_dict().items()}


def equals_one_process(model: Any) -> None:
    found = get_state_dict(model, full=True)[0]
    assert found.keys() == states().keys()
    for name, value in found.items():
        assert torch.equal(value, states()[name]), name


def save(rank: int, folder: Path) -> None:
    model = tensor_parallelize(make("llama", rank))
    values = model.state_dict()
    with pytest.raises(RuntimeError, match="would save this rank's part of the optimizer's state"):
        get_by_torch(model, torch.optim.AdamW(model.parameters()))
    assert values.keys() == states().keys()
    for name, value in values.items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(full, states()[name]), name
    assert sum(isinstance(value, DTensor) for value in values.values()) == 16
    dcp.save(values, checkpoint_id=folder / "dcp")
    with pytest.raises(RuntimeError, match="the part of one rank, which a file would have"):
        torch.save(values, folder / f"rank{rank}.pt")
    # By torch's own loaders, into models of other weights.
    other = tensor_parallelize(make("llama", 8))
    values = other.state_dict()  # with the model's memory
    dcp.load(values, checkpoint_id=folder / "dcp")
    equals_one_process(other)
    other = tensor_parallelize(make("llama", 9))
    with pytest.raises(RuntimeError, match=r"assign=True.* would drop the gradient hooks"):
        other.load_state_dict(states(), assign=True)
    other.load_state_dict(states())
    equals_one_process(other)
    name = "model.layers.0.mlp.up_proj.weight"
    mesh = values[name].device_mesh
    replicas = DTensor.from_local(states()[name], mesh, [Replicate()])
    for wrong in (states()[name][:25], torch.zeros(50, 9), replicas):
        with pytest.raises(RuntimeError, match=re.escape(name)):
            other.load_state_dict({**states(), name: wrong})
    equals_one_process(other)


def test_state_dicts_are_of_the_full_model(tmp_path: Path) -> None:
    run_ranks(2, save, tmp_path)
    model = make("llama", 1)
    values = model.state_dict()
    dcp.load(values, checkpoint_id=tmp_path / "dcp")
    for name, value in values.items():
        assert torch.equal(value, states()[name]), name


def save_pretrained(rank: int, folder: Path) -> None:
    model = tensor_parallelize(make("llama", rank))
    if torch.distributed.get_world_size() == 4:  # heads on several ranks
        with pytest.raises(RuntimeError, match=r"k_proj.weight.*use ringcomm\.parallel\.get_state"):
            model.state_dict()
    model.save_pretrained(folder)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    equals_one_process(tensor_parallelize(loaded))


@pytest.mark.parametrize("world_size", [2, 4])
def test_save_pretrained_writes_the_full_model(world_size: int, tmp_path: Path) -> None:
    run_ranks(world_size, save_pretrained, tmp_path)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_close(dict(model.state_dict()), states(), rtol=0, atol=0)


def on_a_mesh(rank: int, sizes: dict[str, Any], stage: int, folder: Path) -> Tensor:
    dims = ParallelDims(**sizes)
    model = parallelize(make("llama", rank), dims, torch.optim.AdamW, zero_stage=stage).model
    model.save_pretrained(folder)
    tokens: Tensor = model.generate(ids_of(4), max_new_tokens=4, do_sample=False)
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "stage"), [({"dp": 2}, 0), ({"dp": 2}, 2), ({"fsdp": 2}, 3)])
def test_meshes_generate_and_save(sizes: dict[str, int], stage: int, tmp_path: Path) -> None:
    sizes = {"dp": 1, "tp": 2, **sizes}
    expected = make("llama").generate(ids_of(4), max_new_tokens=4, do_sample=False)
    for tokens in run_ranks(4, on_a_mesh, sizes, stage, tmp_path):
        assert torch.equal(tokens, expected)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_close(dict(model.state_dict()), states(), rtol=0, atol=0)


@in_ranks(4)
def test_layers_of_ranks_with_different_seeds_are_those_of_rank_0(rank: int) -> None:
    kinds: list[tuple[Any, Any, dict[str, Any]]] = [
        (ColumnParallelLinear, partial(nn.Linear, 8, 12), {"num_replicas": 2}),
        (RowParallelLinear, partial(nn.Linear, 8, 12), {}),
        (VocabParallelEmbedding, partial(nn.Embedding, 9, 4), {}),
    ]
    for kind, whole_of, options in kinds:
        torch.manual_seed(0)
        expected = whole_of()
        torch.manual_seed(rank)
        made = (getattr(kind, "from_linear", None) or kind.from_embedding)(whole_of(), **options)
        for name, value in expected.named_parameters():
            split = made.splits.get(name)
            wanted = value if split is None else split.cut(value)
            assert torch.equal(made.get_parameter(name), wanted)
    torch.manual_seed(rank)
    drawn = ColumnParallelLinear(8, 12, num_replicas=2), RowParallelLinear(8, 12)
    values = [*drawn[0].parameters(), drawn[1].get_parameter("bias")]
    for value, num_together in zip(values, (2, 2, 4), strict=True):
        found = [torch.empty_like(value) for _ in range(4)]
        torch.distributed.all_gather(found, value.detach())
        first = rank // num_together * num_together
        assert torch.equal(value, found[first])


@in_ranks(2)
def test_second_order_gradients(rank: int) -> None:
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(5, 7)
    x = torch.randn(3, 6, requires_grad=True)

    def penalty(up: Any, down: Any, out: Any) -> tuple[Tensor, Tensor]:
        loss = out(torch.tanh(down(torch.tanh(up(x))))).square().sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        value = grad.square().sum() + loss
        (grad_x,) = torch.autograd.grad(value, x, retain_graph=True)
        value.backward()
        return value.detach(), grad_x

    expected = penalty(*layers)
    parts = (
        ColumnParallelLinear.from_linear(layers[0]),
        RowParallelLinear.from_linear(layers[1]),
        ColumnParallelLinear.from_linear(layers[2], gather_output=True),
    )
    assert_close(penalty(*parts), expected)
    for part, whole in zip(parts, layers, strict=True):
        for name, param in whole.named_parameters():
            split = part.splits.get(name)
            assert param.grad is not None
            wanted = param.grad if split is None else split.cut(param.grad)
            assert_close(part.get_parameter(name).grad, wanted)
