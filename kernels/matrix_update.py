"""AdaLomo's passes over a matrix and its gradient, tile by tile.

Sums within a tile are of fp32 and in a fixed order; those of tiles, in float64, are the launcher's.
"""

import triton
import triton.language as tl
from ringcomm.kernels.stored_weights import (
    VARYING,
    load_weight,
    multiply_add,
    store_weight,
    used_gradient,
)


@triton.jit
def tile_of(num_rows, num_cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """A program's rows, columns, elements and their mask; tiles are ordered along rows."""
    num_across = tl.cdiv(num_cols, BLOCK_COLS)
    row_tile = (tl.program_id(0) // num_across).to(tl.int64)
    row = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(0) % num_across * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = (row < num_rows)[:, None] & (column < num_cols)[None, :]
    return row, column, row[:, None] * num_cols + column[None, :], mask


@triton.jit
def update_direction(
    grad, row_factor, col_factor, row, column, elem, mask, num_rows, num_cols, scale, clip_value
):
    """u: the gradient times its row's and its column's factor."""
    g = used_gradient(tl.load(grad + elem, mask=mask, other=0.0), scale, clip_value)
    of_row = tl.load(row_factor + row, mask=row < num_rows, other=0.0)
    of_col = tl.load(col_factor + column, mask=column < num_cols, other=0.0)
    return g * of_row[:, None] * of_col[None, :]


@triton.jit(do_not_specialize=VARYING)
def square_sums_kernel(
    grad,
    row_sums,
    col_sums,
    num_rows,
    num_cols,
    scale,
    clip_value,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """The sums of g^2 of each tile's rows (column tiles, rows) and columns (row tiles, columns)."""
    num_across = tl.cdiv(num_cols, BLOCK_COLS)
    row, column, elem, mask = tile_of(num_rows, num_cols, BLOCK_ROWS, BLOCK_COLS)
    g = used_gradient(tl.load(grad + elem, mask=mask, other=0.0), scale, clip_value)
    square = g * g
    row_sums_at = row_sums + (tl.program_id(0) % num_across).to(tl.int64) * num_rows + row
    tl.store(row_sums_at, tl.sum(square, 1).to(tl.float64), mask=row < num_rows)
    col_sums_at = col_sums + (tl.program_id(0) // num_across).to(tl.int64) * num_cols + column
    tl.store(col_sums_at, tl.sum(square, 0).to(tl.float64), mask=column < num_cols)


@triton.jit(do_not_specialize=VARYING)
def update_squares_kernel(
    weight,
    low,
    grad,
    row_factor,
    col_factor,
    sums,
    num_rows,
    num_cols,
    scale,
    clip_value,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """The sums of u^2 and of w^2 of each tile: (2, tiles)."""
    row, column, elem, mask = tile_of(num_rows, num_cols, BLOCK_ROWS, BLOCK_COLS)
    u = update_direction(
        grad, row_factor, col_factor, row, column, elem, mask, num_rows, num_cols, scale, clip_value
    )
    w = tl.where(mask, load_weight(weight, low, elem, mask), 0.0)
    tl.store(sums + tl.program_id(0), tl.sum(tl.sum(u * u, 1).to(tl.float64), 0))
    of_weights = sums + tl.num_programs(0) + tl.program_id(0)
    tl.store(of_weights, tl.sum(tl.sum(w * w, 1).to(tl.float64), 0))


@triton.jit(do_not_specialize=VARYING)
def adalomo_kernel(
    weight,
    low,
    grad,
    row_factor,
    col_factor,
    step_and_decay,
    num_rows,
    num_cols,
    scale,
    clip_value,
    key,
    first_elem,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    IS_STOCHASTIC: tl.constexpr,
):
    """adalomo_update_: w <- w * decay - u * step, with numbers read on the device."""
    row, column, elem, mask = tile_of(num_rows, num_cols, BLOCK_ROWS, BLOCK_COLS)
    step = tl.load(step_and_decay)
    decay = tl.load(step_and_decay + 1)
    u = update_direction(
        grad, row_factor, col_factor, row, column, elem, mask, num_rows, num_cols, scale, clip_value
    )
    updated = multiply_add(u, -step, load_weight(weight, low, elem, mask) * decay)
    store_weight(weight, low, elem, updated, key, first_elem + elem, mask, IS_STOCHASTIC)
