"""The passes of cross-entropy over tensors on a GPU: torch_cross_entropy.cc in Triton.

Stats are of shape (tokens + 1, 6): max, sum, target, weighted, entropy and argmax (an int32's bits)
of each token, and an entry that describes the shard. Formulas are there and in tables.h.
One program has one row of logits, or a block of tokens; there are no atomic additions, so results
are deterministic. Values that would force a host synchronization (the denominator, the gradient of
the loss, whether a target is a class) are read inside the kernels. A target that is not a class
makes its token's loss and gradient NaN.
"""

import triton
import triton.language as tl
from ringcomm.kernels.logit_rows import (
    NO_INDEX,
    base_of,
    bulk_at,
    edge_columns,
    exp,
    first_index,
    gradient,
    logit,
    scan_row,
    span_of,
    weighted,
    write_gradient,
    write_target,
    write_zeros,
)

# Integers that vary from call to call must not cause recompilation. Strides stay specialized: a row
# of a multiple of 16 elements needs fewer instructions.
VARYING = (
    *("lead", "to_lead", "num_tokens", "width", "num_classes", "vocab_start", "vocab_size"),
    *("ignore_index", "grad_loss_stride", "digest"),
)


@triton.jit
def stats_at(stats, row):
    """A token's stats, and the same address typed as argmax."""
    entry = stats + row * 6
    return entry, (entry + 5).to(tl.pointer_type(tl.int32))


@triton.jit
def store_stats(stats, row, row_max, row_sum, target, weighted, entropy, argmax, mask=None):
    """Six words."""
    entry, argmax_at = stats_at(stats, row)
    tl.store(entry, row_max, mask=mask)
    tl.store(entry + 1, row_sum, mask=mask)
    tl.store(entry + 2, target, mask=mask)
    tl.store(entry + 3, weighted, mask=mask)
    tl.store(entry + 4, entropy, mask=mask)
    tl.store(argmax_at, argmax, mask=mask)


@triton.jit
def index_in_row(token_target, vocab_start, num_classes):
    """The column of a target; -1 where it is in another shard."""
    column = token_target - vocab_start
    return tl.where((column >= 0) & (column < num_classes), column, -1).to(tl.int32)


@triton.jit
def target_of(span, target_idx):
    """The target's logit as it is in memory; 0, whose z is 0, where it is in another shard."""
    base, begin, _, _, _ = span
    return tl.load(base + begin + target_idx, mask=target_idx >= 0, other=0.0)


@triton.jit
def weight_of(weight, token_target, is_class):
    """The weight of a target's class; 0 where it is not a class."""
    if weight is None:
        found = tl.where(is_class, 1.0, 0.0)
    else:
        found = tl.load(weight + token_target, mask=is_class, other=0.0)
    return found


@triton.jit
def found_vocab_size(stats, num_tokens, vocab_size):
    """The number of classes of all shards; 0 if the merge found that they do not fit."""
    entry, _ = stats_at(stats, num_tokens)
    size = tl.load(entry + 2)
    fits = (size > 0) & ((vocab_size < 0) | (size == vocab_size))
    return tl.where(fits, size, 0.0).to(tl.int64)


@triton.jit
def coefficients(
    token_target, row_max, row_sum, weights, scale, vocab_size, penalties, SMOOTHS: tl.constexpr
):
    """prob, smooth and target of LogitGrad times `scale`; NaN where the target is not a class.

    `weights` (of the classes, their sum) may be None, `penalties` are (label_smoothing, z_loss).
    """
    weight, weight_sum = weights
    label_smoothing, z_loss = penalties
    is_class = (token_target >= 0) & (token_target < vocab_size)
    scale = tl.where(is_class, scale, float("nan"))
    target = (1.0 - label_smoothing) * weight_of(weight, token_target, is_class)
    prob = target + 2.0 * z_loss * (row_max + tl.log(row_sum))
    smooth = 0.0
    if SMOOTHS:
        smooth = tl.div_rn(label_smoothing, vocab_size.to(tl.float32))
        if weight_sum is None:
            prob += label_smoothing
        else:
            prob += smooth * tl.load(weight_sum).to(tl.float32)
    return tl.div_rn(prob * scale, row_sum), smooth * scale, target * scale


@triton.jit(do_not_specialize=VARYING)
def stats_kernel(
    logits,
    target,
    shard_weight,
    stats,
    lead,
    stride,
    num_tokens,
    num_classes,
    vocab_start,
    way,
    digest,
    ignore_index,
    logit_scale,
    softcap,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
    WANTS_WEIGHTED: tl.constexpr,
    WANTS_MORE: tl.constexpr,
):
    """softmax_stats: a program for each token, and one for the shard's entry."""
    row = tl.program_id(0).to(tl.int64)
    is_token = row < num_tokens
    token_target = tl.load(target + row, mask=is_token, other=0)
    if is_token & (token_target != ignore_index):
        span = span_of(logits, lead, row, stride, num_classes, VEC)
        scaling = (logit_scale, softcap)
        target_idx = index_in_row(token_target, vocab_start, num_classes)
        z = logit(target_of(span, target_idx), scaling)
        row_max, row_sum, row_weighted, entropy, argmax = scan_row(
            span, shard_weight, scaling, VEC, BLOCK, WANTS_WEIGHTED, WANTS_MORE, ""
        )
        argmax = tl.where(argmax == NO_INDEX, NO_INDEX, argmax + vocab_start)
        store_stats(stats, row, row_max, row_sum, z, row_weighted, entropy, argmax)
    elif is_token:
        store_stats(stats, row, float("-inf"), 0.0, 0.0, 0.0, 0.0, NO_INDEX)
    else:  # as shard_entry in torch_softmax_stats.cc makes it
        size = num_classes.to(tl.float32)
        store_stats(stats, row, 0.0, digest.to(tl.float32), size, way, 0.0, digest)


