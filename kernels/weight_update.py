"""Updates of weights by gradients that are in memory.

Each element is read once, updated in fp32 and written once. There are no atomic additions: the same
call gives the same bits. Elements count from the weight's first, in memory order.
"""

import triton
import triton.language as tl
from ringcomm.kernels.logit_rows import base_of
from ringcomm.kernels.stored_weights import (
    VARYING,
    load_weight,
    multiply_add,
    store_weight,
    used_gradient,
)

# ---- SGD


@triton.jit
def step_elements(
    weight, low, grad, at, decay, step, scale, clip_value, key, elem, mask,
    IS_STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """w <- w * decay + g * step."""
    g = used_gradient(tl.load(grad + at, mask=mask), scale, clip_value)
    updated = multiply_add(g, step, load_weight(weight, low, at, mask) * decay)
    store_weight(weight, low, at, updated, key, elem, mask, IS_STOCHASTIC)


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
    IS_STOCHASTIC: tl.constexpr,
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
        step_elements(
            weight, low, grad, position, decay, step, scale, clip_value, key, elem, None,
            IS_STOCHASTIC,
        )  # fmt: skip
    else:
        mask = (position >= lead) & (position < end)
        step_elements(
            weight, low, grad, position, decay, step, scale, clip_value, key, elem, mask,
            IS_STOCHASTIC,
        )  # fmt: skip


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
    IS_STOCHASTIC: tl.constexpr,
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
        updated = multiply_add(grad, step, load_weight(weight, low, elem, mask) * decay)
        store_weight(weight, low, elem, updated, key, elem, mask, IS_STOCHASTIC)
