"""Updates of weights in place (csrc/bindings/ops/weight_update_ops.cc): fakes, and AdaLomo's steps.

docs/design/optim.md has the formulas.
"""

from typing import Any

import torch
from torch import Tensor

_ops: Any = torch.ops.ringcomm


# ---- fakes, in the order of the operators


def _check_devices(*tensors: Tensor | None) -> None:
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) > 1:
        raise ValueError(
            "ringcomm: an update's tensors are on one device, got"
            f" {' and '.join(sorted(map(str, devices)))}"
        )


def _fake_update(weight: Tensor, *args: Any, low: Tensor | None = None, **options: Any) -> None:
    _check_devices(weight, low, *(arg for arg in args if isinstance(arg, Tensor)))


for _name in (
    "sgd_update_",
    "linear_sgd_update_",
    "embedding_sgd_update_",
    "adalomo_update_",
    "linear_adalomo_update_",
):
    torch.library.register_fake(f"ringcomm::{_name}", _fake_update)


@torch.library.register_fake("ringcomm::square_sums")
def _(grad: Tensor, *options: Any, **more: Any) -> tuple[Tensor, Tensor]:
    rows, cols = grad.shape
    return grad.new_empty([rows], dtype=torch.float32), grad.new_empty([cols], dtype=torch.float32)


@torch.library.register_fake("ringcomm::adalomo_squares")
def _(
    weight: Tensor,
    grad: Tensor,
    row_factor: Tensor,
    col_factor: Tensor,
    scale: float,
    *,
    low: Tensor | None = None,
    clip_value: float | None = None,
) -> Tensor:
    _check_devices(weight, grad, row_factor, col_factor, low)
    return weight.new_empty([2], dtype=torch.float32)