@triton.jit(do_not_specialize=VARYING)
def grad_kernel(
    grad_loss,
    grad_loss_stride,
    logits,
    to,
    target,
    weight,
    shard_weight,
    weight_sum,
    stats,
    denominator,
    lead,
    stride,
    to_lead,
    to_stride,
    num_tokens,
    width,
    num_classes,
    vocab_start,
    vocab_size,
    ignore_index,
    logit_scale,
    softcap,
    label_smoothing,
    z_loss,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
    SMOOTHS: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    """cross_entropy_grad, and in place where `to` is the logits."""
    row = tl.program_id(0).to(tl.int64)
    token_target = tl.load(target + row)
    to_base = base_of(to, to_lead)
    to_begin = to_lead + row * to_stride
    span = span_of(logits, lead, row, stride, width, VEC)
    if token_target == ignore_index:
        write_zeros(span, to_base, to_begin, VEC, BLOCK, IS_ALIGNED)
    else:
        entry, _ = stats_at(stats, row)
        row_max = tl.load(entry)
        upstream = tl.load(grad_loss + row * grad_loss_stride)
        prob, smooth, target_part = coefficients(
            token_target, row_max, tl.load(entry + 1), (weight, weight_sum),
            tl.div_rn(upstream, tl.load(denominator).to(tl.float32)) * logit_scale,
            found_vocab_size(stats, num_tokens, vocab_size), (label_smoothing, z_loss), SMOOTHS,
        )  # fmt: skip
        target_idx = index_in_row(token_target, vocab_start, num_classes)
        x = target_of(span, target_idx)
        scaling = (logit_scale, softcap)
        smoothing = (smooth if SMOOTHS else None, shard_weight)
        tl.debug_barrier()  # all threads have read it before one overwrites it
        write_gradient(
            span, to_base, to_begin, num_classes, row_max, prob, smoothing, scaling,
            VEC, BLOCK, HAS_PADDING, IS_ALIGNED,
        )  # fmt: skip
        to_row = to_base + to_begin
        write_target(to_row, target_idx, x, row_max, prob, target_part, smoothing, scaling)


# ---- rows of logits that become their own gradient


@triton.jit
def differentiate_held_row(
    span,
    num_classes,
    token_target,
    weights,
    scale,
    scaling,
    penalties,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
    SMOOTHS: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    WANTS_MORE: tl.constexpr,
):
    """The stats of a row that one block holds in registers; its gradient overwrites the row."""
    weight, _ = weights
    base, begin, _, num_head, num_bulk = span
    at = tl.arange(0, BLOCK)
    bulk = bulk_at(base, begin, num_head, VEC) + at
    column = num_head + at
    mask = at < num_bulk
    edge_column, edge_mask = edge_columns(span, VEC)
    edge_at = base + begin + edge_column
    x = tl.load(bulk, mask=mask, other=0.0)
    edge_x = tl.load(edge_at, mask=edge_mask, other=0.0)
    classes = mask & (column < num_classes)
    edge_classes = edge_mask & (edge_column < num_classes)
    z = tl.where(classes, logit(x, scaling), float("-inf"))
    edge = tl.where(edge_classes, logit(edge_x, scaling), float("-inf"))
    row_max = tl.maximum(tl.max(z, 0), tl.max(edge, 0))
    # If all logits are -infinity, their distance to the largest is undefined.
    reference = tl.where(row_max == float("-inf"), 0.0, row_max)
    power = exp(z - reference)
    edge_power = exp(edge - reference)
    row_sum = tl.sum(power, 0) + tl.sum(edge_power, 0)
    row_weighted = 0.0
    if SMOOTHS:
        row_weighted = tl.sum(weighted(z, weight, column, classes), 0)
        row_weighted += tl.sum(weighted(edge, weight, edge_column, edge_classes), 0)
    entropy = 0.0
    argmax = NO_INDEX
    if WANTS_MORE:
        entropy = tl.sum(tl.where(power == 0, 0.0, power * (z - reference)), 0)
        edge_terms = tl.where(edge_power == 0, 0.0, edge_power * (edge - reference))
        entropy += tl.sum(edge_terms, 0)
        argmax = tl.min(tl.where(classes & (z == row_max), column, NO_INDEX), 0)
        edge_idx = tl.where(edge_classes & (edge == row_max), edge_column, NO_INDEX)
        argmax = first_index(tl.minimum(argmax, tl.min(edge_idx, 0)), num_classes)
    factors = coefficients(
        token_target, row_max, row_sum, weights, scale, num_classes, penalties, SMOOTHS
    )
    prob, smooth, _ = factors
    smoothing = (smooth if SMOOTHS else None, weight)
    grad = gradient(x, power, column, mask, prob, smoothing, scaling, num_classes, HAS_PADDING)
    edge_grad = gradient(
        edge_x, edge_power, edge_column, edge_mask, prob, smoothing, scaling, num_classes,
        HAS_PADDING,
    )  # fmt: skip
    tl.store(bulk, grad.to(base.dtype.element_ty), mask=mask)
    tl.store(edge_at, edge_grad.to(base.dtype.element_ty), mask=edge_mask)
    return row_max, row_sum, row_weighted, entropy, argmax, factors


@triton.jit(do_not_specialize=VARYING)
def stats_and_grad_kernel(
    logits,
    target,
    weight,
    weight_sum,
    stats,
    denominator,
    lead,
    stride,
    num_tokens,
    width,
    num_classes,
    ignore_index,
    logit_scale,
    softcap,
    label_smoothing,
    z_loss,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
    SMOOTHS: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    WANTS_MORE: tl.constexpr,
    IS_HELD: tl.constexpr,
):
    """cross_entropy_and_grad_ up to the stats: the logits of all classes become their gradient.

    IS_HELD: a row fits into one BLOCK and is read once. Otherwise it is read twice; the second read
    hits in L2, where the first asked to keep the row.
    """
    row = tl.program_id(0).to(tl.int64)
    is_token = row < num_tokens
    token_target = tl.load(target + row, mask=is_token, other=0)
    span = span_of(logits, lead, row, stride, width, VEC)
    base, begin, _, _, _ = span
    if is_token & (token_target != ignore_index):
        target_idx = index_in_row(token_target, 0, num_classes)
        # All threads have read it before one overwrites it: the row's reductions are between the
        # two.
        x = target_of(span, target_idx)
        scaling = (logit_scale, softcap)
        scale = (logit_scale / tl.load(denominator)).to(tl.float32)
        weights = (weight, weight_sum)
        penalties = (label_smoothing, z_loss)
        if IS_HELD:
            row_max, row_sum, row_weighted, entropy, argmax, factors = differentiate_held_row(
                span, num_classes, token_target, weights, scale, scaling, penalties,
                VEC, BLOCK, SMOOTHS, HAS_PADDING, WANTS_MORE,
            )  # fmt: skip
            prob, smooth, target_part = factors
            smoothing = (smooth if SMOOTHS else None, weight)
        else:
            classes = span_of(logits, lead, row, stride, num_classes, VEC)
            row_max, row_sum, row_weighted, entropy, argmax = scan_row(
                classes, weight, scaling, VEC, BLOCK, SMOOTHS, WANTS_MORE, "evict_last"
            )
            prob, smooth, target_part = coefficients(
                token_target, row_max, row_sum, weights, scale, num_classes, penalties, SMOOTHS
            )
            smoothing = (smooth if SMOOTHS else None, weight)
            write_gradient(
                span, base, begin, num_classes, row_max, prob, smoothing, scaling,
                VEC, BLOCK, HAS_PADDING, True,
            )  # fmt: skip
        write_target(base + begin, target_idx, x, row_max, prob, target_part, smoothing, scaling)
        z = logit(x, scaling)
        store_stats(stats, row, row_max, row_sum, z, row_weighted, entropy, argmax)
    else:
        if is_token:
            write_zeros(span, base, begin, VEC, BLOCK, True)
        # After the last token is the number of classes, the only field needed without a merge.
        size = tl.where(is_token, 0.0, num_classes.to(tl.float32))
        store_stats(stats, row, float("-inf"), 0.0, size, 0.0, 0.0, NO_INDEX)


@triton.jit(do_not_specialize=("lead",))
def scale_kernel(tensor, factor, lead, stride, width, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """Multiplies rows by a factor; a factor of 1 writes nothing."""
    value = tl.load(factor).to(tl.float32)
    if value != 1.0:
        row = tl.program_id(0).to(tl.int64)
        span = span_of(tensor, lead, row, stride, width, VEC)
        base, begin, _, num_head, num_bulk = span
        lanes = tl.arange(0, BLOCK)
        bulk = bulk_at(base, begin, num_head, VEC)
        for offset in range(0, num_bulk, BLOCK):
            at = offset + lanes
            x = tl.load(bulk + at, mask=at < num_bulk, other=0.0)
            scaled = (x.to(tl.float32) * value).to(x.dtype)
            tl.store(bulk + at, scaled, mask=at < num_bulk)
        column, mask = edge_columns(span, VEC)
        x = tl.load(base + begin + column, mask=mask, other=0.0)
        tl.store(base + begin + column, (x.to(tl.float32) * value).to(x.dtype), mask=mask)
