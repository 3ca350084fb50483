#pragma once

// The formats of weights: how a vector of them becomes fp32, and how fp32 is written back. The
// includer has defined load_float16 and store_float16 for its level.

#include "kernels/float_arrays.h"
#include "kernels/stochastic_rounding.h"

namespace ringcomm::host {
namespace {

using Word = Vec<std::uint32_t>;
using HalfWord = HalfVec<std::uint16_t>;

/// A WeightRun as bytes.
struct WeightJob {
  char* weight;
  char* low;
  const char* grad;
  const char* col_factor;
  float row_factor;
  std::uint64_t first_elem;
};

template <class Array>
struct PlainPlace {
  static constexpr std::size_t kElementBytes = Array::kElementBytes;
  static constexpr bool kHasLow = false;

  [[gnu::always_inline]] static Fp32 load(const WeightJob& job, std::size_t i) {
    return Array::load(job.weight + i * kElementBytes);
  }
  [[gnu::always_inline]] static void store(const WeightJob& job, std::size_t i, const Fp32& v,
                                           std::uint32_t) {
    Array::store(job.weight + i * kElementBytes, v);
  }
};

/// The random bits of one vector's elements, starting with `first`.
[[gnu::always_inline]] inline Word rounding_bits_from(std::uint32_t key, std::uint64_t first) {
  Word elem_low = {};
  for (std::size_t lane = 0; lane < kLanes; ++lane) elem_low[lane] = static_cast<unsigned>(lane);
  const Word first_low = Word{} + static_cast<std::uint32_t>(first);
  elem_low = elem_low + first_low;
  // A comparison that holds is -1 in each bit: the lower half has run over.
  const Word carry = bits_as<Word>(elem_low < first_low);
  const Word elem_high = static_cast<std::uint32_t>(first >> 32) - carry;
  return rounding_bits<Word>(key, elem_low, elem_high);
}

/// Infinities have no bits below the upper 16, and the canonical NaN neither: nothing is carried.
struct StochasticPlace : PlainPlace<BFloat16Array> {
  [[gnu::always_inline]] static void store(const WeightJob& job, std::size_t i, const Fp32& v,
                                           std::uint32_t key) {
    const Word random = rounding_bits_from(key, job.first_elem + i);
    const Word cut = (bits_as<Word>(quiet(v)) + random) >> 16;
    store_bytes(job.weight + i * kElementBytes, __builtin_convertvector(cut, HalfWord));
  }
};

/// The lower half of the bits as a signed number is what the upper one, rounded, lacks.
struct SplitPlace {
  static constexpr std::size_t kElementBytes = 2;
  static constexpr bool kHasLow = true;

  [[gnu::always_inline]] static Fp32 load(const WeightJob& job, std::size_t i) {
    const auto high = load_bytes<HalfWord>(job.weight + i * kElementBytes);
    const auto low = load_bytes<HalfVec<std::int16_t>>(job.low + i * kElementBytes);
    return bits_as<Fp32>((__builtin_convertvector(high, Word) << 16) +
                         bits_as<Word>(__builtin_convertvector(low, Vec<std::int32_t>)));
  }
  [[gnu::always_inline]] static void store(const WeightJob& job, std::size_t i, const Fp32& v,
                                           std::uint32_t) {
    const Word bits = bits_as<Word>(quiet(v));
    store_bytes(job.weight + i * kElementBytes,
                __builtin_convertvector((bits + 0x8000u) >> 16, HalfWord));
    store_bytes(job.low + i * kElementBytes, __builtin_convertvector(bits & 0xffffu, HalfWord));
  }
};

}  // namespace
}  // namespace ringcomm::host
