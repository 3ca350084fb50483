#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "core/types.h"

namespace ringcomm {

/// The result of one pass over a token's logits, for any part of the vocabulary: six words, with
/// the layout of GPU kernels and of tensors of shape (tokens, 6). `z` is a logit as defined by
/// LogitRow.
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
/// The stats of no logits, and of an ignored token.
inline constexpr SoftmaxStats kNoLogits = {.max = -std::numeric_limits<float>::infinity(),
                                           .sum = 0,
                                           .target = 0,
                                           .weighted = 0,
                                           .entropy = 0,
                                           .argmax = kNoIndex};
static_assert(sizeof(SoftmaxStats) == element_bytes(DType::kSoftmaxStats));

/// A token's logits on this rank. z = logit_scale * x, and with a softcap softcap * tanh(z /
/// softcap).
struct LogitRow {
  const void* logits = nullptr;
  std::size_t num_elems = 0;
  const float* weight = nullptr;  ///< of these classes; null: all 1
  std::int64_t target_idx = -1;   ///< in this row; -1: not here
  float logit_scale = 1;
  float softcap = 0;  ///< 0: none
  bool wants_weighted = false;
  bool wants_more = false;  ///< entropy and argmax
};

/// The gradient of a token's loss with respect to its logits x:
///
///     (prob * exp(z - max) - smooth * weight - [target] * target) * dz/dx
struct LogitGrad {
  float max = 0;
  float prob = 0;
  float smooth = 0;
  float target = 0;
};

/// The passes over a row of logits of one type; all arithmetic is fp32. Results depend on the
/// values alone, never on the instruction set. NaN and infinities go into them as in torch.
struct SoftmaxOps {
  /// Indices count from the row's beginning.
  SoftmaxStats (*stats)(const LogitRow& row) = nullptr;
  /// Writes num_elems elements of the logits' type, each rounded once, to nearest even. `to` may be
  /// the logits.
  void (*grad)(const LogitRow& row, const LogitGrad& grad, void* to) = nullptr;
};

namespace host {

/// For this processor; null where logits of the type are not known: float32, float16 and bfloat16
/// are.
const SoftmaxOps* find_softmax_ops(DType dtype);

/// Merges the stats of two parts of one row; exact except for the rounding of sums. `a` precedes
/// `b` in every sum.
SoftmaxStats merge(const SoftmaxStats& a, const SoftmaxStats& b);

}  // namespace host
}  // namespace ringcomm
