"""Rows of logits at any alignment, read and written 16 bytes at a time.

A row of an odd number of elements begins at any address. Its whole 16-byte vectors are its bulk:
the compiler sees that their first element and their number are multiples of VEC, and makes loads
and stores of 16 bytes of them. The fewer than VEC elements before and after the bulk are its edges:
2 * VEC masked lanes. Nothing outside the row is accessed.

Positions are elements from `base`, the last 16-byte boundary at or before the tensor, and are
64-bit; columns count from the row's beginning and are 32-bit.

Functions take a row as its `span` (base, begin, num_elems, num_head, num_bulk), `scaling`
(logit_scale, softcap or None), which makes z of what is in memory, and `smoothing` (smooth or None,
weights of the row's classes or None). Triton 3.6 cannot compare a tuple with None.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

# Means "no logit" where a difference must not be NaN. Smaller than any number but -infinity.
LOWEST = tl.constexpr(-3.4028234663852886e38)
NO_INDEX = tl.constexpr(1 << 30)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp(x):
    """e^x for x <= 0; 0 where that is less than the smallest normal number.

    tl.exp keeps denormals, which costs 3 more instructions per element, of about 17.
    """
    return libdevice.exp2(x * LOG2_E)


@triton.jit
def base_of(tensor, lead, IS_ALIGNED: tl.constexpr = True):
    """The address `lead` elements before the tensor; IS_ALIGNED: it is a 16-byte boundary."""
    base = tensor - lead
    if IS_ALIGNED:
        base = tl.multiple_of(base, 16)
    return base


@triton.jit
def span_of(tensor, lead, row, stride, num_elems, VEC: tl.constexpr):
    """A row's base, its begin, and the numbers of its elements, before its bulk and in its bulk."""
    begin = lead + row * stride
    first = (begin + VEC - 1) // VEC * VEC
    num_bulk = (begin + num_elems) // VEC * VEC - first
    num_head = (first - begin).to(tl.int32)
    num_bulk = tl.multiple_of(tl.maximum(num_bulk, 0).to(tl.int32), VEC)
    return base_of(tensor, lead), begin, num_elems, num_head, num_bulk


@triton.jit
def edge_columns(span, VEC: tl.constexpr):
    """The columns of both edges, and which lanes have one."""
    _, _, num_elems, num_head, num_bulk = span
    lane = tl.arange(0, 2 * VEC)
    column = tl.where(lane < VEC, lane, num_head + num_bulk + lane - VEC)
    end = tl.where(lane < VEC, tl.minimum(num_head, num_elems), num_elems)
    return column, column < end


@triton.jit
def bulk_at(base, begin, num_head, VEC: tl.constexpr, IS_ALIGNED: tl.constexpr = True):
    """The address of a row's bulk; not IS_ALIGNED: of what another row has in its bulk."""
    place = begin + num_head
    if IS_ALIGNED:
        place = tl.multiple_of(place, VEC)
    return base + place


@triton.jit
def tanh(x):
    """By a polynomial where 1 - e^-2|x| would cancel."""
    magnitude = tl.abs(x)
    power = exp(-2.0 * magnitude)
    large = (1.0 - power) / (1.0 + power)
    square = x * x
    p = -5.70498872745e-3 * square + 2.06390887954e-2
    p = p * square - 5.37397155531e-2
    p = p * square + 1.33314422036e-1
    p = p * square - 3.33332819422e-1
    small = p * square * x + x
    return tl.where(magnitude < 0.625, small, tl.where(x < 0, -large, large))


@triton.jit
def through_softcap(grad, x, scaling):
    """Times the softcap's derivative, sech^2. 1 - tanh^2 would cancel where |x| is large."""
    logit_scale, softcap = scaling
    if softcap is not None:
        power = exp(-2.0 * tl.abs(x.to(tl.float32) * logit_scale / softcap))
        grad *= 4.0 * power / ((1.0 + power) * (1.0 + power))
    return grad


