#pragma once

// The optimizers' updates, written once and compiled for each level by its own source file (see
// kernels/common/simd.h for the rules).
//
// multiply_add(a, b, c) is a * b + c rounded once. It is used where torch's own kernels use the
// instruction, which keeps a step within one or two ulp of torch.optim if terms cancel.

#include "kernels/common/float_vectors.h"

namespace ringcomm::cpu {
namespace {

// ---- the optimizers: weights, gradients and state of one vector

struct SgdStep {
  [[gnu::always_inline]] static void apply(const UpdateScalars& s, bool has_momentum, Fp32& weight,
                                           Fp32 grad, Fp32& momentum, Fp32&) {
    if (s.weight_decay != 0) grad = multiply_add(weight, all(s.weight_decay), grad);
    if (has_momentum) {
      momentum = s.is_first ? grad : multiply_add(grad, all(s.damped), momentum * s.momentum);
      grad = s.is_nesterov ? multiply_add(momentum, all(s.momentum), grad) : momentum;
    }
    weight = multiply_add(grad, all(s.lr_minus), weight);
  }
};

struct AdamWStep {
  [[gnu::always_inline]] static void apply(const UpdateScalars& s, bool, Fp32& weight,
                                           const Fp32& grad, Fp32& first, Fp32& second) {
    weight = weight * s.decay;
    // torch's lerp, which starts from the end that is nearer.
    const Fp32 distance = grad - first;
    first = s.lerp_weight < 0.5F ? multiply_add(all(s.lerp_weight), distance, first)
                                 : multiply_add(all(s.lerp_weight - 1.0F), distance, grad);
    second = multiply_add(s.beta2_rest * grad, grad, second * s.beta2);
    const Fp32 denominator = square_root(second) / s.bias_sqrt + s.eps;
    weight = weight + (s.lr_minus * first) / denominator;
  }
};

struct LomoStep {
  [[gnu::always_inline]] static void apply(const UpdateScalars& s, bool, Fp32& weight,
                                           const Fp32& grad, Fp32&, Fp32&) {
    weight = descended(weight, clamped(grad, s.clip_value), s.lr_minus, s.decay);
  }
};

/// The arrays of one call as bytes; those that the call lacks are null.
struct UpdateJob {
  char* param;
  const char* grad;
  char* master;
  char* states[2];
};

/// `num` elements: a vector, or less at the end.
template <class Step, class Param, class Grad>
[[gnu::always_inline]] inline void update_vector(const UpdateScalars& s, const UpdateJob& job,
                                                 std::size_t i, std::size_t num = kLanes) {
  char* param = job.param + i * Param::kElementBytes;
  const std::size_t offset = i * sizeof(float);
  Fp32 weight = job.master != nullptr ? Float32Array::load(job.master + offset, num)
                                      : Param::load(param, num);
  Fp32 states[2] = {};
  for (int k = 0; k < 2; ++k)
    if (job.states[k] != nullptr) states[k] = Float32Array::load(job.states[k] + offset, num);
  const Fp32 grad = Grad::load(job.grad + i * Grad::kElementBytes, num) * s.grad_scale;
  Step::apply(s, job.states[0] != nullptr, weight, grad, states[0], states[1]);
  Param::store(param, weight, num);
  if (job.master != nullptr) Float32Array::store(job.master + offset, weight, num);
  for (int k = 0; k < 2; ++k)
    if (job.states[k] != nullptr) Float32Array::store(job.states[k] + offset, states[k], num);
}

template <class Step, class Param, class Grad>
void update(const UpdateScalars& scalars, const UpdateArrays& arrays, std::size_t num_elems) {
  // Copies, because the compiler must assume that stores alias the originals.
  const UpdateScalars s = scalars;
  const UpdateJob job = {
      static_cast<char*>(arrays.param),
      static_cast<const char*>(arrays.grad),
      reinterpret_cast<char*>(arrays.master),
      {reinterpret_cast<char*>(arrays.states[0]), reinterpret_cast<char*>(arrays.states[1])}};
  std::size_t i = 0;
  for (; num_elems - i >= kLanes; i += kLanes) update_vector<Step, Param, Grad>(s, job, i);
  if (i < num_elems) update_vector<Step, Param, Grad>(s, job, i, num_elems - i);
}

}  // namespace
}  // namespace ringcomm::cpu
