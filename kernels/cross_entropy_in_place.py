"""Rows of logits that become their own gradient: read once where a row fits in registers."""

import triton
import triton.language as tl
from ringcomm.kernels.cross_entropy import (
    VARYING,
    coefficients,
    index_in_row,
    store_stats,
    target_of,
)
from ringcomm.kernels.logit_rows import (
    NO_INDEX,
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


@triton.jit
def differentiate_held_row(
    span,
    num_classes,
    token_target,
    weight,
    weight_sum,
    scale,
    scaling,
    label_smoothing,
    z_loss,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    SMOOTHS: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    WANTS_MORE: tl.constexpr,
):
    """The stats of a row that one block holds in registers; its gradient overwrites the row."""
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
    z = tl.where(classes, logit(x, scaling, HAS_SOFTCAP), float("-inf"))
    edge = tl.where(edge_classes, logit(edge_x, scaling, HAS_SOFTCAP), float("-inf"))
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
        token_target, row_max, row_sum, weight, weight_sum, scale, num_classes, label_smoothing,
        z_loss, SMOOTHS,
    )  # fmt: skip
    grad = gradient(
        x, power, column, mask, factors, weight, scaling, num_classes,
        HAS_SOFTCAP, SMOOTHS, HAS_PADDING,
    )  # fmt: skip
    edge_grad = gradient(
        edge_x, edge_power, edge_column, edge_mask, factors, weight, scaling, num_classes,
        HAS_SOFTCAP, SMOOTHS, HAS_PADDING,
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
    HAS_SOFTCAP: tl.constexpr,
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
        if IS_HELD:
            row_max, row_sum, row_weighted, entropy, argmax, factors = differentiate_held_row(
                span, num_classes, token_target, weight, weight_sum, scale, scaling,
                label_smoothing, z_loss, VEC, BLOCK, HAS_SOFTCAP, SMOOTHS, HAS_PADDING, WANTS_MORE,
            )  # fmt: skip
        else:
            classes = span_of(logits, lead, row, stride, num_classes, VEC)
            row_max, row_sum, row_weighted, entropy, argmax = scan_row(
                classes, weight, scaling, VEC, BLOCK, HAS_SOFTCAP, SMOOTHS, WANTS_MORE, "evict_last"
            )
            factors = coefficients(
                token_target, row_max, row_sum, weight, weight_sum, scale, num_classes,
                label_smoothing, z_loss, SMOOTHS,
            )  # fmt: skip
            write_gradient(
                span, base, begin, num_classes, row_max, factors, weight, scaling,
                VEC, BLOCK, HAS_SOFTCAP, SMOOTHS, HAS_PADDING, True,
            )  # fmt: skip
        write_target(
            base + begin, target_idx, x, row_max, factors, weight, scaling, HAS_SOFTCAP, SMOOTHS
        )
        z = logit(x, scaling, HAS_SOFTCAP)
        store_stats(stats, row, row_max, row_sum, z, row_weighted, entropy, argmax)
    else:
        if is_token:
            write_zeros(span, base, begin, VEC, BLOCK, True)
        # After the last token is the number of classes, the only field needed without a merge.
        size = tl.where(is_token, 0.0, num_classes.to(tl.float32))
        store_stats(stats, row, float("-inf"), 0.0, size, 0.0, 0.0, NO_INDEX)
