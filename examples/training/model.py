"""A small Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU. Bytes in, logits out.

It knows nothing of several ranks: ``tensor_parallel.py`` puts parts in place of its layers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ringcomm import ops

VOCAB_SIZE = 256
ROTARY_BASE = 10_000.0
# Experts of a token.
TOP_K = 2
# Small, so that the first guess is that all bytes are alike.
HEAD_STD = 0.02


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the whole model, whatever it is split over."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    vocab_size: int = VOCAB_SIZE
    num_experts: int = 0
    """Of each layer's feed-forward part; 0 where it is one dense network."""

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.num_heads

    @property
    def num_params(self) -> int:
        """Number of weights: embedding, output layer and norms included (nothing is tied)."""
        attention = self.dim * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        feed_forward = 3 * self.dim * self.ffn_dim
        if self.num_experts:
            feed_forward = self.num_experts * (feed_forward + self.dim)
        layer = attention + feed_forward + 2 * self.dim
        return self.num_layers * layer + 2 * self.vocab_size * self.dim + self.dim


PRESETS = {
    "tiny": ModelConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=96),
    "0.8M": ModelConfig(dim=128, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=352),
    "4.6M": ModelConfig(dim=256, num_layers=6, num_heads=8, num_kv_heads=4, ffn_dim=704),
    "20M": ModelConfig(dim=512, num_layers=6, num_heads=8, num_kv_heads=4, ffn_dim=1664),
}
ALIASES = {"small": "0.8M", "medium": "4.6M", "large": "20M"}


def shard_range(total: int, world_size: int, rank: int) -> range:
    """The part of ``range(total)`` that ``rank`` owns: contiguous, the first parts one longer."""
    return range(*ops.shard_range(total, world_size, rank))


@lru_cache(maxsize=8)
def _rotary_table(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sin, fp32 [length, head_dim / 2]. Not a module buffer: DDP would broadcast it."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    times = torch.arange(length, dtype=torch.float32, device=device)
    angles = torch.outer(times, ROTARY_BASE**-exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding of x [batch, heads, time, head_dim], first half with second."""
    cos, sin = _rotary_table(x.shape[-2], x.shape[-1], x.device)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class SwiGLU(nn.Module):
    """A feed-forward network: w2 (silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1: nn.Module = nn.Linear(dim, ffn_dim, bias=False)
        self.w3: nn.Module = nn.Linear(dim, ffn_dim, bias=False)
        self.w2: nn.Module = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [..., dim] to the same shape."""
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Experts(nn.Module):
    """Feed-forward networks, of which each token goes through TOP_K; all of them in one process.

    Every expert computes all tokens, and most weights are 0: what expert_parallel.py puts in place
    of it computes the same from the chosen tokens alone.
    """

    def __init__(self, dim: int, ffn_dim: int, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleDict({str(i): SwiGLU(dim, ffn_dim) for i in range(num_experts)})

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [..., dim] to the same shape."""
        probabilities = self.router(x).softmax(-1)
        chosen = probabilities.topk(TOP_K, -1)
        weights = torch.zeros_like(probabilities).scatter(-1, chosen.indices, chosen.values)
        parts = [
            expert(x) * weights[..., i, None] for i, expert in enumerate(self.experts.values())
        ]
        return torch.stack(parts).sum(0)


class Layer(nn.Module):
    """One transformer layer: x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dim, self.head_dim = config.dim, config.head_dim
        self.attn_norm = nn.RMSNorm(dim, eps=1e-5)
        self.wq: nn.Module = nn.Linear(dim, config.num_heads * self.head_dim, bias=False)
        self.wk: nn.Module = nn.Linear(dim, config.num_kv_heads * self.head_dim, bias=False)
        self.wv: nn.Module = nn.Linear(dim, config.num_kv_heads * self.head_dim, bias=False)
        self.wo: nn.Module = nn.Linear(config.num_heads * self.head_dim, dim, bias=False)
        self.ffn_norm = nn.RMSNorm(dim, eps=1e-5)
        self.ffn: nn.Module = (
            Experts(dim, config.ffn_dim, config.num_experts)
            if config.num_experts
            else SwiGLU(dim, config.ffn_dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [batch, time, dim] to the same shape."""
        x = x + self._attention(self.attn_norm(x))
        return x + self.ffn(self.ffn_norm(x))

    def _attention(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q, k, v = (
            w(x).view(batch, time, -1, self.head_dim).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        out: Tensor = self.wo(y.transpose(1, 2).reshape(batch, time, -1))
        return out


class Llama(nn.Module):
    """The language model; ``forward`` gives the loss, so that DDP can wrap it.

    Attributes:
        loss: of logits [tokens, classes] and targets int64 [tokens], their mean.
        saving: None, or a context for the layers, which are recomputed in the backward pass then:
            of a layer nothing but its input is saved, in this context.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.saving: Callable[[], AbstractContextManager[Any]] | None = None
        self.tok: nn.Module = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head: nn.Module = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.loss: nn.Module = nn.CrossEntropyLoss()

    def logits(self, ids: Tensor) -> Tensor:
        """int64 [batch, time] -> fp32 [batch, time, classes of this rank]."""
        x = self.tok(ids)
        with self.saving() if self.saving else nullcontext():
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False) if self.saving else layer(x)
        out: Tensor = self.head(self.norm(x))
        return out

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats over all targets; ids and targets int64 [batch, time]."""
        loss: Tensor = self.loss(self.logits(ids).flatten(0, 1), targets.flatten())
        return loss


def _initial_std(name: str, shape: torch.Size, num_layers: int) -> float:
    if name == "tok.weight":
        return 1.0
    if name == "head.weight":
        return HEAD_STD
    std = shape[1] ** -0.5
    residual = name.endswith(("wo.weight", "w2.weight"))
    return std / (2 * num_layers) ** 0.5 if residual else std


def initial_weights(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """The weights that every run of this seed starts from, whole, fp32 on the CPU, by name.

    Normal with std 1 / sqrt(inputs), over sqrt(2 * num_layers) for the two layers that write into
    the residual stream as in GPT-2; embeddings have std 1, norms are one. After 340 steps of 2,048
    bytes the 0.8M model needs 1.8 bits per held-out byte; with std 0.02 throughout, 2.0 to 2.5.
    """
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Llama(config).named_parameters()}
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * _initial_std(name, shape, config.num_layers)
        for name, shape in shapes.items()
    }
