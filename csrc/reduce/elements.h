#pragma once

// The interface of element types: conversion of a vector from memory to an accumulator and back.
//
//   load     memory -> accumulator
//   divide   the last step of an average
//   pack     accumulator -> the vector to store
//
// The includer has defined widen_float16 and narrow_float16 for its level.
//
// Every NaN is stored as the canonical one. Which of two NaN operands an addition hands on depends
// on their order in the instruction, and that is the compiler's to choose: without this the levels
// would differ in the payload.

#include "reduce/vectors.h"

namespace ringcomm::host {
namespace {

template <class T>
[[gnu::always_inline]] inline Vec<T> canonical_nan(const Vec<T>& v) {
  return v == v ? v : Vec<T>{} + static_cast<T>(__builtin_nan(""));
}

template <class T>
struct IntElement {
  using Acc = Accumulator<T, 1>;
  using Packed = Vec<T>;

  [[gnu::always_inline]] static Acc load(const char* from) { return {{load_bytes<Vec<T>>(from)}}; }

  // By lane, because SSE, AVX and NEON have no integer division. In a type that can also represent
  // the divisor, unlike T.
  [[gnu::always_inline]] static void divide(Acc& acc, int divisor) {
    for (std::size_t lane = 0; lane < kVectorBytes / sizeof(T); ++lane) {
      acc.part[0][lane] = static_cast<T>(acc.part[0][lane] / divisor);
    }
  }

  [[gnu::always_inline]] static Packed pack(const Acc& acc) { return acc.part[0]; }
};

/// Any byte but zero counts as true. An average of truth values has no meaning: the divisor is
/// ignored.
struct BoolElement {
  using Acc = Accumulator<std::uint8_t, 1>;
  using Packed = Vec<std::uint8_t>;

  [[gnu::always_inline]] static Acc load(const char* from) {
    return {{bits_as<Packed>(load_bytes<Packed>(from) != 0) & 1}};
  }
  [[gnu::always_inline]] static void divide(Acc&, int) {}
  [[gnu::always_inline]] static Packed pack(const Acc& acc) { return acc.part[0]; }
};

template <class T>
struct FloatElement {
  using Acc = Accumulator<T, 1>;
  using Packed = Vec<T>;

  [[gnu::always_inline]] static Acc load(const char* from) { return {{load_bytes<Vec<T>>(from)}}; }
  [[gnu::always_inline]] static void divide(Acc& acc, int divisor) {
    acc.part[0] /= static_cast<T>(divisor);
  }
  [[gnu::always_inline]] static Packed pack(const Acc& acc) {
    return canonical_nan<T>(acc.part[0]);
  }
};

/// Accumulates 16-bit floats as two vectors of fp32.
struct WideElement {
  using Acc = Accumulator<float, 2>;
  using Packed = Vec<std::uint32_t>;

  [[gnu::always_inline]] static void divide(Acc& acc, int divisor) {
    acc.part[0] /= static_cast<float>(divisor);
    acc.part[1] /= static_cast<float>(divisor);
  }
};

struct Float16Element : WideElement {
  [[gnu::always_inline]] static Acc load(const char* from) { return widen_float16(from); }
  [[gnu::always_inline]] static Packed pack(const Acc& acc) {
    return narrow_float16({{canonical_nan<float>(acc.part[0]), canonical_nan<float>(acc.part[1])}});
  }
};

/// A bfloat16 is the upper half of an fp32: of each pair one element is a mask away and the other a
/// shift. Rounded by hand, since the avx512_bf16 instruction flushes subnormals to zero.
struct BFloat16Element : WideElement {
  [[gnu::always_inline]] static Acc load(const char* from) {
    const auto pairs = load_bytes<Packed>(from);
    return {{bits_as<Vec<float>>(pairs << 16), bits_as<Vec<float>>(pairs & 0xffff0000u)}};
  }
  [[gnu::always_inline]] static Packed pack(const Acc& acc) {
    return (rounded(acc.part[0]) >> 16) | (rounded(acc.part[1]) & 0xffff0000u);
  }

 private:
  // Rounds to nearest even in the upper 16 bits. The canonical NaN has no lower bits and is
  // unchanged.
  [[gnu::always_inline]] static Packed rounded(const Vec<float>& value) {
    const Packed bits = bits_as<Packed>(canonical_nan<float>(value));
    return bits + 0x7fffu + ((bits >> 16) & 1u);
  }
};

}  // namespace
}  // namespace ringcomm::host
