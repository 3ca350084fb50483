#include "device/softmax.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "device/host/simd_tables.h"
#include "device/host/softmax_tables.h"

namespace ringcomm::host {

const SoftmaxKernels* find_softmax_kernels(const char* level) {
  if (find_simd_kernels(level) == nullptr) return nullptr;
#if defined(__x86_64__)
  if (std::strcmp(level, "avx512") == 0) return &kAvx512Softmax;
  if (std::strcmp(level, "avx2") == 0) return &kAvx2Softmax;
#endif
  return &kBaselineSoftmax;
}

const SoftmaxOps* find_softmax_ops(const SoftmaxKernels& kernels, DType dtype) {
  for (int i = 0; i < kNumLogitDTypes; ++i)
    if (kLogitDTypes[i] == dtype) return &kernels.of[i];
  return nullptr;
}

const SoftmaxOps* find_softmax_ops(DType dtype) {
  static const SoftmaxKernels& kernels = *find_softmax_kernels(simd_kernels().level);
  return find_softmax_ops(kernels, dtype);
}

SoftmaxStats merge(const SoftmaxStats& a, const SoftmaxStats& b) {
  SoftmaxStats both = {.max = std::max(a.max, b.max),
                       .sum = 0,
                       .target = a.target + b.target,
                       .weighted = a.weighted + b.weighted,
                       .entropy = 0,
                       .argmax = a.max == b.max  ? std::min(a.argmax, b.argmax)
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

}  // namespace ringcomm::host
