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

template <class Step, class Param, class Grad>
[[gnu::always_inline]] inline void update_vector(const UpdateScalars& s, const UpdateJob& job,
                                                 std::size_t i) {
  char* param = job.param + i * Param::kElementBytes;
  const std::size_t offset = i * sizeof(float);
  Fp32 weight = job.master != nullptr ? load_bytes<Fp32>(job.master + offset) : Param::load(param);
  Fp32 states[2] = {};
  for (int k = 0; k < 2; ++k)
    if (job.states[k] != nullptr) states[k] = load_bytes<Fp32>(job.states[k] + offset);
  const Fp32 grad = Grad::load(job.grad + i * Grad::kElementBytes) * s.grad_scale;
  Step::apply(s, job.states[0] != nullptr, weight, grad, states[0], states[1]);
  Param::store(param, weight);
  if (job.master != nullptr) store_bytes(job.master + offset, canonical_nan<float>(weight));
  for (int k = 0; k < 2; ++k)
    if (job.states[k] != nullptr)
      store_bytes(job.states[k] + offset, canonical_nan<float>(states[k]));
}

// The last elements, fewer than a vector: through copies filled up with zeros.
template <class Step, class Param, class Grad>
[[gnu::always_inline]] inline void update_tail(const UpdateScalars& s, const UpdateJob& job,
                                               std::size_t i, std::size_t num_elems) {
  char copies[5][kVectorBytes] = {};
  char* const whole[3] = {job.master, job.states[0], job.states[1]};
  const std::size_t fp32_bytes = num_elems * sizeof(float);
  __builtin_memcpy(copies[0], job.param + i * Param::kElementBytes,
                   num_elems * Param::kElementBytes);
  __builtin_memcpy(copies[1], job.grad + i * Grad::kElementBytes, num_elems * Grad::kElementBytes);
  for (int k = 0; k < 3; ++k)
    if (whole[k] != nullptr)
      __builtin_memcpy(copies[2 + k], whole[k] + i * sizeof(float), fp32_bytes);
  const UpdateJob copy = {
      copies[0],
      copies[1],
      whole[0] != nullptr ? copies[2] : nullptr,
      {whole[1] != nullptr ? copies[3] : nullptr, whole[2] != nullptr ? copies[4] : nullptr}};
  update_vector<Step, Param, Grad>(s, copy, 0);
  __builtin_memcpy(job.param + i * Param::kElementBytes, copies[0],
                   num_elems * Param::kElementBytes);
  for (int k = 0; k < 3; ++k)
    if (whole[k] != nullptr)
      __builtin_memcpy(whole[k] + i * sizeof(float), copies[2 + k], fp32_bytes);
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
  if (i < num_elems) update_tail<Step, Param, Grad>(s, job, i, num_elems - i);
}

}  // namespace
}  // namespace ringcomm::cpu
