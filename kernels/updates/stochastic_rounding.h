#pragma once

// The random bits of stochastic rounding: a hash of (seed, element), so that a resumed run has the
// same, and so have all replicas. On numbers of 32 bits, or vectors of them.
//
// Internal linkage and forced inline, as kernels need it (see kernels/common/simd.h).

#include <cstdint>

namespace ringcomm {
namespace {

/// "lowbias32" of Wellons' hash-prospector: every bit of the input changes every bit of the result
/// with a probability near one half.
template <class Word>
[[gnu::always_inline]] inline Word mixed_bits(Word x) {
  x ^= x >> 16;
  x *= 0x7feb352dU;
  x ^= x >> 15;
  x *= 0x846ca68bU;
  return x ^ (x >> 16);
}

/// The part of the random bits that all elements share.
[[gnu::always_inline]] inline std::uint32_t rounding_key(std::uint64_t seed) {
  const auto low = static_cast<std::uint32_t>(seed);
  return mixed_bits<std::uint32_t>(low + 0x9e3779b9U) ^ static_cast<std::uint32_t>(seed >> 32);
}

/// 16 bits for the element whose number has these halves.
template <class Word>
[[gnu::always_inline]] inline Word rounding_bits(std::uint32_t key, const Word& elem_low,
                                                 const Word& elem_high) {
  return mixed_bits<Word>(mixed_bits<Word>(elem_low ^ key) + elem_high) >> 16;
}

}  // namespace
}  // namespace ringcomm
