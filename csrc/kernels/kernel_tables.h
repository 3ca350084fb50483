#pragma once

#include <string_view>

#include "kernels/rms_norm.h"
#include "kernels/softmax.h"
#include "kernels/weight_update.h"
#include "reduce/update_op.h"

// Internal to this folder and its tests.

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

/// The kernels of one instruction set; constant-initialised like SimdKernels, and for the same
/// reason.
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

/// The kernels of a level of find_simd_kernels(), or null where this processor lacks it.
const Kernels* find_kernels(std::string_view level);

/// As MakeUpdateOp has it.
UpdateOp make_update_op(const UpdateSpec& spec, DType grad_dtype);
/// Its checks of the spec, and its scalars.
UpdateScalars scalars_of(const UpdateSpec& spec);

}  // namespace ringcomm::cpu
