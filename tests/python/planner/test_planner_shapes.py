"""Parameter counts of models by name and by config.json, beside transformers'."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ringcomm import planner
from ringcomm.planner import ModelShape

# Published, or of transformers with its own configurations.
COUNTS = {
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "mixtral-8x7b": 46_702_792_704,
}


@pytest.mark.parametrize("name", COUNTS)
def test_known_models(name: str) -> None:
    assert planner.find_model(name).num_params == COUNTS[name]


def test_experts_that_a_token_meets() -> None:
    shape = planner.find_model("mixtral-8x7b")
    assert shape.num_active_params == 12_879_925_248
    idle = 6 * 3 * 4096 * 14336 * 32
    assert shape.num_params - shape.num_active_params == idle
    assert planner.find_model("llama-7b").num_active_params == COUNTS["llama-7b"]


def small(kind: str) -> dict[str, Any]:
    sizes = {
        "vocab_size": 131,
        "hidden_size": 48,
        "intermediate_size": 100,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    }
    if kind == "gpt2":
        return {"vocab_size": 131, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64}
    if kind == "mixtral":
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    return sizes


CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 16}),
    ("mistral", {}),
    ("qwen2", {}),
    ("gpt2", {}),
    ("gpt2", {"n_inner": 100}),
    ("mixtral", {}),
]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_counts_are_those_of_transformers(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **small(kind), **options)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        shape = planner.find_model(str(path))
        assert shape.num_params == sum(param.numel() for param in model.parameters())
        assert shape.name == tmp_path.name


def test_llama_7b_is_that_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig())
    layer = list(model.model.layers[0].parameters())
    shape = planner.find_model("llama-7b")
    assert [tuple(param.shape) for param in layer] == [w.shape for w in shape.layer.weights]
    assert shape.num_params == sum(param.numel() for param in model.parameters())


def test_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'llama-8b' is no model .*known are llama-7b, "):
        planner.find_model("llama-8b")
    path = tmp_path / "config.json"
    for content, message in (
        ("{", "not JSON"),
        ("[]", "holds an object"),
        (json.dumps({"model_type": "bert"}), "model_type is one of gpt2, llama, .*got 'bert'"),
        (json.dumps({"model_type": "llama"}), "has no field 'num_hidden_layers'"),
    ):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            planner.find_model(str(path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers is a positive whole number"),
        ({"heads": 5}, "4 heads of keys do not divide 5"),
        ({"heads": 12, "kv_heads": 4}, "12 heads do not divide a width of 64"),
        ({"experts": 4}, "takes 1 to 4 experts, got top_k=0"),
        ({"experts": 2, "top_k": 3}, "takes 1 to 2 experts"),
    ],
)
def test_shapes_that_make_no_sense(change: dict[str, Any], message: str) -> None:
    sizes: dict[str, Any] = {
        "layers": 2,
        "hidden": 64,
        "heads": 8,
        "kv_heads": 4,
        "ffn": 128,
        "vocab": 100,
    }
    with pytest.raises(ValueError, match=message):
        ModelShape("odd", **{**sizes, **change})
    shape = ModelShape("even", **sizes)
    assert shape.head_dim == 8
    assert dataclasses.replace(shape, tied=True).num_params == shape.num_params - 100 * 64
