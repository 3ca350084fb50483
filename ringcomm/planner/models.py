"""The shapes of a decoder's weights: by its configuration, a name, or transformers' config."""

import dataclasses
import json
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Literal, get_args

Bias = Literal["qkv", "out", "ffn", "norm"]
# How tensor parallelism cuts a weight: the rows by heads or by groups of heads, all rows, or
# columns. Columns of the projection after attention are split by heads, evenly.
Split = Literal["heads", "kv_heads", "rows", "columns"]


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter's shape; experts are stacked along the first dimension."""

    shape: tuple[int, ...]
    split: Split | None = None  # None: each tensor-parallel rank has all of it
    is_expert: bool = False

    @property
    def num_elems(self) -> int:
        """Elements of the unsharded weight."""
        return prod(self.shape)


Unit = tuple[Weight, ...]  # weights that a sharded model gathers together


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """A decoder: embedding, layers of attention and feed-forward, norm, head.

    Raises ValueError for a number that is not positive, and for heads that do not divide.
    """

    name: str  # shown in reports
    layers: int
    hidden: int  # width of the residual stream
    heads: int  # query heads
    kv_heads: int  # key and value heads; fewer than heads for grouped queries
    ffn: int  # inner width of the feed-forward layer, or of one expert
    vocab: int  # rows of the embedding and of the head
    context: int = 4096  # tokens per sequence that the model was made for
    head_dim: int = 0  # 0: hidden / heads
    gated: bool = True  # whether the feed-forward layer has a gate (SwiGLU)
    tied: bool = False  # whether the head shares the embedding's weight
    biases: frozenset[Bias] = frozenset()  # layers with a bias; "out" is the one after attention
    positions: int = 0  # rows of a position embedding; 0 without one (rotary)
    dropout: bool = False  # whether dropout masks are kept, as in GPT
    experts: int = 0  # per layer; 0 for a dense feed-forward layer
    top_k: int = 0  # experts per token

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "context"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(
                    f"{self.name}: {name} must be a positive whole number, got {value!r}"
                )
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
                f"{self.name}: top_k must be 1 to {self.experts}, the number of experts, got"
                f" top_k={self.top_k}"
            )

    @property
    def query_width(self) -> int:
        """Width of all heads' queries."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all heads' keys."""
        return self.kv_heads * self.head_dim

    @cached_property
    def embedding(self) -> Unit:
        """In front of the layers."""
        positions = (Weight((self.positions, self.hidden)),) if self.positions else ()
        return (Weight((self.vocab, self.hidden), "rows"), *positions)

    @cached_property
    def layer(self) -> Unit:
        """One layer, in the order of transformers' Llama."""
        h, q, kv = self.hidden, self.query_width, self.kv_width
        keys = values = self._linear(kv, h, "kv_heads", "qkv")
        attention = self._linear(q, h, "heads", "qkv") + keys + values
        attention += self._linear(h, q, "columns", "out")
        f, num_inner = self.ffn, 2 if self.gated else 1
        ffn = self._linear(f, h, "rows", "ffn") * num_inner + self._linear(h, f, "columns", "ffn")
        if self.experts:
            inner = Weight((self.experts, f, h), "rows", is_expert=True)
            down = Weight((self.experts, h, f), "columns", is_expert=True)
            ffn = (Weight((self.experts, h)), *[inner] * num_inner, down)
        return attention + ffn + self._norm() * 2

    @cached_property
    def head(self) -> Unit:
        """The last norm, and the head unless it is the embedding."""
        own = () if self.tied else (Weight((self.vocab, self.hidden), "rows"),)
        return (*self._norm(), *own)

    @cached_property
    def num_params(self) -> int:
        """Parameters; a tied one counts once."""
        ends = sum(weight.num_elems for weight in (*self.embedding, *self.head))
        return ends + self.layers * sum(weight.num_elems for weight in self.layer)

    @cached_property
    def num_active_params(self) -> int:
        """Parameters that one token uses."""
        of_experts = sum(w.num_elems for w in self.layer if w.is_expert)
        idle = of_experts // self.experts * (self.experts - self.top_k) if self.experts else 0
        return self.num_params - self.layers * idle

    def _linear(self, rows: int, columns: int, split: Split, bias: Bias) -> Unit:
        """A weight, and its bias if the model has one; a bias after a sum is not sharded."""
        weight = Weight((rows, columns), split)
        if bias not in self.biases:
            return (weight,)
        return weight, Weight((rows,), None if split == "columns" else split)

    def _norm(self) -> Unit:
        return (Weight((self.hidden,)),) * (2 if "norm" in self.biases else 1)


def _llama(name: str, *sizes: Any, **more: Any) -> ModelShape:
    """`sizes` are layers, hidden, heads, kv_heads and ffn."""
    return ModelShape(name, *sizes, **{"vocab": 32000, **more})


def _gpt(
    name: str, layers: int, hidden: int, heads: int, vocab: int, context: int, **more: Any
) -> ModelShape:
    options = {"ffn": 4 * hidden, "tied": True, "dropout": True, **more}
    options |= {"context": context, "positions": context, "gated": False}
    options["biases"] = frozenset(get_args(Bias))
    return ModelShape(name, layers, hidden, heads, heads, vocab=vocab, **options)


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


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file's object. Raises ValueError where it has none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected an object, got {content!r:.40}")
    return content


def find_model(name: str) -> ModelShape:
    """A model by its name in MODELS, or by the path of a config.json or of its folder.

    Raises ValueError if there is neither, or the file is not of a known kind of model.
    """
    if name in MODELS:
        return MODELS[name]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"{name!r} is neither a model nor a config.json; known are {', '.join(MODELS)}"
        )
    config = read_object(path)
    kind = config.get("model_type")
    if kind not in ("gpt2", "llama", "mistral", "mixtral", "qwen2"):
        raise ValueError(
            f"{path}: model_type must be one of gpt2, llama, mistral, mixtral, qwen2, got {kind!r}"
        )
    read = _of_gpt2 if kind == "gpt2" else _of_llama
    try:
        return read(config, path.parent.name or name)
    except KeyError as error:
        raise ValueError(f"{path}: config.json has no field {error}") from None


def _of_llama(config: dict[str, Any], name: str) -> ModelShape:
    biases: set[Bias] = {"qkv"} if config["model_type"] == "qwen2" else set()
    biases |= {"qkv", "out"} if config.get("attention_bias") else set()
    biases |= {"ffn"} if config.get("mlp_bias") else set()
    has_experts = config["model_type"] == "mixtral"
    return ModelShape(
        name,
        config["num_hidden_layers"],
        config["hidden_size"],
        config["num_attention_heads"],
        config.get("num_key_value_heads") or config["num_attention_heads"],
        config["intermediate_size"],
        config["vocab_size"],
        config.get("max_position_embeddings", 2048),
        config.get("head_dim") or 0,
        tied=bool(config.get("tie_word_embeddings")),
        biases=frozenset(biases),
        experts=config["num_local_experts"] if has_experts else 0,
        top_k=config["num_experts_per_tok"] if has_experts else 0,
    )


def _of_gpt2(config: dict[str, Any], name: str) -> ModelShape:
    return _gpt(
        name,
        config["n_layer"],
        config["n_embd"],
        config["n_head"],
        config["vocab_size"],
        config.get("n_positions", 1024),
        ffn=config.get("n_inner") or 4 * config["n_embd"],
        tied=bool(config.get("tie_word_embeddings", True)),
        dropout=bool(config.get("attn_pdrop", 0.1)),
    )
