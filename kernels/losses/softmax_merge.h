#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>

#include "core/annotations.h"
#include "kernels/common/types.h"

namespace ringcomm {

/// The result of one pass over a token's logits, for any part of the vocabulary: six words, with
/// the layout of GPU kernels and of tensors of shape (tokens, 6). `z` is a logit as defined by
/// LogitRow in softmax.h.
struct SoftmaxStats {
  float max;            ///< of z; -infinity without logits
  float sum;            ///< of exp(z - max)
  float target;         ///< z of the target; 0 where it is in another part
  float weighted;       ///< sum of weight * z, where LogitRow::wants_weighted
  float entropy;        ///< sum of exp(z - max) * (z - max), where LogitRow::wants_more
  std::int32_t argmax;  ///< the first index of the largest, where LogitRow::wants_more; or kNoIndex
};
inline constexpr int kNumSoftmaxStats = 6;
/// No index: larger than all classes, and not a NaN if its bits are read as a float.
inline constexpr std::int32_t kNoIndex = 1 << 30;
static_assert(sizeof(SoftmaxStats) == kNumSoftmaxStats * sizeof(float));
static_assert(sizeof(SoftmaxStats) == element_bytes(DType::kSoftmaxStats));
/// The stats of no logits, and of an ignored token.
inline constexpr SoftmaxStats kNoLogits = {
    -std::numeric_limits<float>::infinity(), 0, 0, 0, 0, kNoIndex};

/// Merges the stats of two parts of one row; exact except for the rounding of sums. `a` precedes
/// `b` in every sum.
RINGCOMM_HD inline SoftmaxStats merge(const SoftmaxStats& a, const SoftmaxStats& b) {
  SoftmaxStats both = {.max = a.max < b.max ? b.max : a.max,
                       .sum = 0,
                       .target = a.target + b.target,
                       .weighted = a.weighted + b.weighted,
                       .entropy = 0,
                       .argmax = a.max == b.max  ? (b.argmax < a.argmax ? b.argmax : a.argmax)
                                 : a.max > b.max ? a.argmax
                                                 : b.argmax};
  for (const SoftmaxStats* part : {&a, &b}) {
    // Without a logit above -infinity the sum is 0, or NaN where a logit is.
    const bool is_empty = part->max == -std::numeric_limits<float>::infinity();
    const float distance = is_empty ? 0.0F : part->max - both.max;
    const float factor = std::exp(distance);
    both.sum += part->sum * factor;
    // A distance too large for the sum to count may be too large for a product, too.
    if (factor != 0) both.entropy += factor * (part->entropy + part->sum * distance);
  }
  return both;
}

}  // namespace ringcomm
