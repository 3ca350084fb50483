#pragma once

// Arrays of float32, float16 and bfloat16 as vectors of fp32, loaded and stored in the order of
// memory. The includer has defined load_float16 and store_float16 for its level (lanes_*.h).
//
// Every NaN is stored as the canonical one, as in elements.h.

#include "reduce/vectors.h"

namespace ringcomm::host {
namespace {

using Fp32 = Vec<float>;
constexpr std::size_t kLanes = kVectorBytes / sizeof(float);

[[gnu::always_inline]] inline Fp32 all(float value) { return Fp32{} + value; }

[[gnu::always_inline]] inline Fp32 quiet(const Fp32& v) {
  return v == v ? v : all(__builtin_nanf(""));
}

// ---- one vector of elements, in the order of memory, as fp32 and back

struct Float32Array {
  static constexpr std::size_t kElementBytes = 4;
  [[gnu::always_inline]] static Fp32 load(const char* from) { return load_bytes<Fp32>(from); }
  [[gnu::always_inline]] static void store(char* to, const Fp32& v) { store_bytes(to, quiet(v)); }
};

struct Float16Array {
  static constexpr std::size_t kElementBytes = 2;
  [[gnu::always_inline]] static Fp32 load(const char* from) { return load_float16(from); }
  [[gnu::always_inline]] static void store(char* to, const Fp32& v) { store_float16(to, quiet(v)); }
};

/// Rounded by hand, as in elements.h.
struct BFloat16Array {
  static constexpr std::size_t kElementBytes = 2;
  [[gnu::always_inline]] static Fp32 load(const char* from) {
    const auto halves = load_bytes<HalfVec<std::uint16_t>>(from);
    return bits_as<Fp32>(__builtin_convertvector(halves, Vec<std::uint32_t>) << 16);
  }
  [[gnu::always_inline]] static void store(char* to, const Fp32& v) {
    const auto bits = bits_as<Vec<std::uint32_t>>(quiet(v));
    const Vec<std::uint32_t> rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    store_bytes(to, __builtin_convertvector(rounded, HalfVec<std::uint16_t>));
  }
};

}  // namespace
}  // namespace ringcomm::host
