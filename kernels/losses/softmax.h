#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/losses/softmax_merge.h"

namespace ringcomm {

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

}  // namespace ringcomm
