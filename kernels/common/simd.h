#pragma once

// One instruction set: vectors of its width, and what the compiler's vectors (GCC and clang) lack.
//
// Kernels are written once and compiled once per level (tables.h), each time by a source file that
// defines RINGCOMM_VECTOR_BYTES: 16 for "baseline", 32 for "avx2", 64 for "avx512".
//
// Rules, so that no code of a level runs on a processor without it:
//  - All headers of the standard library and the compiler precede the target pragma. From there to
//    the end of the file, where templates are instantiated, everything is compiled for the level
//    (clang needs a pop, after the last kernel).
//  - Kernels have internal linkage, and every function that takes a vector is forced inline: the
//    linker would merge others with their namesakes of another level. So below the pragma no
//    function template of the standard library is called.
//
// And so that results do not depend on the level: no expression multiplies and adds except by
// multiply_add(), because a compiler may contract such a pair (-ffp-contract=off).

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if RINGCOMM_VECTOR_BYTES == 32 && defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c,fma"))), apply_to = function)
#elif RINGCOMM_VECTOR_BYTES == 32
#pragma GCC target("avx2,f16c,fma")
#elif RINGCOMM_VECTOR_BYTES == 64 && defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#elif RINGCOMM_VECTOR_BYTES == 64
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif

namespace ringcomm::cpu {
namespace {

constexpr std::size_t kVectorBytes = RINGCOMM_VECTOR_BYTES;

template <class T, std::size_t kBytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(kBytes)));
};

template <class T>
using Vec = typename VectorOf<T, kVectorBytes>::type;

/// As many elements of half the width.
template <class T>
using HalfVec = typename VectorOf<T, kVectorBytes / 2>::type;

using Fp32 = Vec<float>;
using Word = Vec<std::uint32_t>;
using HalfWord = HalfVec<std::uint16_t>;

/// A vector, or its first bytes and zeros.
template <class V>
[[gnu::always_inline]] inline V load_bytes(const char* from, std::size_t num_bytes = sizeof(V)) {
  V v = {};
  __builtin_memcpy(&v, from, num_bytes);
  return v;
}

template <class V>
[[gnu::always_inline]] inline void store_bytes(char* to, const V& v,
                                               std::size_t num_bytes = sizeof(V)) {
  __builtin_memcpy(to, &v, num_bytes);
}

template <class To, class From>
[[gnu::always_inline]] inline To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  return (To)from;
}

/// Every NaN is stored as this one: which of two NaN operands an addition hands on is the
/// compiler's choice, so the levels would differ in the payload.
template <class T>
[[gnu::always_inline]] inline Vec<T> canonical_nan(const Vec<T>& v) {
  return v == v ? v : Vec<T>{} + static_cast<T>(__builtin_nan(""));
}

/// Rounds to bfloat16, to nearest even, in the upper 16 bits; the lower ones are left over. The
/// canonical NaN has no lower bits and is unchanged. By hand, since the avx512_bf16 instruction
/// flushes subnormals to zero.
[[gnu::always_inline]] inline Word rounded_to_bfloat16(const Fp32& v) {
  const Word bits = bits_as<Word>(canonical_nan<float>(v));
  return bits + 0x7fffu + ((bits >> 16) & 1u);
}

// ---- what an instruction set brings: float16, rounded to nearest even; square_root();
// ---- multiply_add(), a * b + c rounded once

#if RINGCOMM_VECTOR_BYTES == 64

// The zeroing forms with a full mask make the plain instructions. The plain forms leave g++ 12 to
// warn of an uninitialised variable in its own header.
[[gnu::always_inline]] inline Fp32 widen_float16(const HalfWord& v) {
  return (Fp32)_mm512_maskz_cvtph_ps(0xffff, (__m256i)v);
}

[[gnu::always_inline]] inline HalfWord narrow_float16(const Fp32& v) {
  return (HalfWord)_mm512_maskz_cvtps_ph(0xffff, (__m512)v, _MM_FROUND_TO_NEAREST_INT);
}

[[gnu::always_inline]] inline Fp32 square_root(const Fp32& v) {
  return (Fp32)_mm512_maskz_sqrt_ps(0xffff, (__m512)v);
}

