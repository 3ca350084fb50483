"""A small model and its batches, for clients that bring none."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

LR, STEPS, ROWS = 0.05, 6, 4


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    x = torch.randn(ROWS, 6, generator=generator)
    return x, x.sum(1, keepdim=True)


def sums_of_weights(model: nn.Module) -> list[float]:
    """Of absolute values, in float64: they differ little where weights do."""
    return [float(param.detach().double().abs().sum()) for param in model.parameters()]
