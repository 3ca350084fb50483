"""Models by name, and by the config.json of a model of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ringcomm.planner.shapes import Bias, ModelShape

__all__ = ["MODELS", "find_model", "model_of_config"]

_GPT_BIASES: frozenset[Bias] = frozenset(("qkv", "out", "ffn", "norm"))


def _llama(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **more: Any
) -> ModelShape:
    sizes = {"vocab": 32000, "context": 4096, **more}
    return ModelShape(name, layers, hidden, heads, kv_heads, ffn, **sizes)


def _gpt(name: str, layers: int, hidden: int, heads: int, vocab: int, context: int) -> ModelShape:
    return ModelShape(
        name,
        layers,
        hidden,
        heads,
        heads,
        4 * hidden,
        vocab,
        context=context,
        gated=False,
        tied=True,
        biases=_GPT_BIASES,
        positions=context,
        dropout=True,
    )


_LLAMA3 = {"vocab": 128256, "context": 8192}
_KNOWN = (
    # Touvron et al. 2023 (arXiv 2302.13971, 2307.09288), and the models' config.json.
    _llama("llama-7b", 32, 4096, 32, 32, 11008, context=2048),
    _llama("llama-13b", 40, 5120, 40, 40, 13824, context=2048),
    _llama("llama-70b", 80, 8192, 64, 8, 28672),
    # Grattafiori et al. 2024 (arXiv 2407.21783), table 3.
    _llama("llama-3-8b", 32, 4096, 32, 8, 14336, **_LLAMA3),
    _llama("llama-3-70b", 80, 8192, 64, 8, 28672, **_LLAMA3),
    _llama("llama-3-405b", 126, 16384, 128, 8, 53248, **_LLAMA3),
    # Radford et al. 2019.
    _gpt("gpt2", 12, 768, 12, 50257, 1024),
    _gpt("gpt2-medium", 24, 1024, 16, 50257, 1024),
    _gpt("gpt2-large", 36, 1280, 20, 50257, 1024),
    _gpt("gpt2-xl", 48, 1600, 25, 50257, 1024),
    # Rajbhandari et al. 2020 (arXiv 1910.02054), figure 1: 7.5 billion parameters.
    _gpt("gpt-7.5b", 36, 4096, 32, 50304, 1024),
    # Brown et al. 2020 (arXiv 2005.14165), table 2.1, as Korthikanti et al. 2022 pad it.
    _gpt("gpt3-175b", 96, 12288, 96, 51200, 2048),
    # Jiang et al. 2024 (arXiv 2401.04088), table 1.
    _llama("mixtral-8x7b", 32, 4096, 32, 8, 14336, context=32768, experts=8, top_k=2),
)
MODELS = {shape.name: shape for shape in _KNOWN}


def find_model(name: str) -> ModelShape:
    """A model by its name in MODELS, or by the path of a config.json or of the folder it is in.

    Raises:
        ValueError: there is neither; or the file does not describe a model that is known here.
    """
    if name in MODELS:
        return MODELS[name]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"{name!r} is no model and no config.json; known are {', '.join(MODELS)}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: a config.json holds an object, got {config!r:.40}")
    return model_of_config(config, path.parent.name or name)


def model_of_config(config: dict[str, Any], name: str) -> ModelShape:
    """The shape that a config.json of transformers describes.

    Raises:
        ValueError: model_type is none of those known here, or a field is missing.
    """
    kind = config.get("model_type")
    readers = {"llama": _of_llama, "mistral": _of_llama, "qwen2": _of_llama, "mixtral": _of_llama}
    readers["gpt2"] = _of_gpt2
    if kind not in readers:
        raise ValueError(f"{name}: model_type is one of {', '.join(sorted(readers))}, got {kind!r}")
    try:
        return readers[kind](config, name)
    except KeyError as error:
        raise ValueError(f"{name}: config.json has no field {error}") from None


def _of_llama(config: dict[str, Any], name: str) -> ModelShape:
    biases: set[Bias] = set()
    if config.get("attention_bias"):
        biases |= {"qkv", "out"}
    if config["model_type"] == "qwen2":
        biases |= {"qkv"}
    if config.get("mlp_bias"):
        biases |= {"ffn"}
    has_experts = config["model_type"] == "mixtral"
    return ModelShape(
        name,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        ffn=config["intermediate_size"],
        vocab=config["vocab_size"],
        context=config.get("max_position_embeddings", 2048),
        head_dim=config.get("head_dim") or 0,
        tied=bool(config.get("tie_word_embeddings", False)),
        biases=frozenset(biases),
        experts=config["num_local_experts"] if has_experts else 0,
        top_k=config["num_experts_per_tok"] if has_experts else 0,
    )


def _of_gpt2(config: dict[str, Any], name: str) -> ModelShape:
    width = config["n_embd"]
    return ModelShape(
        name,
        layers=config["n_layer"],
        hidden=width,
        heads=config["n_head"],
        kv_heads=config["n_head"],
        ffn=config.get("n_inner") or 4 * width,
        vocab=config["vocab_size"],
        context=config.get("n_positions", 1024),
        gated=False,
        tied=bool(config.get("tie_word_embeddings", True)),
        biases=_GPT_BIASES,
        positions=config.get("n_positions", 1024),
        dropout=bool(config.get("attn_pdrop", 0.1)),
    )
