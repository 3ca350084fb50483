"""From the stats of tokens to their losses: kernels over blocks of tokens, in fp64."""

import triton
import triton.language as tl
from ringcomm.kernels.cross_entropy import found_vocab_size, stats_at, store_stats, weight_of
from ringcomm.kernels.logit_rows import NO_INDEX

# Values in place of the number of classes that encode errors of the shards.
DISAGREEMENT = tl.constexpr(-1.0)
GAP = tl.constexpr(-2.0)


@triton.jit
def scatter(number):
    """14 bits that depend on all bits of a number, as torch_softmax_stats.cc has them."""
    value = number.to(tl.int64).to(tl.uint64)
    value = (value ^ (value >> 33)) * 0xFF51AFD7ED558CCD
    value = (value ^ (value >> 33)) * 0xC4CEB9FE1A85EC53
    return (value >> 50).to(tl.float32)


@triton.jit(do_not_specialize=("num_entries",))
def merge_kernel(gathered, merged, num_entries, NUM_RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """Stats of shape (ranks, entries, 6), as host::merge has them, in rank order."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = token < num_entries
    row_max = tl.full([BLOCK], float("-inf"), tl.float32)
    for rank in tl.static_range(NUM_RANKS):
        entry, _ = stats_at(gathered, rank * num_entries + token)
        row_max = tl.maximum(row_max, tl.load(entry, mask=mask, other=0.0))
    row_sum = tl.zeros([BLOCK], tl.float32)
    target = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    entropy = tl.zeros([BLOCK], tl.float32)
    argmax = tl.full([BLOCK], NO_INDEX, tl.int32)
    for rank in tl.static_range(NUM_RANKS):
        entry, argmax_at = stats_at(gathered, rank * num_entries + token)
        part_max = tl.load(entry, mask=mask, other=0.0)
        part_sum = tl.load(entry + 1, mask=mask, other=0.0)
        part_entropy = tl.load(entry + 4, mask=mask, other=0.0)
        # Without a logit above -infinity the sum is 0, or NaN where a logit is.
        distance = tl.where(part_max == float("-inf"), 0.0, part_max - row_max)
        factor = tl.exp(distance)
        row_sum += part_sum * factor
        is_none = ((part_entropy == 0) & (part_sum == 0)) | (factor == 0)
        entropy += tl.where(is_none, 0.0, factor * (part_entropy + part_sum * distance))
        target += tl.load(entry + 2, mask=mask, other=0.0)
        weighted += tl.load(entry + 3, mask=mask, other=0.0)
        part_idx = tl.load(argmax_at, mask=mask, other=NO_INDEX)
        argmax = tl.where(part_max == row_max, tl.minimum(argmax, part_idx), argmax)
    # The entry of the shards: 0 classes if they do not fit together.
    agrees = row_sum == argmax.to(tl.float32) * NUM_RANKS
    is_whole = weighted == scatter(target) - scatter(tl.zeros([BLOCK], tl.float32))
    is_wrong = (token == num_entries - 1) & ~(agrees & is_whole)
    target = tl.where(is_wrong, tl.where(agrees, GAP, DISAGREEMENT), target)
    store_stats(merged, token, row_max, row_sum, target, weighted, entropy, argmax, mask)


@triton.jit(do_not_specialize=("num_tokens", "vocab_size", "ignore_index"))
def loss_kernel(
    stats,
    target,
    weight,
    weight_sum,
    by_token,
    num_tokens,
    vocab_size,
    ignore_index,
    label_smoothing,
    z_loss,
    SMOOTHS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Loss, lse, entropy and accuracy of tokens; of ignored ones 0."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = token < num_tokens
    token_target = tl.load(target + token, mask=mask, other=0)
    entry, argmax_at = stats_at(stats, token)
    row_max = tl.load(entry, mask=mask, other=0.0).to(tl.float64)
    row_sum = tl.load(entry + 1, mask=mask, other=1.0).to(tl.float64)
    z = tl.load(entry + 2, mask=mask, other=0.0).to(tl.float64)
    found_size = found_vocab_size(stats, num_tokens, vocab_size)
    is_class = (token_target >= 0) & (token_target < found_size)
    log_sum = tl.log(row_sum)
    lse = row_max + log_sum
    smoothing = tl.zeros([BLOCK], tl.float64) + label_smoothing
    loss = (1.0 - smoothing) * weight_of(weight, token_target, mask & is_class).to(tl.float64)
    loss *= log_sum - (z - row_max)
    if SMOOTHS:
        size = tl.maximum(found_size, 1).to(tl.float64)
        weights = size if weight_sum is None else tl.load(weight_sum)
        terms = weights * lse - tl.load(entry + 3, mask=mask, other=0.0).to(tl.float64)
        loss += smoothing / size * terms
    loss += z_loss * lse * lse
    loss = tl.where(is_class, loss, float("nan"))
    entropy = log_sum - tl.load(entry + 4, mask=mask, other=0.0).to(tl.float64) / row_sum
    is_right = tl.load(argmax_at, mask=mask, other=0) == token_target
    counts = token_target != ignore_index
    to = by_token + token
    tl.store(to, tl.where(counts, loss, 0.0).to(tl.float32), mask=mask)
    tl.store(to + num_tokens, tl.where(counts, lse, 0.0).to(tl.float32), mask=mask)
    tl.store(to + 2 * num_tokens, tl.where(counts, entropy, 0.0).to(tl.float32), mask=mask)
    tl.store(to + 3 * num_tokens, tl.where(counts & is_right, 1.0, 0.0), mask=mask)


@triton.jit(do_not_specialize=("num_tokens", "vocab_size", "ignore_index"))
def reduce_kernel(
    divisor, loss, losses, target, weight, num_tokens, vocab_size, ignore_index, BLOCK: tl.constexpr
):
    """The sum of losses over the divisor: the sum of targets' weights, which it writes.

    By one program. Without targets it reads the divisor; without losses that is all it makes.
    """
    lanes = tl.arange(0, BLOCK)
    count, total = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    for offset in range(0, num_tokens, BLOCK):
        mask = offset + lanes < num_tokens
        if target is not None:
            token_target = tl.load(target + offset + lanes, mask=mask, other=0)
            counts = mask & (token_target != ignore_index)
            if weight is not None:
                counts &= (token_target >= 0) & (token_target < vocab_size)
            count += weight_of(weight, token_target, counts).to(tl.float64)
        if losses is not None:
            total += tl.load(losses + offset + lanes, mask=mask, other=0.0).to(tl.float64)
    if target is None:
        denominator = tl.load(divisor)
    else:
        denominator = tl.sum(count, 0)
        tl.store(divisor, denominator)
    if losses is not None:
        tl.store(loss, (tl.sum(total, 0) / denominator).to(tl.float32))