@triton.jit
def logit(x, scaling):
    """z of what is in memory, in fp32."""
    logit_scale, softcap = scaling
    z = x.to(tl.float32) * logit_scale
    if softcap is not None:
        z = tanh(z / softcap) * softcap
    return z


@triton.jit
def scan_row(
    span,
    weight,
    scaling,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
    WANTS_WEIGHTED: tl.constexpr,
    WANTS_MORE: tl.constexpr,
    KEEP: tl.constexpr,
):
    """max, sum, weighted, entropy and argmax of a row, as SoftmaxStats has them, in one read.

    Each lane has its own maximum and sums relative to it; they are combined at the end. The loop
    has no barrier and one exponential per element, e^-|z - max|, which rescales either the sum or
    the new element. `weight` is that of the row's first class, or None.
    """
    base, begin, num_elems, num_head, num_bulk = span
    lanes = tl.arange(0, BLOCK)
    lane_max = tl.full([BLOCK], LOWEST, tl.float32)
    lane_sum = tl.zeros([BLOCK], tl.float32)
    lane_weighted = tl.zeros([BLOCK], tl.float32)
    lane_entropy = tl.zeros([BLOCK], tl.float32)
    lane_idx = tl.full([BLOCK], NO_INDEX, tl.int32)
    bulk = bulk_at(base, begin, num_head, VEC)
    for offset in range(0, num_bulk, BLOCK):
        at = offset + lanes
        mask = at < num_bulk
        x = tl.load(bulk + at, mask=mask, other=0.0, eviction_policy=KEEP)
        z = tl.where(mask, logit(x, scaling), float("-inf"))
        above = z - lane_max
        is_new = above > 0
        distance = -tl.abs(above)
        power = exp(distance)
        if WANTS_MORE:
            moved = power * tl.where(is_new, lane_entropy + lane_sum * distance, distance)
            moved = tl.where(power == 0, 0.0, moved)  # 0 times -infinity is 0 here
            lane_entropy = tl.where(is_new, moved, lane_entropy + moved)
            lane_idx = tl.where(is_new, num_head + at, lane_idx)
        lane_sum = tl.where(is_new, lane_sum * power + 1.0, lane_sum + power)
        lane_max = tl.maximum(lane_max, z)
        if WANTS_WEIGHTED:
            lane_weighted += weighted(z, weight, num_head + at, mask)

    column, mask = edge_columns(span, VEC)
    x = tl.load(base + begin + column, mask=mask, other=0.0)
    edge = tl.where(mask, logit(x, scaling), float("-inf"))
    row_max = tl.maximum(tl.max(lane_max, 0), tl.max(edge, 0))
    factor = exp(lane_max - row_max)
    power = exp(edge - row_max)
    row_sum = tl.sum(lane_sum * factor, 0) + tl.sum(power, 0)
    row_weighted = 0.0
    if WANTS_WEIGHTED:
        row_weighted = tl.sum(lane_weighted, 0) + tl.sum(weighted(edge, weight, column, mask), 0)
    row_entropy = 0.0
    row_idx = NO_INDEX
    if WANTS_MORE:
        moved = factor * (lane_entropy + lane_sum * (lane_max - row_max))
        row_entropy = tl.sum(tl.where((factor == 0) | (lane_sum == 0), 0.0, moved), 0)
        row_entropy += tl.sum(tl.where(power == 0, 0.0, power * (edge - row_max)), 0)
        bulk_idx = tl.min(tl.where(lane_max == row_max, lane_idx, NO_INDEX), 0)
        edge_idx = tl.min(tl.where(mask & (edge == row_max), column, NO_INDEX), 0)
        row_idx = first_index(tl.minimum(bulk_idx, edge_idx), num_elems)
    return (
        tl.where(row_sum == 0, float("-inf"), row_max),
        row_sum,
        row_weighted,
        row_entropy,
        row_idx,
    )


@triton.jit
def weighted(z, weight, column, mask):
    """Terms of the weighted sum; 0 where there is no element."""
    if weight is not None:
        z *= tl.load(weight + column, mask=mask, other=0.0)
    return tl.where(mask, z, 0.0)


