#pragma once

#include "kernels/softmax.h"

namespace ringcomm::host {

/// The types of logits, and their places in the tables.
inline constexpr DType kLogitDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
inline constexpr int kNumLogitDTypes = 3;

/// The passes of one instruction set. Internal to this folder and its tests; constant-
/// initialised like SimdKernels, and for the same reason.
struct SoftmaxKernels {
  SoftmaxOps of[kNumLogitDTypes] = {};
};

extern const SoftmaxKernels kBaselineSoftmax;
#if defined(__x86_64__)
extern const SoftmaxKernels kAvx2Softmax;
extern const SoftmaxKernels kAvx512Softmax;
#endif

/// The passes of a level of simd_tables.h, or null where this processor lacks it.
const SoftmaxKernels* find_softmax_kernels(const char* level);
/// Null where logits of the type are not known.
const SoftmaxOps* find_softmax_ops(const SoftmaxKernels& kernels, DType dtype);

}  // namespace ringcomm::host
