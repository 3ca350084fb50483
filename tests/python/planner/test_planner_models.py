"""Shapes of models that the planner knows, and of transformers' configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ringcomm.planner.models import find_model

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
GPT2 = {"vocab_size": 131, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64}
LLAMA = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}


def test_known_models() -> None:
    assert {name: find_model(name).num_params for name in COUNTS} == COUNTS
    shape = find_model("mixtral-8x7b")
    assert shape.num_params - shape.num_active_params == 6 * 3 * 4096 * 14336 * 32
    assert find_model("llama-7b").num_active_params == COUNTS["llama-7b"]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
        ("mistral", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("gpt2", {"n_inner": 100}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_shapes_are_those_of_transformers(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    small = GPT2 if kind == "gpt2" else LLAMA
    config = transformers.AutoConfig.for_model(kind, **small, **options)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        shape = find_model(str(path))
        assert shape.num_params == sum(param.numel() for param in model.parameters())
        assert shape.name == tmp_path.name
    if kind == "mistral":
        layer = [tuple(param.shape) for param in model.model.layers[0].parameters()]
        assert layer == [weight.shape for weight in shape.layer]
