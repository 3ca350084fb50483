"""Updates of weights by gradients that are in memory.

Each element is read once, updated in fp32 and written once. There are no atomic additions: the same
call gives the same bits. Elements count from the weight's first, in memory order.

Weights are stored with one rounding, by the formulas of docs/design/optim.md and of
optimizer_kernels.h, to the last bit. bfloat16 is rounded by integers: a GPU's
conversion has another NaN, and a memory-bound kernel has the instructions to spare.

AdaLomo is four kernels: the sums of g^2 of rows and columns; moments; the sums of u^2 and w^2; the
update. Program (p, b) of the grid (panels, bands) passes over a matrix in panel p of its columns,
tile by tile, at every num_bands-th tile of rows. Sums within a tile are of fp32 and in a fixed
order. Each kernel adds up, in float64, the parts that the programs of the kernel before have left.
"""

import triton
import triton.language as tl
from ringcomm.kernels.logit_rows import base_of

NAN_BITS = tl.constexpr(0x7FC00000)
PARTS_BLOCK = tl.constexpr(1024)  # of sums that programs left

# Numbers that vary from call to call must not cause recompilation, not even the value 1.
VARYING = ("lead", "num_elems", "num_rows", "num_tokens", "key", "first_elem", "padding_idx",
           "num_row_parts", "num_col_parts", "num_mean_parts", "num_squares")  # fmt: skip


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
def tile_of(row_tile, num_rows, num_cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """The rows and columns of a tile in the program's panel, which are there, and the elements."""
    row = row_tile.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    elem = row[:, None] * num_cols + column[None, :]
    return row, column, row < num_rows, column < num_cols, elem


@triton.jit
def total_of(parts, num_parts):
    """The sum of float64 parts."""
    total = tl.zeros([PARTS_BLOCK], tl.float64)
    for begin in range(0, num_parts, PARTS_BLOCK):
        part = begin + tl.arange(0, PARTS_BLOCK)
        total += tl.load(parts + part, mask=part < num_parts, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def tile_gradient(grad, tile, scale, clip_value):
    """The gradient of a tile, and where it is."""
    _, _, in_rows, in_cols, elem = tile
    mask = in_rows[:, None] & in_cols[None, :]
    return used_gradient(tl.load(grad + elem, mask=mask, other=0.0), scale, clip_value), elem, mask


@triton.jit
def update_direction(grad, row_moment, mean, col_factor, tile, scale, clip_value):
    """u: the gradient times its column's factor and, if it has moments, its row's."""
    u, elem, mask = tile_gradient(grad, tile, scale, clip_value)
    row, column, in_rows, in_cols, _ = tile
    if row_moment is not None:
        moment = tl.load(row_moment + row, mask=in_rows, other=1.0)
        u *= tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(moment, mean)))[:, None]
    return u * tl.load(col_factor + column, mask=in_cols, other=0.0)[None, :], elem, mask


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
    """The sums of g^2 of each panel's rows (panels, rows) and each band's columns."""
    panel, band = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    col_sum = tl.zeros([BLOCK_COLS], tl.float64)
    for row_tile in range(tl.program_id(1), tl.cdiv(num_rows, BLOCK_ROWS), tl.num_programs(1)):
        tile = tile_of(row_tile, num_rows, num_cols, BLOCK_ROWS, BLOCK_COLS)
        g, _, _ = tile_gradient(grad, tile, scale, clip_value)
        square = g * g
        tl.store(row_sums + panel * num_rows + tile[0], tl.sum(square, 1), mask=tile[2])
        col_sum += tl.sum(square, 0).to(tl.float64)
    column = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    at = col_sums + band * num_cols + column
    tl.store(at, col_sum.to(tl.float32), mask=column < num_cols)


