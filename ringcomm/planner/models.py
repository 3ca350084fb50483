"""The shapes of a decoder's weights: by its configuration, a name, or transformers' config."""

from __future__ import annotations

import dataclasses
import json
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Literal

__all__ = ["MODELS", "Bias", "ModelShape", "Unit", "Weight", "find_model", "model_of_config"]

Bias = Literal["qkv", "out", "ffn", "norm"]
"""Which layers have one: the projections to queries, keys and values, the one behind attention, the
feed-forward layers, and the norms (a LayerNorm has one, an RMSNorm does not)."""

Split = Literal["heads", "kv_heads", "rows", "columns"]
"""How tensor parallelism cuts a weight: the rows by heads or groups of heads, all rows, or columns.
Columns of the projection behind attention go by heads, too, whose number ranks divide."""


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter.

    Attributes:
        shape: as torch.nn.Linear and Embedding have it; experts are stacked along the first.
        split: None where each rank of a tensor-parallel group has all of it.
        is_expert: whether expert parallelism shares it out along the first dimension.
    """

    name: str
    shape: tuple[int, ...]
    split: Split | None = None
    is_expert: bool = False

    @property
    def num_elems(self) -> int:
        """Of the whole."""
        return prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Unit:
    """Parameters that a sharded model gathers together."""

    name: str
    weights: tuple[Weight, ...]

    @property
    def num_elems(self) -> int:
        """Of all of them."""
        return sum(weight.num_elems for weight in self.weights)


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """A decoder: embedding, layers of attention and feed-forward, norm, head.

    Attributes:
        name: for people.
        layers: how many.
        hidden: width of what goes from layer to layer.
        heads: of queries.
        kv_heads: of keys and values: as many as heads, or fewer (grouped queries).
        ffn: inner width of the feed-forward layer, of an expert's where there are experts.
        vocab: rows of the embedding, and of the head.
        context: tokens of a sequence that it was made for.
        head_dim: of a head; 0 for hidden / heads.
        gated: whether the feed-forward layer has a gate beside its first matrix (SwiGLU).
        tied: whether the head is the embedding.
        biases: what has one.
        positions: rows of an embedding of positions; 0 where there is none (rotary).
        dropout: whether masks of dropout are kept, as in GPT.
        experts: feed-forward layers side by side; 0 for one that all tokens take.
        top_k: experts that a token takes.

    Raises:
        ValueError: a number is not positive, or heads do not divide.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    context: int = 4096
    head_dim: int = 0
    gated: bool = True
    tied: bool = False
    biases: frozenset[Bias] = frozenset()
    positions: int = 0
    dropout: bool = False
    experts: int = 0
    top_k: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "context"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{self.name}: {name} is a positive whole number, got {value!r}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.name}: {self.kv_heads} heads of keys do not divide {self.heads} of queries"
            )
        if not self.head_dim:
            if self.hidden % self.heads:
                raise ValueError(
                    f"{self.name}: {self.heads} heads do not divide a width of {self.hidden}"
                )
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
        if not 0 <= self.top_k <= self.experts or bool(self.top_k) != bool(self.experts):
            raise ValueError(
                f"{self.name}: a token takes 1 to {self.experts} experts, got top_k={self.top_k}"
            )

    @property
    def query_width(self) -> int:
        """Of all heads' queries."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Of all heads' keys."""
        return self.kv_heads * self.head_dim

    @cached_property
    def embedding(self) -> Unit:
        """What tokens begin with."""
        weights = [Weight("embed_tokens.weight", (self.vocab, self.hidden), "rows")]
        if self.positions:
            weights.append(Weight("positions.weight", (self.positions, self.hidden)))
        return Unit("embedding", tuple(weights))

    @cached_property
    def layer(self) -> Unit:
        """One of the layers, in the order of transformers' Llama."""
        return Unit("layer", (*self._attention(), *self._feed_forward(), *self._norms()))

    @cached_property
    def head(self) -> Unit:
        """The last norm, and the head where it is not the embedding."""
        weights = list(self._norm("norm"))
        if not self.tied:
            weights.append(Weight("lm_head.weight", (self.vocab, self.hidden), "rows"))
        return Unit("head", tuple(weights))

    @cached_property
    def num_params(self) -> int:
        """All of them, a tied one once."""
        ends = self.embedding.num_elems + self.head.num_elems
        return ends + self.layers * self.layer.num_elems

    @cached_property
    def num_active_params(self) -> int:
        """Those that one token meets: of the experts its own."""
        of_experts = sum(w.num_elems for w in self.layer.weights if w.is_expert)
        idle = of_experts // self.experts * (self.experts - self.top_k) if self.experts else 0
        return self.num_params - self.layers * idle

    def _attention(self) -> list[Weight]:
        q, kv, h = self.query_width, self.kv_width, self.hidden
        found: list[Weight] = []
        splits: tuple[tuple[str, int, Split], ...] = (
            ("q", q, "heads"),
            ("k", kv, "kv_heads"),
            ("v", kv, "kv_heads"),
        )
        for name, width, split in splits:
            found.append(Weight(f"{name}_proj.weight", (width, h), split))
            if "qkv" in self.biases:
                found.append(Weight(f"{name}_proj.bias", (width,), split))
        found.append(Weight("o_proj.weight", (h, q), "columns"))
        if "out" in self.biases:
            found.append(Weight("o_proj.bias", (h,)))
        return found

    def _feed_forward(self) -> list[Weight]:
        h, f = self.hidden, self.ffn
        inner = ("gate_proj", "up_proj") if self.gated else ("up_proj",)
        if self.experts:
            stacked = [Weight(name, (self.experts, f, h), "rows", True) for name in inner]
            router = Weight("router.weight", (self.experts, h))
            return [router, *stacked, Weight("down_proj", (self.experts, h, f), "columns", True)]
        found = []
        for name in inner:
            found.append(Weight(f"{name}.weight", (f, h), "rows"))
            if "ffn" in self.biases:
                found.append(Weight(f"{name}.bias", (f,), "rows"))
        found.append(Weight("down_proj.weight", (h, f), "columns"))
        if "ffn" in self.biases:
            found.append(Weight("down_proj.bias", (h,)))
        return found

    def _norms(self) -> list[Weight]:
        return [*self._norm("input_layernorm"), *self._norm("post_attention_layernorm")]

    def _norm(self, name: str) -> list[Weight]:
        found = [Weight(f"{name}.weight", (self.hidden,))]
        if "norm" in self.biases:
            found.append(Weight(f"{name}.bias", (self.hidden,)))
        return found


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
