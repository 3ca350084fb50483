#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "core/annotations.h"
#include "kernels/common/elements.h"
#include "kernels/losses/loss_call.h"

// Numbers of loss_rows.h: elements in vectors of 16 bytes, and functions that GPUs have.

namespace ringcomm::cuda {

inline constexpr float kLog2E = 1.44269504F;
/// Represents no logit: less than all numbers except -infinity, and differences to it are not NaN.
inline constexpr float kLowestLogit = -std::numeric_limits<float>::max();

/// A word of global memory that no kernel of the call writes.
template <class T>
__device__ inline T load_constant(const T* from) {
  return __ldg(from);
}

/// 2^x; 0 where that is less than the smallest normal number.
__device__ inline float power_of_2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

/// a / b within 2 ulp, for b from 2^-126 to 2^126.
__device__ inline float quotient(float a, float b) { return __fdividef(a, b); }

/// One product and one sum, rounded once.
__device__ inline float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }

/// Logits of a type. no_logits is a vector of -infinity.
struct BFloat16Logits {
  using Stored = std::uint16_t;
  static constexpr int kPerVector = 8;

  __device__ static Vector no_logits() {
    return {{0xff80ff80u, 0xff80ff80u, 0xff80ff80u, 0xff80ff80u}};
  }
  __device__ static float get(const Vector& vector, int i) {
    const std::uint32_t word = vector.words[i / 2];
    return bits_as<float>(i % 2 == 0 ? word << 16 : word & 0xffff0000u);
  }
  /// NaN counts for nothing.
  __device__ static float largest(const Vector& vector) {
    std::uint32_t most, other;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(vector.words[0]), "r"(vector.words[1]));
    asm("max.bf16x2 %0, %1, %2;" : "=r"(other) : "r"(vector.words[2]), "r"(vector.words[3]));
    asm("max.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(most), "r"(other));
    return fmaxf(bits_as<float>(most << 16), bits_as<float>(most & 0xffff0000u));
  }
  /// A vector of kPerVector numbers, to nearest even.
  __device__ static Vector vector_of(const float* values) {
    Vector vector;
    RINGCOMM_UNROLL
    for (int i = 0; i < 4; ++i) vector.words[i] = word_of(values[2 * i], values[2 * i + 1]);
    return vector;
  }
  __device__ static std::uint32_t word_of(float low, float high) {
    std::uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
  }
  __device__ static Stored rounded(float value) { return fp32_to_bfloat16(value); }
  __device__ static float widened(Stored value) { return bfloat16_to_fp32(value); }
};

struct FloatLogits {
  using Stored = float;
  static constexpr int kPerVector = 4;

  __device__ static Vector no_logits() {
    return {{0xff800000u, 0xff800000u, 0xff800000u, 0xff800000u}};
  }
  __device__ static float get(const Vector& vector, int i) {
    return bits_as<float>(vector.words[i]);
  }
  __device__ static float largest(const Vector& vector) {
    return fmaxf(fmaxf(get(vector, 0), get(vector, 1)), fmaxf(get(vector, 2), get(vector, 3)));
  }
  __device__ static Vector vector_of(const float* values) {
    Vector vector;
    RINGCOMM_UNROLL
    for (int i = 0; i < 4; ++i) vector.words[i] = bits_as<std::uint32_t>(values[i]);
    return vector;
  }
  __device__ static Stored rounded(float value) { return value; }
  __device__ static float widened(Stored value) { return value; }
};

// ---- sums over tokens, by the threads of one block in one order: the same bits in every block

/// The sum of one number of each thread, returned to all threads. `of_warps` is shared memory.
template <class B>
__device__ double sum_of_threads(B& block, double number, double* of_warps) {
  number = block.warp_sum(number);
  if (block.thread_idx() % B::kWarpThreads == 0)
    of_warps[block.thread_idx() / B::kWarpThreads] = number;
  block.sync();
  double sum = 0;
  for (unsigned i = 0; i < block.num_threads() / B::kWarpThreads; ++i) sum += of_warps[i];
  return sum;
}

/// The sum of the weights of all targets that are not ignored.
template <class B>
__device__ double weight_of_targets(B& block, const LossCall& call, double* of_warps) {
  double weight = 0;
  for (std::int64_t i = block.thread_idx(); i < call.num_tokens; i += block.num_threads()) {
    const std::int64_t target = load_constant(call.targets + i);
    if (target == call.ignore_index) continue;
    if (call.class_weights == nullptr)
      weight += 1;
    else if (target >= 0 && target < call.num_classes)
      weight += static_cast<double>(load_constant(call.class_weights + target));
  }
  return sum_of_threads(block, weight, of_warps);
}

/// The kernel after the row kernel, with one block: the tokens' losses divided by the denominator.
template <class B>
__device__ void sum_losses(B& block, const LossCall& call) {
  double sum = 0;
  for (std::int64_t i = block.thread_idx(); i < call.num_tokens; i += block.num_threads())
    sum += static_cast<double>(call.by_token[i]);
  sum = sum_of_threads(block, sum, reinterpret_cast<LossShared*>(block.shared())->counts);
  if (block.thread_idx() == 0) *call.loss = static_cast<float>(sum / *call.denominator);
}

}  // namespace ringcomm::cuda
