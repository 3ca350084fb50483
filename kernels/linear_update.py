"""The update of a linear layer's weight as the epilogue of its gradient's matrix product.

dW = grad_out^T x stays in registers, in fp32 and unrounded: the weight is read and written once,
and no gradient is. Operands come token by token, so both tiles are (tokens, features).
"""

import triton
import triton.language as tl
from ringcomm.kernels.stored_weights import (
    IS_INTERPRETED,
    VARYING,
    load_weight,
    multiply_add,
    store_weight,
    used_gradient,
)

# Row tiles that are at work side by side: their operands are in L2 for each other.
GROUP = tl.constexpr(8)


@triton.jit
def tile_origin(num_out, num_in, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr):
    """The first row and column of a program's tile: down a group of rows, then to the right."""
    num_across = tl.cdiv(num_in, BLOCK_IN)
    group, place = tl.program_id(0) // (GROUP * num_across), tl.program_id(0) % (GROUP * num_across)
    first = group * GROUP
    height = tl.minimum(tl.cdiv(num_out, BLOCK_OUT) - first, GROUP)
    return (first + place % height) * BLOCK_OUT, place // height * BLOCK_IN


@triton.jit
def add_product(total, grad_tile, x_tile):
    """The sum with a product of (out, tokens) and (tokens, in)."""
    if IS_INTERPRETED:  # whose product of bfloat16 is one of their bits
        grad_tile, x_tile = grad_tile.to(tl.float32), x_tile.to(tl.float32)
    return tl.dot(grad_tile, x_tile, total, input_precision="ieee")


@triton.jit
def update_columns(
    weight, low, product, row, column, num_out, num_in, decay, step, scale, clip_value, key,
    IS_STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """The update of some columns of a tile."""
    mask = (row < num_out)[:, None] & (column < num_in)[None, :]
    elem = row.to(tl.int64)[:, None] * num_in + column[None, :]
    low_at = None
    if low is not None:
        low_at = low + elem
    updated = load_weight(weight + elem, low_at, mask) * decay
    updated = multiply_add(used_gradient(product, scale, clip_value), step, updated)
    store_weight(weight + elem, low_at, updated, key, elem, mask, IS_STOCHASTIC)


@triton.jit
def update_tile(
    weight, low, product, first_row, first_col, num_out, num_in, decay, step, scale, clip_value,
    key, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, IS_STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """The update of a tile, one half of its columns after the other: both at once would spill."""
    row = first_row + tl.arange(0, BLOCK_OUT)
    column = first_col + tl.arange(0, BLOCK_IN // 2)
    halves = tl.permute(tl.reshape(product, (BLOCK_OUT, 2, BLOCK_IN // 2)), (0, 2, 1))
    left, right = tl.split(halves)
    update_columns(
        weight, low, left, row, column, num_out, num_in, decay, step, scale, clip_value, key,
        IS_STOCHASTIC,
    )  # fmt: skip
    update_columns(
        weight, low, right, row, column + BLOCK_IN // 2, num_out, num_in, decay, step, scale,
        clip_value, key, IS_STOCHASTIC,
    )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def described_kernel(
    weight,
    low,
    x,
    grad_out,
    num_tokens,
    num_out,
    num_in,
    decay,
    step,
    scale,
    clip_value,
    key,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    IS_STOCHASTIC: tl.constexpr,
):
    """linear_sgd_update_ where x and grad_out are descriptors, whose loads fill up with zeros."""
    first_row, first_col = tile_origin(num_out, num_in, BLOCK_OUT, BLOCK_IN)
    product = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    for token in range(0, num_tokens, BLOCK_TOKENS):
        grad_tile = tl.trans(grad_out.load([token, first_row]))
        product = add_product(product, grad_tile, x.load([token, first_col]))
    update_tile(
        weight, low, product, first_row, first_col, num_out, num_in, decay, step, scale, clip_value,
        key, BLOCK_OUT, BLOCK_IN, IS_STOCHASTIC,
    )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def addressed_kernel(
    weight,
    low,
    x,
    grad_out,
    x_stride,
    grad_stride,
    num_tokens,
    num_out,
    num_in,
    decay,
    step,
    scale,
    clip_value,
    key,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    IS_STOCHASTIC: tl.constexpr,
):
    """linear_sgd_update_ where rows begin anywhere, or the GPU has no descriptors."""
    first_row, first_col = tile_origin(num_out, num_in, BLOCK_OUT, BLOCK_IN)
    row, column = first_row + tl.arange(0, BLOCK_OUT), first_col + tl.arange(0, BLOCK_IN)
    token = tl.arange(0, BLOCK_TOKENS)
    # (out, tokens) from the start: a tile that is transposed later is not loaded ahead on sm_80.
    grad_at = grad_out + token.to(tl.int64)[None, :] * grad_stride + row[:, None]
    x_at = x + token.to(tl.int64)[:, None] * x_stride + column[None, :]
    product = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    for begin in range(0, num_tokens, BLOCK_TOKENS):
        is_token = begin + token < num_tokens
        grad_mask, x_mask = (row < num_out)[:, None], (column < num_in)[None, :]
        grad_tile = tl.load(grad_at, mask=is_token[None, :] & grad_mask, other=0.0)
        x_tile = tl.load(x_at, mask=is_token[:, None] & x_mask, other=0.0)
        product = add_product(product, grad_tile, x_tile)
        grad_at += BLOCK_TOKENS * grad_stride
        x_at += BLOCK_TOKENS * x_stride
    update_tile(
        weight, low, product, first_row, first_col, num_out, num_in, decay, step, scale, clip_value,
        key, BLOCK_OUT, BLOCK_IN, IS_STOCHASTIC,
    )  # fmt: skip
