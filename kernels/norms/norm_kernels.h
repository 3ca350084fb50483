#pragma once

// The passes over a row of activations, written once and compiled for each level by its own source
// file (see kernels/common/simd.h for the rules).

#include "kernels/common/denormals.h"
#include "kernels/common/float_vectors.h"

namespace ringcomm::cpu {
namespace {

/// The squares of the sums, as they are after rounding.
template <class Array>
[[gnu::always_inline]] inline Fp32 add_residual(const char* x, char* residual,
                                                std::size_t num = kLanes) {
  const Fp32 sum = Array::load(x, num) + Array::load(residual, num);
  Array::store(residual, sum, num);
  const Fp32 stored = Array::rounded(sum);
  return stored * stored;
}

template <class Array>
[[gnu::always_inline]] inline void scale_vector(char* x, const char* residual, const char* weight,
                                                const Fp32& scale, std::size_t num = kLanes) {
  Array::store(x, Array::load(residual, num) * scale * Array::load(weight, num), num);
}

template <class Array>
void add_rms_norm(const NormRow& row) {
  const KeepDenormals mode;  // each rank computes it
  constexpr std::size_t kElementBytes = Array::kElementBytes;
  const std::size_t num_elems = row.num_elems;
  const std::size_t whole = num_elems - num_elems % kLanes;
  char* const x = static_cast<char*>(row.x);
  char* const residual = static_cast<char*>(row.residual);
  const char* const weight = static_cast<const char*>(row.weight);
  Partial squares = {};
  std::size_t i = 0;
  for (; num_elems - i >= kSumLanes; i += kSumLanes)
    for (std::size_t v = 0; v < kNumParts; ++v) {
      const std::size_t offset = (i + v * kLanes) * kElementBytes;
      squares.part[v] = squares.part[v] + add_residual<Array>(x + offset, residual + offset);
    }
  for (; i < whole; i += kLanes) {
    const std::size_t offset = i * kElementBytes;
    squares.add(i, add_residual<Array>(x + offset, residual + offset));
  }
  // The elements after the last full vector.
  const std::size_t rest = num_elems - whole, rest_offset = whole * kElementBytes;
  if (rest > 0)
    squares.add(whole, add_residual<Array>(x + rest_offset, residual + rest_offset, rest));

  const float mean = squares.total() / static_cast<float>(num_elems);
  const Fp32 scale = 1.0F / square_root(all(mean + row.eps));
  for (i = 0; i < whole; i += kLanes) {
    const std::size_t offset = i * kElementBytes;
    scale_vector<Array>(x + offset, residual + offset, weight + offset, scale);
  }
  if (rest > 0)
    scale_vector<Array>(x + rest_offset, residual + rest_offset, weight + rest_offset, scale, rest);
}

}  // namespace
}  // namespace ringcomm::cpu
