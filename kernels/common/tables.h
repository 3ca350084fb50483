#pragma once

#include <cstddef>
#include <string_view>

#include "kernels/losses/softmax.h"
#include "kernels/updates/update_op.h"
#include "kernels/updates/weight_update.h"

// Internal to kernels/ and its tests.

namespace ringcomm {

/// A row of num_elems elements of one type at each address; `x` and `residual` are written.
struct NormRow {
  void* x = nullptr;
  void* residual = nullptr;
  const void* weight = nullptr;
  std::size_t num_elems = 0;
  float eps = 0;
};

/// residual = x + residual, then x = residual / sqrt(mean(residual^2) + eps) * weight. All
/// arithmetic is fp32, and each result is rounded once, to nearest even; the mean is that of the
/// rounded residual. Results depend on the values alone, never on the instruction set.
using AddRmsNorm = void (*)(const NormRow& row);

}  // namespace ringcomm

namespace ringcomm::cpu {

/// The types of logits, parameters and gradients, and their places in the tables.
inline constexpr DType kFloatDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
inline constexpr int kNumFloatDTypes = 3;

/// The place of a type, or -1.
constexpr int float_dtype_idx(DType dtype) {
  for (int i = 0; i < kNumFloatDTypes; ++i)
    if (kFloatDTypes[i] == dtype) return i;
  return -1;
}

/// The kernels of one level.
struct Kernels {
  SoftmaxOps softmax[kNumFloatDTypes] = {};
  /// By parameter, gradient.
  decltype(UpdateOp::apply) updates[kNumOptimizers][kNumFloatDTypes][kNumFloatDTypes] = {};
  WeightOps weights[kNumWeightFormats][kNumFloatDTypes] = {};  ///< by gradient
  GradOps grads[kNumFloatDTypes] = {};
  AddRmsNorm add_rms_norm[kNumFloatDTypes] = {};
};

extern const Kernels kBaselineFloatKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2FloatKernels;
extern const Kernels kAvx512FloatKernels;
#endif

/// The kernels of a level (level.h), or null where this processor lacks it.
const Kernels* find_kernels(std::string_view level);
/// Those of the level in use.
const Kernels& kernels();

}  // namespace ringcomm::cpu