[[gnu::always_inline]] inline Fp32 multiply_add(const Fp32& a, const Fp32& b, const Fp32& c) {
  return (Fp32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

#elif RINGCOMM_VECTOR_BYTES == 32

[[gnu::always_inline]] inline Fp32 widen_float16(const HalfWord& v) {
  return (Fp32)_mm256_cvtph_ps((__m128i)v);
}

[[gnu::always_inline]] inline HalfWord narrow_float16(const Fp32& v) {
  return (HalfWord)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
}

[[gnu::always_inline]] inline Fp32 square_root(const Fp32& v) {
  return (Fp32)_mm256_sqrt_ps((__m256)v);
}

[[gnu::always_inline]] inline Fp32 multiply_add(const Fp32& a, const Fp32& b, const Fp32& c) {
  return (Fp32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

#else

// float16 in integer arithmetic, exact for every input (the compiler's _Float16 calls a function
// for each element: ten times slower). Comparisons are of signed integers, which SSE2 has; none of
// the values reaches the sign bit.
using Bits = Vec<std::int32_t>;

[[gnu::always_inline]] inline Fp32 widen_float16(const HalfWord& v) {
  const Bits half = __builtin_convertvector(v, Bits);
  const Bits shifted = (half & 0x7fff) << 13;
  const Bits exponent = shifted & 0x0f800000;
  // The bias changes from 15 to 127, and the exponent of infinities and NaN from 31 to 255.
  const Bits normal = shifted + (112 << 23) + ((exponent == 0x0f800000) & (112 << 23));
  // A subnormal is its mantissa times 2^-24: what it adds to 2^-14.
  const Bits two_to_minus_14 = Bits{} + (113 << 23);
  const Fp32 subnormal = bits_as<Fp32>(shifted + two_to_minus_14) - bits_as<Fp32>(two_to_minus_14);
  const Bits magnitude = exponent == 0 ? bits_as<Bits>(subnormal) : normal;
  // Unsigned, because a signed shift into the sign bit is an overflow to the sanitizer.
  const Word sign = (bits_as<Word>(half) & 0x8000u) << 16;
  return bits_as<Fp32>(bits_as<Word>(magnitude) | sign);
}

[[gnu::always_inline]] inline HalfWord narrow_float16(const Fp32& v) {
  const Bits magnitude = bits_as<Bits>(v) & 0x7fffffff;
  const Bits sign = (bits_as<Bits>(v) >> 16) & 0x8000;
  // From 65536 on, infinity and NaN included, all is rounded like 65536: to infinity.
  const Bits limit = Bits{} + (143 << 23);
  const Bits limited = magnitude < limit ? magnitude : limit;
  // Adds just under half of the last kept bit, or exactly half if that bit is odd. A carry goes on
  // into the exponent.
  const Bits normal = (limited - (112 << 23) + 0xfff + ((limited >> 13) & 1)) >> 13;
  // Below 2^-14 the last kept bit is 2^-24, which is that of a float in [0.5, 1): adding 0.5 makes
  // the processor round there.
  const Bits half = Bits{} + (126 << 23);
  const Bits subnormal = bits_as<Bits>(bits_as<Fp32>(magnitude) + bits_as<Fp32>(half)) - half;
  const Bits quiet = (magnitude > (255 << 23)) & 0x200;
  const Bits result = sign | quiet | (magnitude < (113 << 23) ? subnormal : normal);
  return __builtin_convertvector(result, HalfWord);
}

#if defined(__x86_64__)

[[gnu::always_inline]] inline Fp32 square_root(const Fp32& v) {
  return (Fp32)_mm_sqrt_ps((__m128)v);
}

// Calls the C library, which is slow but gives the same bits.
[[gnu::always_inline]] inline Fp32 multiply_add(const Fp32& a, const Fp32& b, const Fp32& c) {
  Fp32 result = c;
  for (int lane = 0; lane < 4; ++lane) result[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
  return result;
}

#else

[[gnu::always_inline]] inline Fp32 square_root(const Fp32& v) {
  return (Fp32)vsqrtq_f32((float32x4_t)v);
}

[[gnu::always_inline]] inline Fp32 multiply_add(const Fp32& a, const Fp32& b, const Fp32& c) {
  return (Fp32)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}

#endif
#endif

}  // namespace
}  // namespace ringcomm::cpu
