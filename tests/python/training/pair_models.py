"""The models of the tables: a small network, and a Llama with what a person's program has."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from oracle import default_dtype
from pair_table import Case
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

VOCABULARY, HIDDEN = 11, 6
INNER = 11  # uneven over 2 and 4 ranks, and with a part for each
# Of the Llama. https://github.com/vllm-project/vllm/issues/578: one that no ranks divide.
NUM_CLASSES = 37
# Selective recomputation: matrix products are kept.
PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
# What values of the tables stand for.
CLIP_NORM, CLIP_VALUE, SCALE = 0.5, 0.02, 1024.0
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "bfloat16 weights": torch.bfloat16,
}
# The prefixes that wrappers put into names.
PREFIXES = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.|base_model\.model\.|inner\.")
# The adapters in a Llama's norms.
ADAPTERS = {
    "all": (),
    "others on each rank": ("first", "second"),
    "one rank alone": ("first",),
    "by nobody": ("first", "unused"),
}
# Those that a batch uses: set before each forward pass, on each rank for its own rows.
USED = {"first", "second"}


def is_small(case: Case) -> bool:
    """Whether a case trains the small network: its table has the options of optimizers."""
    return "accumulation" in case


def unwrapped(values: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """By the names that a model has by itself."""
    return {PREFIXES.sub("", name): value.detach() for name, value in values}


def make_model(case: Case, seed: int) -> Any:
    torch.manual_seed(seed)
    if not is_small(case):
        return make_llama(case)
    model = Net(case["weights"], case["recompute"], "experts" in case.get("mesh", ""))
    # Selective checkpoints of torch allow one backward pass.
    model.is_selective = case["clipping"] != "norm in two passes"
    return model


# ---- the small network


class Mixture(nn.Module):
    """Three experts of which each token goes through two."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, 3, bias=False)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chances = self.router(x).float().softmax(-1)
        weights, chosen = chances.topk(2)
        kept = torch.zeros_like(chances).scatter(-1, chosen, weights)
        parts = [kept[:, i, None] * each(x) for i, each in enumerate(self.experts)]
        return torch.stack(parts).sum(0).to(x.dtype)


class Block(nn.Module):
    """A residual layer with an adapter that a batch may do without."""

    def __init__(self, has_experts: bool) -> None:
        super().__init__()
        self.mixture: nn.Module | None = Mixture() if has_experts else None
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, INNER)
        self.down = nn.Linear(INNER, HIDDEN)
        self.adapter = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, with_adapter: bool = True) -> Tensor:
        hidden = self.norm(x)
        if with_adapter:
            hidden = hidden + self.adapter(hidden)
        out: Tensor = x + self.down(torch.tanh(self.up(hidden)))
        return out if self.mixture is None else out + self.mixture(hidden)


class Net(nn.Module):
    """A language model of one token; sizes that no number of ranks divides."""

    def __init__(self, weights: str, recompute: str, has_experts: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block(has_experts) for _ in range(3))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if weights == "tied":
            self.head.weight = self.embedding.weight
        if weights == "frozen":
            self.blocks[0].up.requires_grad_(False)
            self.norm.weight.requires_grad_(False)
        self.recompute, self.is_selective = recompute, True

    def forward(self, ids: Tensor, with_adapters: bool, with_middle_block: bool) -> Tensor:
        """A batch may do without the middle block, or without its adapter."""
        x = self.embedding(ids)
        for i, block in enumerate(self.blocks):
            if i == 1 and not with_middle_block:
                continue
            with_adapter = with_adapters or i != 1
            if self.recompute == "no":
                x = block(x, with_adapter)
            elif self.recompute == "reentrant":
                x = checkpoint(block, x, with_adapter, use_reentrant=True)
            else:
                is_selective = self.is_selective and i == 2
                contexts = partial(create_selective_checkpoint_contexts, PRODUCTS)
                more: Any = {"context_fn": contexts} if is_selective else {}
                x = checkpoint(block, x, with_adapter, use_reentrant=False, **more)
        logits: Tensor = self.head(self.norm(x))
        return logits


# ---- the Llama


class Norm(nn.Module):
    """A layer's first norm, and what else a case has: buffers, and adapters that some rows use."""

    features: Tensor

    def __init__(self, norm: Any, buffers: str, adapters: tuple[str, ...]) -> None:
        super().__init__()
        self.norm, width = norm, len(norm.weight)
        if buffers == "random":
            self.register_buffer("features", torch.randn(width, width) / 4)
        self.statistics = nn.BatchNorm1d(width) if buffers == "BatchNorm" else None
        self.adapters = nn.ModuleDict({name: nn.Linear(width, width) for name in adapters})

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        if hasattr(self, "features"):
            out = out + out @ self.features
        if self.statistics is not None:
            out = out + self.statistics(out.flatten(0, 1)).view_as(out)
        for name, adapter in self.adapters.items():
            if name in USED:
                out = out + torch.tanh(adapter(out))
        return out


class Around(nn.Module):
    """A module of the user's around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        return self.inner(input_ids=input_ids, **kwargs)


class Convolution(nn.Conv2d):
    """Over the tokens of rows, with a weight in channels_last."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, (3, 1), padding=(1, 0), bias=False)
        nn.init.normal_(self.weight, std=0.1)
        self.weight.data = self.weight.data.contiguous(memory_format=torch.channels_last)
        assert not self.weight.is_contiguous()

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x.transpose(1, 2)[..., None])[..., 0].transpose(1, 2)


@default_dtype(torch.float32)
def make_llama(case: Case) -> Any:
    """A tiny one with a case's parts: buffers, adapters, layouts of weights, frozen weights."""
    import transformers

    is_even = case.get("sizes", "even") == "even"
    config = transformers.LlamaConfig(
        vocab_size=NUM_CLASSES,
        hidden_size=16 if is_even else 18,
        intermediate_size=24 if is_even else 23,
        num_hidden_layers=3 if "mesh" in case else 2,
        num_attention_heads=4 if is_even else 3,
        num_key_value_heads=2 if is_even else 3,
        head_dim=4,
        tie_word_embeddings=case.get("tied", "no") == "yes",
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    # Weights as large as those of a trained model: gradients of all of them count.
    for param in model.parameters():
        if param.dim() > 1:
            nn.init.normal_(param, std=0.2)
    buffers, adapters = case.get("buffers", "none"), ADAPTERS[case.get("used", "all")]
    layers = model.model.layers
    if buffers != "none" or adapters:
        for layer in layers:
            layer.input_layernorm = Norm(layer.input_layernorm, buffers, adapters)
    if case.get("wrapper") == "adapters":
        import peft

        lora = peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, lora)
    if case.get("memory format") == "transposed":
        weight = layers[-1].mlp.up_proj.weight
        weight.data = weight.data.t().contiguous().t()
    if case.get("memory format") == "channels_last":
        convolution = Convolution(config.hidden_size)
        layers[-1].input_layernorm = nn.Sequential(layers[-1].input_layernorm, convolution)
    if case.get("trained", "always") != "always":
        layers[0].requires_grad_(False)
    return model


def wrapped(case: Case, model: Any) -> Any:
    """A model in what a user has put around it, or in a layer of it."""
    match case.get("wrapper"):
        case "DDP":
            return DistributedDataParallel(model)
        case "torch.compile":
            # That the model is compiled is seen in other tables, and takes seconds.
            torch.compiler.set_stance("force_eager")
            return torch.compile(model, backend="eager")
        case "checkpoint_wrapper":
            model.model.layers[-1] = checkpoint_wrapper(model.model.layers[-1])
        case "a user's module":
            return Around(model)
    return model