@triton.jit
def new_moments(axis, block, share, eps, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Moves a block of a running mean to the mean squares; returns its places, mask and values."""
    moment, sums, num_parts, size, num_each = axis
    place = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    total = tl.zeros([BLOCK], tl.float64)
    for begin in range(0, num_parts, PARTS):
        part = begin + tl.arange(0, PARTS)
        at = sums + part.to(tl.int64)[:, None] * size + place[None, :]
        some = tl.load(at, mask=(part < num_parts)[:, None] & mask[None, :], other=0.0)
        total += tl.sum(some.to(tl.float64), 0)
    mean = (total / num_each).to(tl.float32) + eps
    old = tl.load(moment + place, mask=mask, other=0.0)
    # torch's lerp, which starts from the end that is nearer.
    near_old, near_mean = old + share * (mean - old), mean - (mean - old) * (1.0 - share)
    new = tl.where(share < 0.5, near_old, near_mean)
    tl.store(moment + place, new, mask=mask)
    return place, mask, new


@triton.jit(do_not_specialize=VARYING)
def moments_kernel(
    col_moment,
    row_moment,
    row_sums,
    col_sums,
    num_row_parts,
    num_col_parts,
    col_factor,
    row_mean,
    num_rows,
    num_cols,
    share,
    eps,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """adalomo_moments_: blocks of rows, then of columns; the mean of rows in parts of blocks."""
    block = tl.program_id(0)
    num_row_blocks = 0 if row_moment is None else tl.cdiv(num_rows, BLOCK)
    if block < num_row_blocks:
        if row_moment is not None:
            rows = (row_moment, row_sums, num_row_parts, num_rows, num_cols)
            _, mask, new = new_moments(rows, block, share, eps, PARTS, BLOCK)
            total = tl.sum(tl.where(mask, new, 0.0).to(tl.float64), 0)
            tl.store(row_mean + block, total / num_rows)
    else:
        columns = (col_moment, col_sums, num_col_parts, num_cols, num_rows)
        place, mask, new = new_moments(columns, block - num_row_blocks, share, eps, PARTS, BLOCK)
        tl.store(col_factor + place, tl.div_rn(1.0, tl.sqrt_rn(new)), mask=mask)


@triton.jit(do_not_specialize=VARYING)
def update_squares_kernel(
    weight,
    low,
    grad,
    row_moment,
    col_factor,
    row_mean,
    num_mean_parts,
    squares,
    num_rows,
    num_cols,
    scale,
    clip_value,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """The sums of u^2 and of w^2 of each program: (2, programs)."""
    mean = total_of(row_mean, num_mean_parts).to(tl.float32)
    of_updates, of_weights = tl.zeros([BLOCK_ROWS], tl.float64), tl.zeros([BLOCK_ROWS], tl.float64)
    for row_tile in range(tl.program_id(1), tl.cdiv(num_rows, BLOCK_ROWS), tl.num_programs(1)):
        tile = tile_of(row_tile, num_rows, num_cols, BLOCK_ROWS, BLOCK_COLS)
        u, elem, mask = update_direction(
            grad, row_moment, mean, col_factor, tile, scale, clip_value
        )
        w = tl.where(mask, load_weight(weight, low, elem, mask), 0.0)
        of_updates += tl.sum(u * u, 1).to(tl.float64)
        of_weights += tl.sum(w * w, 1).to(tl.float64)
    at = squares + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(at, tl.sum(of_updates, 0))
    tl.store(at + tl.num_programs(0) * tl.num_programs(1), tl.sum(of_weights, 0))


@triton.jit
def rms_of(squares, num_squares, num_elems):
    """The root of the mean of num_elems squares."""
    return tl.sqrt_rn((total_of(squares, num_squares) / num_elems).to(tl.float32))


@triton.jit(do_not_specialize=VARYING)
def adalomo_kernel(
    weight,
    low,
    grad,
    row_moment,
    col_factor,
    row_mean,
    num_mean_parts,
    squares,
    num_squares,
    num_rows,
    num_cols,
    num_elems,
    scale,
    clip_value,
    lr,
    weight_decay,
    least_rms,
    clip_threshold,
    key,
    first_elem,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """adalomo_update_: w <- w * decay - u * step. num_elems: of the full weight."""
    mean = total_of(row_mean, num_mean_parts).to(tl.float32)
    excess = tl.div_rn(rms_of(squares, num_squares, num_elems), clip_threshold)
    weight_rms = rms_of(squares + num_squares, num_squares, num_elems)
    # NaN stays.
    size = lr * tl.where(weight_rms < least_rms, least_rms, weight_rms)
    step = tl.div_rn(size, tl.where(excess < 1.0, 1.0, excess))
    decay = tl.fma(-size, weight_decay, 1.0)
    for row_tile in range(tl.program_id(1), tl.cdiv(num_rows, BLOCK_ROWS), tl.num_programs(1)):
        tile = tile_of(row_tile, num_rows, num_cols, BLOCK_ROWS, BLOCK_COLS)
        u, elem, mask = update_direction(
            grad, row_moment, mean, col_factor, tile, scale, clip_value
        )
        updated = tl.fma(u, -step, load_weight(weight, low, elem, mask) * decay)
        store_weight(weight, low, elem, updated, key, first_elem + elem, mask)
