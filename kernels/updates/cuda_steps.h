#pragma once

#include <cmath>

#include "core/annotations.h"
#include "kernels/updates/update_op.h"

// The optimizers' steps on GPUs, with the bits of optimizer_kernels.h. Compiled without
// contraction, as there; fma() is what is fused.

namespace ringcomm::cuda {

struct SgdStep {
  static constexpr int kNumStates = 1;
  RINGCOMM_HD static void apply(const UpdateScalars& s, bool has_momentum, float& weight,
                                float grad, float& momentum, float&) {
    if (s.weight_decay != 0) grad = fmaf(weight, s.weight_decay, grad);
    if (has_momentum) {
      momentum = s.is_first ? grad : fmaf(grad, s.damped, momentum * s.momentum);
      grad = s.is_nesterov ? fmaf(momentum, s.momentum, grad) : momentum;
    }
    weight = fmaf(grad, s.lr_minus, weight);
  }
};

struct AdamWStep {
  static constexpr int kNumStates = 2;
  RINGCOMM_HD static void apply(const UpdateScalars& s, bool, float& weight, float grad,
                                float& first, float& second) {
    weight = weight * s.decay;
    // torch's lerp, which starts from the end that is nearer.
    const float distance = grad - first;
    first = s.lerp_weight < 0.5F ? fmaf(s.lerp_weight, distance, first)
                                 : fmaf(s.lerp_weight - 1.0F, distance, grad);
    second = fmaf(s.beta2_rest * grad, grad, second * s.beta2);
    const float denominator = sqrtf(second) / s.bias_sqrt + s.eps;
    weight = weight + (s.lr_minus * first) / denominator;
  }
};

struct LomoStep {
  static constexpr int kNumStates = 0;
  RINGCOMM_HD static void apply(const UpdateScalars& s, bool, float& weight, float grad, float&,
                                float&) {
    grad = grad > s.clip_value ? s.clip_value : grad;
    grad = grad < -s.clip_value ? -s.clip_value : grad;
    weight = fmaf(grad, s.lr_minus, weight * s.decay);
  }
};

}  // namespace ringcomm::cuda
