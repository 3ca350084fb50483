#pragma once

#include <cmath>
#include <initializer_list>
#include <limits>

#include "core/annotations.h"
#include "kernels/softmax.h"

namespace ringcomm {

/// host::merge(), for kernels of a GPU too.
RINGCOMM_HD inline SoftmaxStats merged(const SoftmaxStats& a, const SoftmaxStats& b) {
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
