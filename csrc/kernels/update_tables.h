#pragma once

#include "reduce/update_op.h"

namespace ringcomm::host {

using UpdateFn = decltype(UpdateOp::apply);

/// The types of parameters and gradients that are updated, and their places in the tables.
inline constexpr DType kUpdateDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
inline constexpr int kNumUpdateDTypes = 3;

/// The place of a type, or -1.
constexpr int update_dtype_idx(DType dtype) {
  for (int i = 0; i < kNumUpdateDTypes; ++i)
    if (kUpdateDTypes[i] == dtype) return i;
  return -1;
}

/// The updates of one instruction set. Internal to this folder and its tests; constant-
/// initialised like SimdKernels, and for the same reason.
struct UpdateKernels {
  UpdateFn of[kNumOptimizers][kNumUpdateDTypes][kNumUpdateDTypes] = {};  ///< by parameter, gradient
};

extern const UpdateKernels kBaselineUpdates;
#if defined(__x86_64__)
extern const UpdateKernels kAvx2Updates;
extern const UpdateKernels kAvx512Updates;
#endif

/// The updates of a level of simd_tables.h, or null where this processor lacks it.
const UpdateKernels* find_update_kernels(const char* level);
/// Null where the types have no update.
UpdateFn find_update(const UpdateKernels& kernels, Optimizer optimizer, DType param_dtype,
                     DType grad_dtype);

/// As MakeUpdateOp has it.
UpdateOp make_update_op(const UpdateSpec& spec, DType grad_dtype);
/// Checks and rounds; throws like make_update_op().
UpdateScalars scalars_of(const UpdateSpec& spec);

}  // namespace ringcomm::host
