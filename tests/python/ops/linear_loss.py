"""A linear layer and its loss in float64, for the tests of linear_cross_entropy."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

# The function of that name hides its module.
MODULE = importlib.import_module("ringcomm.ops.losses.linear_cross_entropy")
F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
TOKENS, HIDDEN, CLASSES = 75, 24, 333


def set_blocks(set_value: Callable[[Any, str, int], None] = setattr) -> None:
    """Several of tokens and of classes, the last ones short."""
    for name, value in (("BLOCK_BYTES", 1), ("MIN_BLOCK_TOKENS", 16), ("MIN_BLOCK_CLASSES", 50)):
        set_value(MODULE, name, value)


def reference(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    wide: torch.dtype = F64,
    bias: Tensor | None = None,
    vocab_size: int | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    num_items: Any = None,
    outputs: Any = (),
) -> tuple[Tensor, dict[str, Tensor]]:
    """cross_entropy's docstring in torch's words, from logits of hidden's dtype on in `wide`."""
    z = linear(hidden, weight, bias).to(wide)[..., :vocab_size] * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    size = z.shape[-1]
    weights = torch.ones(size, dtype=wide) if class_weight is None else class_weight.to(wide)
    is_counted = target != ignore_index
    known = target.long().where(is_counted, 0)
    q = torch.nn.functional.one_hot(known, size).to(wide)
    q = weights * ((1 - label_smoothing) * q + label_smoothing / size)
    lse = torch.logsumexp(z, -1)
    loss = (q * (lse.unsqueeze(-1) - z)).sum(-1) + z_loss * lse.square()
    loss = loss.where(is_counted, 0)
    log_probs = z - lse.unsqueeze(-1)
    values = {
        "loss": loss,
        "lse": lse,
        "entropy": -(log_probs.exp() * log_probs).sum(-1),
        "accuracy": (z.argmax(-1) == target).to(wide),
    }
    named = {name: value.where(is_counted, 0).detach() for name, value in values.items()}
    if reduction == "mean":
        loss = (
            loss.sum() / (weights[known] * is_counted).sum()
            if num_items is None
            else (loss.sum() / float(num_items))
        )
    return loss.sum() if reduction == "sum" else loss, named


def layer(
    dtype: torch.dtype, *, tokens: int = TOKENS, ignore_index: int = -100, **_: Any
) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    target = torch.randint(CLASSES - 13, (tokens,), generator=random)
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
    function: Callable[..., Any], given: dict[str, Tensor], dtype: torch.dtype, **options: Any
) -> list[Tensor]:
    """Loss, gradients of hidden, weight and bias, and outputs by name; in float64."""
    inputs = [
        given[name].to(dtype, copy=True).requires_grad_() for name in ("hidden", "weight", "bias")
    ]
    hidden, weight, bias = inputs
    result = function(hidden, weight, given["target"], bias=bias, **options)
    loss, named = result if isinstance(result, tuple) else (result, {})
    wanted = [named[name] for name in options.get("outputs", ())]
    return [t.detach().double() for t in (loss, *gradients(loss, *inputs), *wanted)]


def check_near(actual: Tensor, exact: Tensor, torchs: Tensor, dtype: torch.dtype) -> None:
    """No further off than torch in the same dtype, half as much again and a rounding."""
    floor = torch.finfo(dtype).eps + 8 * torch.finfo(F32).eps
    assert actual.shape == exact.shape
    size = exact.abs().max().clamp(min=1e-3)
    error, allowed = (actual - exact).abs().max(), 1.5 * (torchs - exact).abs().max()
    assert error <= allowed + floor * size, (error, allowed, floor * size)


def weights(size: int = CLASSES) -> Tensor:
    return torch.linspace(0.1, 3, size)


ALL = ("loss", "lse", "entropy", "accuracy")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "num_items": {"num_items": 17},
    "num_items_tensor": {"num_items": torch.tensor([17])},
    "weighted": {"class_weight": weights(), "label_smoothing": 0.1},
    "weighted_none": {"class_weight": weights(), "reduction": "none", "outputs": ALL},
    "capped": {"softcap": 5.0, "logit_scale": 0.7, "z_loss": 1e-3, "outputs": ALL},
    "capped_none": {"softcap": 5.0, "z_loss": 1e-3, "label_smoothing": 0.2, "reduction": "none"},
    "padded": {"vocab_size": CLASSES - 13, "label_smoothing": 0.1, "outputs": ("entropy",)},
    "ignored_class": {"ignore_index": 7, "outputs": ("lse",)},
}
