#pragma once

#include "kernels/update_tables.h"
#include "kernels/weight_update.h"

namespace ringcomm::host {

/// The passes of one instruction set, gradients' types in the order of kUpdateDTypes. Internal to
/// this folder and its tests; constant-initialised like SimdKernels, and for the same reason.
struct WeightKernels {
  WeightOps weights[kNumWeightFormats][kNumUpdateDTypes] = {};
  GradOps grads[kNumUpdateDTypes] = {};
};

extern const WeightKernels kBaselineWeights;
#if defined(__x86_64__)
extern const WeightKernels kAvx2Weights;
extern const WeightKernels kAvx512Weights;
#endif

/// The passes of a level of simd_tables.h, or null where this processor lacks it.
const WeightKernels* find_weight_kernels(const char* level);

}  // namespace ringcomm::host
