"""Blocks of a linear layer's logits, and the gradients of the layer summed over them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringcomm.backward_pass import keeps_graph
from ringcomm.ops.triton_kernels import add_product

_ops: Any = torch.ops.ringcomm

# Bytes of a block's logits on a CPU; 16-bit logits sometimes need an additional fp32 copy. Smaller
# blocks make the products slower, larger ones only need more memory.
BLOCK_BYTES = 64 << 20
MIN_BLOCK_TOKENS = 64
MIN_BLOCK_CLASSES = 256
# On CUDA, a block of tokens reads the whole weight, and reads and writes the sum of its gradient.
# Blocks are therefore few and large: a part of the weight's bytes, and at least these.
CUDA_BLOCK_BYTES = 256 << 20
CUDA_PARTS_OF_WEIGHT = 2
# A product computes whole tiles of 128 rows and columns, also where a block ends within one.
CUDA_TILE = 128


# ---- blocks


def _slices(total: int, step: int) -> list[slice]:
    return [slice(begin, min(begin + step, total)) for begin in range(0, total, step)]


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type not in ("cpu", "meta")


def token_blocks(rows: Tensor, weight: Tensor) -> list[slice]:
    """The tokens of each block of logits (tokens, all classes of this rank)."""
    row_bytes = max(1, len(weight)) * rows.element_size()
    step = max(MIN_BLOCK_TOKENS, BLOCK_BYTES // row_bytes)
    if _is_on_gpu(rows):
        most_bytes = max(CUDA_BLOCK_BYTES, weight.nbytes // CUDA_PARTS_OF_WEIGHT)
        step = max(1, most_bytes // row_bytes // CUDA_TILE) * CUDA_TILE
    return _slices(len(rows), step)


def class_blocks(rows: Tensor, weight: Tensor) -> list[slice]:
    """The classes of each block of logits (all tokens, classes).

    A block's gradient of the weight is in fp32 beside its logits, so blocks stay small on a GPU.
    """
    column_bytes = max(1, len(rows)) * rows.element_size()
    step = max(MIN_BLOCK_CLASSES, BLOCK_BYTES // column_bytes)
    if _is_on_gpu(rows):
        step = max(1, step // CUDA_TILE) * CUDA_TILE
    return _slices(len(weight), step)


# ---- sums


class LayerGradients:
    """Accumulates the gradients of hidden states, weight and bias over blocks of tokens.

    The weight's gradient is summed in `sum_dtype`. None means float32 on a CPU, and on CUDA the
    weight's dtype: a product accumulates in fp32 and rounds once per block. The bias's is in
    float32. Gradients that are not wanted are None.
    """

    def __init__(
        self,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        wanted: Sequence[bool],
        sum_dtype: torch.dtype | None,
    ) -> None:
        if sum_dtype is None:
            sum_dtype = weight.dtype if _is_on_gpu(weight) else torch.float32
        self.rows = torch.empty_like(rows) if wanted[0] else None
        self.weight = torch.empty_like(weight, dtype=sum_dtype) if wanted[1] else None
        if self.weight is not None and not len(rows):
            self.weight.zero_()
        has_bias = wanted[2] and bias is not None
        self.bias = weight.new_zeros(len(weight), dtype=torch.float32) if has_bias else None

    def add(self, grad_logits: Tensor, rows: Tensor, weight: Tensor, block: slice) -> None:
        """Adds the gradients of a block of tokens; the first block initializes the sums."""
        if self.rows is not None:
            torch.mm(grad_logits, weight, out=self.rows[block])
        if self.weight is not None:
            beta = 0.0 if block.start == 0 else 1.0
            add_product(self.weight, grad_logits.t(), rows[block], beta=beta)
        if self.bias is not None:
            self.bias += grad_logits.sum(0, dtype=torch.float32)


def scaled(grad: Tensor | None, factor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A saved gradient times a factor in float32, rounded to a dtype, without a copy in float32.

    Overwrites a gradient that has the dtype, unless the graph is retained.
    """
    if grad is None:
        return None
    # A compiler decides itself which tensors it overwrites.
    if torch.compiler.is_compiling():
        return (grad.float() * factor).to(dtype)
    if grad.dtype == dtype and not keeps_graph():
        _ops.scale_(grad, factor)
        return grad
    result = torch.empty_like(grad, dtype=dtype)
    for block in _slices(len(grad), max(1, BLOCK_BYTES * len(grad) // max(1, 4 * grad.numel()))):
        result[block] = grad[block].float() * factor
    return result
