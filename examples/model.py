"""A small Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU. Bytes in, a loss out.

It is independent of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    vocab_size: int = 256


PRESETS = {
    "tiny": ModelConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=96),
    "0.8M": ModelConfig(dim=128, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=352),
    "4.6M": ModelConfig(dim=256, num_layers=6, num_heads=8, num_kv_heads=4, ffn_dim=704),
    "20M": ModelConfig(dim=512, num_layers=6, num_heads=8, num_kv_heads=4, ffn_dim=1664),
}


@lru_cache(maxsize=8)
def rotary_table(length: int, half: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, (length, half). Not a buffer: DDP would broadcast it."""
    rates = 10_000.0 ** (-torch.arange(half, device=device) / half)
    angles = torch.outer(torch.arange(length, device=device), rates)
    return angles.cos(), angles.sin()


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding of (batch, heads, time, head_dim), first half with second."""
    cos, sin = rotary_table(x.shape[-2], x.shape[-1] // 2, x.device)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class SwiGLU(nn.Module):
    """A feed-forward network, from (..., dim) to the same: w2 (silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1: nn.Module = nn.Linear(dim, ffn_dim, bias=False)
        self.w3: nn.Module = nn.Linear(dim, ffn_dim, bias=False)
        self.w2: nn.Module = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Layer(nn.Module):
    """From (batch, time, dim) to the same: x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dim, self.head_dim = config.dim, config.dim // config.num_heads
        kv_dim = config.num_kv_heads * self.head_dim
        self.attn_norm = nn.RMSNorm(dim, eps=1e-5)
        self.wq: nn.Module = nn.Linear(dim, dim, bias=False)
        self.wk: nn.Module = nn.Linear(dim, kv_dim, bias=False)
        self.wv: nn.Module = nn.Linear(dim, kv_dim, bias=False)
        self.wo: nn.Module = nn.Linear(dim, dim, bias=False)
        self.ffn_norm = nn.RMSNorm(dim, eps=1e-5)
        self.ffn: nn.Module = SwiGLU(dim, config.ffn_dim)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attn_norm(x)
        q, k, v = (
            w(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class Llama(nn.Module):
    """The language model, of the same values in every process; its forward gives the mean loss.

    With `recompute` only the inputs of layers are kept for the backward pass.
    """

    def __init__(self, config: ModelConfig, *, recompute: bool = False) -> None:
        super().__init__()
        self.config, self.recompute = config, recompute
        torch.manual_seed(0)
        self.tok: nn.Module = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head: nn.Module = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.loss: nn.Module = nn.CrossEntropyLoss()

    def blocks(self) -> dict[str, nn.Module]:
        """What makes the logits, one after the other, by name: for a pipeline."""
        layers = {f"layers.{i}": layer for i, layer in enumerate(self.layers)}
        return {"tok": self.tok, **layers, "norm": self.norm, "head": self.head}

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """int64 (batch, time) twice -> mean cross-entropy in nats, of no dimension."""
        x = self.tok(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        loss: Tensor = self.loss(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
        return loss