@triton.jit
def first_index(found, num_elems):
    """If no logit is above -infinity, the first counts as the largest."""
    return tl.where((found == NO_INDEX) & (num_elems > 0), 0, found)


@triton.jit
def gradient(
    x, power, column, mask, prob, smoothing, scaling, num_classes, HAS_PADDING: tl.constexpr
):
    """(prob * e^(z - max) - smooth * weight) * dz/dx / logit_scale: all but the target's part."""
    grad = power * prob
    smooth, weight = smoothing
    if smooth is not None:
        if weight is None:
            grad -= smooth
        else:
            classes = mask & (column < num_classes)
            grad -= smooth * tl.load(weight + column, mask=classes, other=0.0)
    grad = through_softcap(grad, x, scaling)
    if HAS_PADDING:
        grad = tl.where(column < num_classes, grad, 0.0)
    return grad


@triton.jit
def write_target(to_row, target_idx, x, row_max, prob, target, smoothing, scaling):
    """The target's own gradient, over what the row's threads have written there.

    This is separate because comparing each column with the target's would cost every element of the
    row two instructions and a register.
    """
    is_here = target_idx >= 0
    grad = exp(logit(x, scaling) - row_max) * prob
    smooth, weight = smoothing
    if smooth is not None:
        if weight is None:
            grad -= smooth
        else:
            grad -= smooth * tl.load(weight + target_idx, mask=is_here, other=0.0)
    grad -= target
    grad = through_softcap(grad, x, scaling)
    tl.debug_barrier()
    tl.store(to_row + target_idx, grad.to(to_row.dtype.element_ty), mask=is_here)


@triton.jit
def write_gradient(
    span,
    to_base,
    to_begin,
    num_classes,
    row_max,
    prob,
    smoothing,
    scaling,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    """The row's gradients without the target's part, in reverse order: the last were read last.

    `to` may be the logits: each element is read by the thread that writes it. Where rows of both
    begin at different places in their vectors (not IS_ALIGNED), stores are of single elements.
    """
    base, begin, _, num_head, num_bulk = span
    lanes = tl.arange(0, BLOCK)
    bulk = bulk_at(base, begin, num_head, VEC)
    to_bulk = bulk_at(to_base, to_begin, num_head, VEC, IS_ALIGNED)
    num_blocks = tl.cdiv(num_bulk, BLOCK)
    for i in range(num_blocks):
        at = (num_blocks - 1 - i) * BLOCK + lanes
        mask = at < num_bulk
        x = tl.load(bulk + at, mask=mask, other=0.0, eviction_policy="evict_first")
        power = exp(logit(x, scaling) - row_max)
        grad = gradient(
            x, power, num_head + at, mask, prob, smoothing, scaling, num_classes, HAS_PADDING
        )
        tl.store(to_bulk + at, grad.to(to_base.dtype.element_ty), mask=mask)
    column, mask = edge_columns(span, VEC)
    x = tl.load(base + begin + column, mask=mask, other=0.0)
    power = exp(logit(x, scaling) - row_max)
    grad = gradient(x, power, column, mask, prob, smoothing, scaling, num_classes, HAS_PADDING)
    tl.store(to_base + to_begin + column, grad.to(to_base.dtype.element_ty), mask=mask)


@triton.jit
def write_zeros(
    span, to_base, to_begin, VEC: tl.constexpr, BLOCK: tl.constexpr, IS_ALIGNED: tl.constexpr
):
    """An ignored token's gradients."""
    _, _, _, num_head, num_bulk = span
    lanes = tl.arange(0, BLOCK)
    to_bulk = bulk_at(to_base, to_begin, num_head, VEC, IS_ALIGNED)
    zeros = tl.zeros([BLOCK], to_base.dtype.element_ty)
    for offset in range(0, num_bulk, BLOCK):
        tl.store(to_bulk + offset + lanes, zeros, mask=offset + lanes < num_bulk)
    column, mask = edge_columns(span, VEC)
    edge = tl.zeros([2 * VEC], to_base.dtype.element_ty)
    tl.store(to_base + to_begin + column, edge, mask=mask)
