#pragma once

#include <ATen/core/Tensor.h>

// What follows the sum in torch.ops.ringcomm.all_reduce_add_rms_norm_, on CPUs. Its wrapper and its
// documentation are in ringcomm/ops/rms_norm.py.

namespace ringcomm {

/// Throws ValueError or TypeError unless these are the operator's arguments:
///
/// - `input` and `residual`: (..., features), of one shape
/// - `weight`: (features)
///
/// all contiguous, of one dtype (float32, float16 or bfloat16), apart from each other, and without
/// a gradient.
void check_add_rms_norm(const at::Tensor& input, const at::Tensor& residual,
                        const at::Tensor& weight, double eps);

/// Adds `input`, the sum, to `residual`; `input` becomes the RMSNorm of that, times `weight`. The
/// arguments have been checked.
void add_rms_norm_(const at::Tensor& input, const at::Tensor& residual, const at::Tensor& weight,
                   double eps);

}  // namespace ringcomm
