#pragma once

// The passes over a row of activations, written once and compiled for each level by its own source
// file (see kernels/common/simd.h for the rules).

#include "kernels/common/float_vectors.h"

namespace ringcomm::cpu {
namespace {

/// The squares of the sums, as they are after rounding.
template <class Array>
[[gnu::always_inline]] inline Fp32 add_vector(const char* x, char* residual) {
  const Fp32 sum = Array::load(x) + Array::load(residual);
  Array::store(residual, sum);
  const Fp32 stored = Array::rounded(sum);
  return stored * stored;
}

template <class Array>
[[gnu::always_inline]] inline void scale_vector(char* x, const char* residual, const char* weight,
                                                const Fp32& scale) {
  Array::store(x, Array::load(residual) * scale * Array::load(weight));
}

template <class Array>
void add_rms_norm(const NormRow& row) {
  constexpr std::size_t kElementBytes = Array::kElementBytes;
  const std::size_t num_elems = row.num_elems;
  const std::size_t whole = num_elems - num_elems % kLanes;
  char* const x = static_cast<char*>(row.x);
  char* const residual = static_cast<char*>(row.residual);
  const char* const weight = static_cast<const char*>(row.weight);
  // The elements after the last full vector, filled up with zeros.
  const std::size_t rest_bytes = (num_elems - whole) * kElementBytes;
  char rest_x[kVectorBytes] = {}, rest_residual[kVectorBytes] = {}, rest_weight[kVectorBytes] = {};
  __builtin_memcpy(rest_x, x + whole * kElementBytes, rest_bytes);
  __builtin_memcpy(rest_residual, residual + whole * kElementBytes, rest_bytes);
  __builtin_memcpy(rest_weight, weight + whole * kElementBytes, rest_bytes);

  Partial squares = {};
  std::size_t i = 0;
  for (; num_elems - i >= kSumLanes; i += kSumLanes)
    for (std::size_t v = 0; v < kNumParts; ++v) {
      const std::size_t offset = (i + v * kLanes) * kElementBytes;
      squares.part[v] = squares.part[v] + add_vector<Array>(x + offset, residual + offset);
    }
  for (; i < whole; i += kLanes) {
    const std::size_t offset = i * kElementBytes;
    squares.add(i, add_vector<Array>(x + offset, residual + offset));
  }
  if (rest_bytes > 0) {
    squares.add(i, add_vector<Array>(rest_x, rest_residual));
    __builtin_memcpy(residual + whole * kElementBytes, rest_residual, rest_bytes);
  }

  const float mean = squares.total() / static_cast<float>(num_elems);
  const Fp32 scale = 1.0F / square_root(all(mean + row.eps));
  for (i = 0; i < whole; i += kLanes) {
    const std::size_t offset = i * kElementBytes;
    scale_vector<Array>(x + offset, residual + offset, weight + offset, scale);
  }
  scale_vector<Array>(rest_x, rest_residual, rest_weight, scale);
  __builtin_memcpy(x + whole * kElementBytes, rest_x, rest_bytes);
}

}  // namespace
}  // namespace ringcomm::cpu
