"""A linear layer and its loss in float64, for the tests of linear_cross_entropy."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import loss_oracle
import torch
from torch import Tensor
from torch.nn.functional import linear

# The function of that name hides its module.
MODULE = importlib.import_module("ringcomm.ops.losses.linear_cross_entropy")
F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
TOKENS, HIDDEN, CLASSES = 72, 24, 333


def set_blocks(set_value: Callable[[Any, str, int], None] = setattr) -> None:
    """Several of tokens and of classes, the last ones short."""
    for name, value in (("BLOCK_BYTES", 1), ("MIN_BLOCK_TOKENS", 16), ("MIN_BLOCK_CLASSES", 50)):
        set_value(MODULE, name, value)


def reference(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    outputs: Any = (),
    **options: Any,
) -> Any:
    """The oracle's loss, of logits of hidden's dtype."""
    loss, named = loss_oracle.reference(linear(hidden, weight, bias), target, **options)
    return (loss, {name: named[name] for name in outputs}) if outputs else loss


def layer(
    dtype: torch.dtype, *, tokens: int = TOKENS, ignore_index: int = -100, **_: Any
) -> dict[str, Tensor]:
    """Hidden states, a layer and targets that are among four fifths of the classes."""
    random = torch.Generator().manual_seed(0)
    target = torch.randint(CLASSES - CLASSES // 5, (tokens,), generator=random)
    target[3::10] = ignore_index
    return {
        "hidden": torch.randn(tokens, HIDDEN, generator=random).to(dtype),
        "weight": torch.randn(CLASSES, HIDDEN, generator=random).to(dtype),
        "bias": torch.randn(CLASSES, generator=random).to(dtype),
        "target": target,
    }


def gradients(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    upstream = torch.linspace(0.5, 2, loss.numel()).view_as(loss).to(loss)
    return list(torch.autograd.grad(loss, inputs, upstream))


def run(
    function: Callable[..., Any],
    given: dict[str, Tensor],
    dtype: torch.dtype,
    *,
    device: Any = "cpu",
    updates: Tensor | None = None,
    **options: Any,
) -> list[Tensor]:
    """Loss, gradients of hidden, weight and bias, and outputs by name; in float64.

    With `updates` those of the weight are what a fused update was given.
    """
    there = {key: value.to(device) for key, value in given.items()}
    inputs = [there[n].to(dtype, copy=True).requires_grad_() for n in ("hidden", "weight", "bias")]
    hidden, weight, bias = inputs
    if updates is not None:
        options["fused_update"] = lambda rows, grad: updates[rows].copy_(grad)
    options = loss_oracle.on(device, options)
    result = function(hidden, weight, there["target"], bias=bias, **options)
    loss, named = result if isinstance(result, tuple) else (result, {})
    if updates is None:
        grads = gradients(loss, *inputs)
    else:
        hidden_grad, bias_grad = gradients(loss, hidden, bias)
        grads = [hidden_grad, updates, bias_grad]
    return [t.detach().cpu().double() for t in (loss, *grads, *named.values())]


def check_near(actual: Tensor, exact: Tensor, torchs: Tensor, dtype: torch.dtype) -> None:
    """No further off than torch in the same dtype, half as much again and a rounding."""
    floor = torch.finfo(dtype).eps + 8 * torch.finfo(F32).eps
    assert actual.shape == exact.shape
    if exact.numel():
        size = exact.abs().max().clamp(min=1e-3)
        error, allowed = (actual - exact).abs().max(), 1.5 * (torchs - exact).abs().max()
        assert error <= allowed + floor * size, (error, allowed, floor * size)
