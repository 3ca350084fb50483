"""Updates of weights by gradients that are in memory.

Each element is read once, updated in fp32 and written once. There are no atomic additions: the same
call gives the same bits. Elements count from the weight's first, in memory order.

Weights are stored with one rounding, by the formulas of docs/design/optim.md and of
optimizer_kernels.h, to the last bit. bfloat16 is rounded by integers: a GPU's
conversion has another NaN, and a memory-bound kernel has the instructions to spare.

AdaLomo passes over a matrix and its gradient tile by tile. Sums within a tile are of fp32 and in a
fixed order; those of tiles, in float64, are the launcher's.
"""

import triton
import triton.language as tl
from ringcomm.kernels.logit_rows import base_of

NAN_BITS = tl.constexpr(0x7FC00000)

# Numbers that vary from call to call must not cause recompilation, not even the value 1.
VARYING = ("lead", "num_elems", "num_rows", "num_tokens", "key", "first_elem", "padding_idx")


# ---- random bits


@triton.jit
def mix(x):
    """A permutation of the 32-bit numbers in which each bit depends on all."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def random_bits(key, elem):
    """16 bits of the element of a 64-bit number, by the seed's key."""
    low = elem.to(tl.uint32) ^ key.to(tl.uint32)
    return mix(mix(low) + (elem >> 32).to(tl.uint32)) >> 16


# ---- the numbers of an update


@triton.jit
def used_gradient(grad, scale, clip_value):
    """The gradient times a factor, then within +-clip_value; NaN stays."""
    grad = grad.to(tl.float32) * scale
    grad = tl.where(grad > clip_value, clip_value, grad)
    return tl.where(grad < -clip_value, -clip_value, grad)


# ---- memory


# `low` is the address of what bfloat16 weights miss of the bits of fp32, or None.


@triton.jit
def load_weight(weight, low, at, mask):
    """The weights at some places, in fp32; masked-out elements are undefined."""
    high = tl.load(weight + at, mask=mask)
    if low is None:
        value = high.to(tl.float32)
    else:
        bits = high.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        rest = tl.load(low + at, mask=mask).to(tl.int32).to(tl.uint32, bitcast=True)
        value = (bits + rest).to(tl.float32, bitcast=True)
    return value


@triton.jit
def store_weight(weight, low, at, value, key, elem, mask):
    """Rounds once: split if there is `low`, by random bits if there is a key, or to nearest."""
    if weight.dtype.element_ty == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        bits = tl.where(value == value, bits, NAN_BITS).to(tl.uint32)
        if low is not None:
            rounded = bits + 0x8000
        elif key is not None:
            rounded = bits + random_bits(key, elem)
        else:
            rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        high = (rounded >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        tl.store(weight + at, high, mask=mask)
        if low is not None:
            # The lower half of bits - (high << 16), whose lower half is that of bits.
            tl.store(low + at, bits.to(tl.uint16).to(tl.int16, bitcast=True), mask=mask)
    else:
        tl.store(weight + at, value.to(weight.dtype.element_ty), mask=mask)


# ---- SGD


@triton.jit
def step_elements(weight, low, grad, at, decay, step, scale, clip_value, key, elem, mask):
    """w <- w * decay + g * step."""
    g = used_gradient(tl.load(grad + at, mask=mask), scale, clip_value)
    updated = tl.fma(g, step, load_weight(weight, low, at, mask) * decay)
    store_weight(weight, low, at, updated, key, elem, mask)


@triton.jit(do_not_specialize=VARYING)
def sgd_kernel(
    weight,
    low,
    grad,
    lead,
    num_elems,
    decay,
    step,
    scale,
    clip_value,
    key,
    first_elem,
    BLOCK: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    """sgd_update_: one program per block of positions from the boundary before the weight.

    Only partial blocks have masks, because masks prevent vector accesses.
    """
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    position = begin + tl.arange(0, BLOCK)
    weight = base_of(weight, lead)
    grad = base_of(grad, lead, IS_ALIGNED)
    if low is not None:
        low = base_of(low, lead, IS_ALIGNED)
    end = num_elems + lead
    elem = first_elem + (position - lead)
    if (begin >= lead) & (begin + BLOCK <= end):
        step_elements(weight, low, grad, position, decay, step, scale, clip_value, key, elem, None)
    else:
        mask = (position >= lead) & (position < end)
        step_elements(weight, low, grad, position, decay, step, scale, clip_value, key, elem, mask)


@triton.jit(do_not_specialize=VARYING)
def embedding_kernel(
    weight,
    low,
    grad_out,
    order,
    rows,
    begins,
    ends,
    num_rows,
    width,
    padding_idx,
    decay,
    step,
    scale,
    clip_value,
    key,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """embedding_sgd_update_: a row of the weight by the tokens order[begin:end], summed in order.

    With `rows`, program i handles the i-th of the sorted ids, and only the first of a run does
    work. Without `rows`, program i handles row i. Ids out of range are ignored.
    """
    i = tl.program_id(0).to(tl.int64)
    begin = tl.load(begins + i)
    end = tl.load(ends + i)
    if rows is None:
        row = i
        is_mine = row >= 0
        end = tl.where(row == padding_idx, begin, end)
    else:
        row = tl.load(rows + i).to(tl.int64)
        is_mine = (begin == i) & (row >= 0) & (row < num_rows) & (row != padding_idx)
    if is_mine:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = column < width
        total = tl.zeros([BLOCK], tl.float32)
        # UNROLL loads are in flight before the first of them is added.
        for idx in range(begin, end, UNROLL):
            for k in tl.static_range(UNROLL):
                is_token = idx + k < end
                token = tl.load(order + idx + k, mask=is_token, other=0)
                at = grad_out + token * width + column
                # Not mask & is_token: Triton 3.9 interprets a block with a scalar as integers.
                here = column < tl.where(is_token, width, 0)
                total += tl.load(at, mask=here, other=0.0).to(tl.float32)
        elem = row * width + column
        grad = used_gradient(total, scale, clip_value)
        updated = tl.fma(grad, step, load_weight(weight, low, elem, mask) * decay)
        store_weight(weight, low, elem, updated, key, elem, mask)


# ---- AdaLomo


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
):
    """adalomo_update_: w <- w * decay - u * step, with numbers read on the device."""
    row, column, elem, mask = tile_of(num_rows, num_cols, BLOCK_ROWS, BLOCK_COLS)
    step = tl.load(step_and_decay)
    decay = tl.load(step_and_decay + 1)
    u = update_direction(
        grad, row_factor, col_factor, row, column, elem, mask, num_rows, num_cols, scale, clip_value
    )
    updated = tl.fma(u, -step, load_weight(weight, low, elem, mask) * decay)
    store_weight(weight, low, elem, updated, key, first_elem + elem, mask)
