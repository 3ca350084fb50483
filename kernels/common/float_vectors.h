#pragma once

// Arrays of float32, float16 and bfloat16 as vectors of fp32, and sums over them; for kernels that
// are compiled for each level (see kernels/common/simd.h for the rules).

#include "kernels/common/tables.h"

// Below the headers of others.
#include "kernels/common/simd.h"

namespace ringcomm::cpu {
namespace {

constexpr std::size_t kLanes = kVectorBytes / sizeof(float);

[[gnu::always_inline]] inline Fp32 all(float value) { return Fp32{} + value; }

// ---- one vector of elements, in the order of memory, as fp32 and back, or its first `num` and
// ---- zeros; every NaN is stored as the canonical one; rounded() is what load() gives after
// store()

struct Float32Array {
  static constexpr std::size_t kElementBytes = 4;
  [[gnu::always_inline]] static Fp32 load(const char* from, std::size_t num = kLanes) {
    return load_bytes<Fp32>(from, num * kElementBytes);
  }
  [[gnu::always_inline]] static void store(char* to, const Fp32& v, std::size_t num = kLanes) {
    store_bytes(to, canonical_nan<float>(v), num * kElementBytes);
  }
  [[gnu::always_inline]] static Fp32 rounded(const Fp32& v) { return canonical_nan<float>(v); }
};

struct Float16Array {
  static constexpr std::size_t kElementBytes = 2;
  [[gnu::always_inline]] static Fp32 load(const char* from, std::size_t num = kLanes) {
    return widen_float16(load_bytes<HalfWord>(from, num * kElementBytes));
  }
  [[gnu::always_inline]] static void store(char* to, const Fp32& v, std::size_t num = kLanes) {
    store_bytes(to, narrow_float16(canonical_nan<float>(v)), num * kElementBytes);
  }
  [[gnu::always_inline]] static Fp32 rounded(const Fp32& v) {
    return widen_float16(narrow_float16(canonical_nan<float>(v)));
  }
};

struct BFloat16Array {
  static constexpr std::size_t kElementBytes = 2;
  [[gnu::always_inline]] static Fp32 load(const char* from, std::size_t num = kLanes) {
    const auto half = load_bytes<HalfWord>(from, num * kElementBytes);
    return bits_as<Fp32>(__builtin_convertvector(half, Word) << 16);
  }
  [[gnu::always_inline]] static void store(char* to, const Fp32& v, std::size_t num = kLanes) {
    const auto half = __builtin_convertvector(rounded_to_bfloat16(v) >> 16, HalfWord);
    store_bytes(to, half, num * kElementBytes);
  }
  [[gnu::always_inline]] static Fp32 rounded(const Fp32& v) {
    return bits_as<Fp32>(rounded_to_bfloat16(v) & 0xffff0000u);
  }
};

/// Calls body<Array>(its place in the tables) for the arrays of kFloatDTypes.
template <class Body>
constexpr void for_each_array(const Body& body) {
  static_assert(kFloatDTypes[0] == DType::kFloat32 && kFloatDTypes[1] == DType::kFloat16 &&
                kFloatDTypes[2] == DType::kBFloat16);
  body.template operator()<Float32Array>(0);
  body.template operator()<Float16Array>(1);
  body.template operator()<BFloat16Array>(2);
}

// ---- sums that do not depend on the level: they go into kSumLanes partial sums whatever the width
// ---- of a vector, and these are added as a tree

constexpr std::size_t kSumLanes = 64;
constexpr std::size_t kNumParts = kSumLanes / kLanes;

struct Partial {
  Fp32 part[kNumParts];

  /// Adds the vector that begins with element `i`.
  [[gnu::always_inline]] void add(std::size_t i, const Fp32& v) {
    const std::size_t idx = i / kLanes % kNumParts;
    part[idx] = part[idx] + v;
  }

  [[gnu::always_inline]] float total() const {
    float lanes[kSumLanes];
    for (std::size_t v = 0; v < kNumParts; ++v)
      store_bytes(reinterpret_cast<char*>(lanes + v * kLanes), part[v]);
    for (std::size_t width = kSumLanes / 2; width > 0; width /= 2)
      for (std::size_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    return lanes[0];
  }
};

/// NaN stays: no comparison with it holds.
[[gnu::always_inline]] inline Fp32 clamped(const Fp32& value, float clip_value) {
  const Fp32 limit = all(clip_value);
  const Fp32 bounded = value > limit ? limit : value;
  return bounded < -limit ? -limit : bounded;
}

[[gnu::always_inline]] inline Fp32 descended(const Fp32& weight, const Fp32& update, float lr_minus,
                                             float decay) {
  return multiply_add(update, all(lr_minus), weight * decay);
}

}  // namespace
}  // namespace ringcomm::cpu
