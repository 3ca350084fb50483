"""Calls that cross-entropy's kernels for clusters serve, beside the CPU's operator.

On emulated GPUs (tests/python/device/test_device_losses.py) and real ones (test_triton.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ops: Any = torch.ops.ringcomm
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOKENS = 5
# ignore_index, logit_scale, softcap, label_smoothing, z_loss, reduction, wants_more
PLAIN = (-100, 1.0, 0.0, 0.0, 0.0, "mean", False)


def options_of(**changes: Any) -> tuple[Any, ...]:
    names = ("ignore_index", "logit_scale", "softcap", "label_smoothing", "z_loss", "reduction")
    return tuple({**dict(zip((*names, "wants_more"), PLAIN, strict=True)), **changes}.values())


def random_rows(width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(width)
    logits = (torch.randn(TOKENS, width, generator=generator) * 3).to(dtype)
    target = torch.randint(width, (TOKENS,), generator=generator)
    target[2] = -100
    return logits, target


def by_clusters(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    num_items: Tensor | None = None,
    num_classes: int | None = None,
    options: tuple[Any, ...] = PLAIN,
) -> Any:
    from ringcomm import _cuda  # which a build without the GPU part lacks

    classes = logits.shape[1] if num_classes is None else num_classes
    return _cuda.cross_entropy_by_clusters(logits, target, weight, num_items, classes, *options)


# Shapes, types and options that are served: clusters of 1, 2, 4 and 8.
SERVED: dict[str, dict[str, Any]] = {
    "one block": {"width": 16384},
    "odd": {"width": 33001},
    "in wider rows": {"width": 20001, "gap": 3},
    "two blocks": {"width": 50257, "options": options_of(z_loss=0.01)},
    "four blocks": {"width": 128256, "options": options_of(label_smoothing=0.1)},
    "eight blocks": {"width": 140001},
    "float32": {"width": 40000, "dtype": FP32, "options": options_of(logit_scale=0.5)},
    "float32, smooth": {"width": 9001, "dtype": FP32, "options": options_of(label_smoothing=0.1)},
    "weights": {"width": 16385, "has_weight": True},
    "padding": {"width": 20000, "num_classes": 19990},
    "sum": {"width": 16384, "options": options_of(reduction="sum")},
    "items of the host": {"width": 16384, "num_items": ("cpu", torch.float64)},
    "items of the device": {"width": 16384, "num_items": ("device", torch.int64)},
}


def check_served(name: str, device: str) -> None:
    """A case's results and gradient are those of the CPU's operator, and nothing else changes."""
    check_case(name, device, **SERVED[name])


def check_case(
    name: str,
    device: str,
    width: int,
    dtype: torch.dtype = BF16,
    gap: int = 0,
    options: tuple[Any, ...] = PLAIN,
    num_classes: int | None = None,
    has_weight: bool = False,
    num_items: tuple[str, torch.dtype] | None = None,
) -> None:
    logits, target = random_rows(width, dtype)
    classes = width if num_classes is None else num_classes
    target = target.where(target < 0, target % classes)
    weight = torch.linspace(0.5, 2, classes) if has_weight else None
    items: Tensor | None = None
    items_there: Tensor | None = None
    if num_items is not None:
        items = torch.tensor(3).to(num_items[1])
        items_there = items.to(device) if num_items[0] == "device" else items
    there = torch.full((TOKENS, width + gap), 77.0, dtype=dtype, device=device)
    rows = there[:, :width]
    rows.copy_(logits.to(device))
    version = rows._version
    results = by_clusters(
        rows,
        target.to(device),
        None if weight is None else weight.to(device),
        items_there,
        num_classes,
        options,
    )
    assert results is not None, name
    assert rows._version > version
    given = (target, weight, items, classes, *options)
    loss, by_token, denominator = _ops.cross_entropy_and_grad_(logits, *given)
    found_of_both = (results[0], results[1][:2], results[2])
    for found, wanted in zip(found_of_both, (loss, by_token[:2], denominator), strict=True):
        torch.testing.assert_close(found.cpu(), wanted, rtol=2e-6, atol=2e-6)
    rtol = 2e-5 if dtype == FP32 else 2**-7  # a unit in the last place of bfloat16
    torch.testing.assert_close(rows.cpu(), logits, rtol=rtol, atol=1e-9)
    assert not results[1][2:].cpu().any()
    assert bool((there.cpu()[:, width:] == 77).all()), name
