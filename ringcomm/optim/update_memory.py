"""What the operators that update weights allocate inside, by their arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# The blocks of linear_sgd_update_, as csrc/bindings/ops/linear_update_ops.cc makes them.
_BLOCK_ELEMS = 1 << 19
_NUM_BLOCKS, _MIN_ROWS = 16, 128


def update_bytes(func: Any, args: tuple[Any, ...], device: torch.device) -> int:
    """The most at a time, in bytes; only what grows with the weight or the tokens times it."""
    is_cpu = device.type == "cpu"
    if func is torch.ops.ringcomm.linear_adalomo_update_.default:
        weight, x, grad_out = args[:3]
        return _linear_adalomo_bytes(weight, x, grad_out, is_cpu)
    if func is torch.ops.ringcomm.linear_sgd_update_.default and is_cpu:
        weight, x, grad_out = args[:3]
        return _linear_sgd_bytes(weight, x, grad_out)
    return 0


def _linear_adalomo_bytes(weight: Tensor, x: Tensor, grad_out: Tensor, is_cpu: bool) -> int:
    """The gradient in fp32; the CPU makes its factors fp32 too. Sums, means and factors."""
    gradient = 4 * weight.numel()
    is_cast = is_cpu and x.dtype != torch.float32
    factors = 4 * (x.numel() + grad_out.numel()) if is_cast else 0
    return gradient + max(factors, 3 * 4 * sum(weight.shape))


def _linear_sgd_bytes(weight: Tensor, x: Tensor, grad_out: Tensor) -> int:
    """A block of the gradient for each thread, and x in fp32."""
    num_rows, num_cols = weight.shape
    as_fit = max(1, _BLOCK_ELEMS // max(1, num_cols))
    half = max(1, -(-num_rows // 2))
    block_rows = min(max(-(-num_rows // _NUM_BLOCKS), _MIN_ROWS), half, as_fit)
    num_blocks = -(-num_rows // block_rows)
    block = 4 * block_rows * num_cols
    in_fp32 = 0
    if x.dtype != torch.float32:
        block += 4 * block_rows * (grad_out.numel() // max(1, num_rows))
        in_fp32 = 4 * x.numel()
    return in_fp32 + block * min(num_blocks, torch.get_num_threads())
