"""The steps of training loops."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def train_step(loss: Tensor, *optimizers: Any) -> float:
    """A backward pass, and apply_steps(); returns the loss."""
    loss.backward()
    apply_steps(*optimizers)
    return float(loss.detach())


def apply_steps(*optimizers: Any) -> None:
    """A step of each, which then drops its gradients."""
    for each in optimizers:
        each.step()
        each.zero_grad()
