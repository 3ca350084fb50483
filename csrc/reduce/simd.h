#pragma once

// One instruction set: vectors of its width, and what the compiler's vectors (GCC and clang) lack.
//
// Kernels are written once and compiled once per level, each time by a source file that defines
// RINGCOMM_VECTOR_BYTES:
//
//   16  baseline: what every processor has, SSE2 on x86-64 and NEON on aarch64
//   32  AVX2, F16C and FMA
//   64  AVX-512 F, BW, DQ and VL (Skylake-SP, Zen 4 and later)
//
// From the target pragma to the end of that file everything is compiled for the level: to the end,
// because templates are instantiated there (clang needs a pop, after the last kernel). All headers
// of the standard library and the compiler must precede the pragma.
//
// Kernels have internal linkage, and every function that takes a vector is forced inline. A
// function with external linkage would be merged by the linker with its namesake of another level,
// or of a file that knows nothing of levels, and crash processors without the instructions. For the
// same reason no function template of the standard library is called below the pragma.
//
// No expression multiplies and adds except by multiply_add(), because a compiler may contract such
// a pair to a fused instruction, and the result would depend on the level (-ffp-contract=off).

#include <cstddef>
#include <cstdint>
#include <type_traits>

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

namespace ringcomm::host {
namespace {

constexpr std::size_t kVectorBytes = RINGCOMM_VECTOR_BYTES;

template <class T, std::size_t kBytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(kBytes)));
};

template <class T>
using Vec = typename VectorOf<T, kVectorBytes>::type;

/// The same number of elements of half the width.
template <class T>
using HalfVec = typename VectorOf<T, kVectorBytes / 2>::type;

using Word = Vec<std::uint32_t>;
using HalfWord = HalfVec<std::uint16_t>;

template <class V>
[[gnu::always_inline]] inline V load_bytes(const char* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

template <class V>
[[gnu::always_inline]] inline void store_bytes(char* to, const V& v) {
  __builtin_memcpy(to, &v, sizeof v);
}

template <class To, class From>
[[gnu::always_inline]] inline To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  return (To)from;
}

/// Every NaN is stored as this one. Which of two NaN operands an addition hands on depends on their
/// order in the instruction, and that is the compiler's to choose: without this the levels would
/// differ in the payload.
template <class T>
[[gnu::always_inline]] inline Vec<T> canonical_nan(const Vec<T>& v) {
  return v == v ? v : Vec<T>{} + static_cast<T>(__builtin_nan(""));
}

/// Rounds to bfloat16, to nearest even, in the upper 16 bits; the lower ones are left over. The
/// canonical NaN has no lower bits and is unchanged. By hand, since the avx512_bf16 instruction
/// flushes subnormals to zero.
[[gnu::always_inline]] inline Word rounded_to_bfloat16(const Vec<float>& v) {
  const Word bits = bits_as<Word>(canonical_nan<float>(v));
  return bits + 0x7fffu + ((bits >> 16) & 1u);
}

// ---- what an instruction set brings; float16 is rounded to nearest even

#if RINGCOMM_VECTOR_BYTES == 64

// The zeroing forms with a full mask make the plain instructions. The plain forms leave g++ 12 to
// warn of an uninitialised variable in its own header.
[[gnu::always_inline]] inline Vec<float> widen_float16(const HalfWord& v) {
  return (Vec<float>)_mm512_maskz_cvtph_ps(0xffff, (__m256i)v);
}

[[gnu::always_inline]] inline HalfWord narrow_float16(const Vec<float>& v) {
  return (HalfWord)_mm512_maskz_cvtps_ph(0xffff, (__m512)v, _MM_FROUND_TO_NEAREST_INT);
}

[[gnu::always_inline]] inline Vec<float> square_root(const Vec<float>& v) {
  return (Vec<float>)_mm512_maskz_sqrt_ps(0xffff, (__m512)v);
}

/// a * b + c, rounded once.
[[gnu::always_inline]] inline Vec<float> multiply_add(const Vec<float>& a, const Vec<float>& b,
                                                      const Vec<float>& c) {
  return (Vec<float>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

/// Stores past the caches; `to` is aligned to a vector.
[[gnu::always_inline]] inline void stream_vector(char* to, const Word& v) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)v);
}

#elif RINGCOMM_VECTOR_BYTES == 32

[[gnu::always_inline]] inline Vec<float> widen_float16(const HalfWord& v) {
  return (Vec<float>)_mm256_cvtph_ps((__m128i)v);
}

[[gnu::always_inline]] inline HalfWord narrow_float16(const Vec<float>& v) {
  return (HalfWord)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
}

[[gnu::always_inline]] inline Vec<float> square_root(const Vec<float>& v) {
  return (Vec<float>)_mm256_sqrt_ps((__m256)v);
}

[[gnu::always_inline]] inline Vec<float> multiply_add(const Vec<float>& a, const Vec<float>& b,
                                                      const Vec<float>& c) {
  return (Vec<float>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

[[gnu::always_inline]] inline void stream_vector(char* to, const Word& v) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)v);
}

#else  // the baseline; float16 in integer arithmetic, exact for every input

// Comparisons are of signed integers, which SSE2 has; none of the values reaches the sign bit.
using Bits = Vec<std::int32_t>;

[[gnu::always_inline]] inline Bits all_lanes(std::int32_t value) { return Bits{} + value; }

[[gnu::always_inline]] inline Vec<float> widen_float16(const HalfWord& v) {
  const Bits half = __builtin_convertvector(v, Bits);
  const Bits shifted = (half & 0x7fff) << 13;
  const Bits exponent = shifted & 0x0f800000;
  // The bias changes from 15 to 127. For infinities and NaN another 112 is added, because their
  // exponent changes from 31 to 255.
  const Bits normal = shifted + (112 << 23) + ((exponent == 0x0f800000) & (112 << 23));
  // A subnormal is its mantissa times 2^-24. With the exponent of 2^-14 in front the mantissa
  // counts just that, and taking 2^-14 away leaves the value, exactly.
  const Bits two_to_minus_14 = all_lanes(113 << 23);
  const Vec<float> subnormal =
      bits_as<Vec<float> >(shifted + two_to_minus_14) - bits_as<Vec<float> >(two_to_minus_14);
  const Bits magnitude = exponent == 0 ? bits_as<Bits>(subnormal) : normal;
  // The sign is shifted as unsigned: a signed shift into the sign bit is an overflow to the
  // sanitizer.
  const Word sign = (bits_as<Word>(half) & 0x8000u) << 16;
  return bits_as<Vec<float> >(magnitude | bits_as<Bits>(sign));
}

[[gnu::always_inline]] inline HalfWord narrow_float16(const Vec<float>& v) {
  const Bits magnitude = bits_as<Bits>(v) & 0x7fffffff;
  const Bits sign = (bits_as<Bits>(v) >> 16) & 0x8000;
  // Values of 65536 and more, including infinity and NaN, are rounded like 65536 and become
  // infinity.
  const Bits limit = all_lanes(143 << 23);
  const Bits limited = magnitude < limit ? magnitude : limit;
  // Rounds by adding just under half of the last kept bit, or exactly half if that bit is odd. A
  // carry propagates into the exponent, up to infinity.
  const Bits normal = (limited - (112 << 23) + 0xfff + ((limited >> 13) & 1)) >> 13;
  // Below 2^-14 the last kept bit is 2^-24, which is that of a float in [0.5, 1): adding 0.5 makes
  // the processor round there, and taking the bits of 0.5 away leaves the count.
  const Bits half = all_lanes(126 << 23);
  const Bits subnormal =
      bits_as<Bits>(bits_as<Vec<float> >(magnitude) + bits_as<Vec<float> >(half)) - half;
  const Bits quiet = (magnitude > (255 << 23)) & 0x200;
  const Bits result = sign | quiet | (magnitude < (113 << 23) ? subnormal : normal);
  return __builtin_convertvector(result, HalfWord);
}

#if defined(__x86_64__)

[[gnu::always_inline]] inline Vec<float> square_root(const Vec<float>& v) {
  return (Vec<float>)_mm_sqrt_ps((__m128)v);
}

// Without the instruction this calls the C library, which is slow but gives the same bits. x86-64
// processors since 2013 have AVX2 and do not use it.
[[gnu::always_inline]] inline Vec<float> multiply_add(const Vec<float>& a, const Vec<float>& b,
                                                      const Vec<float>& c) {
  Vec<float> result = c;
  for (int lane = 0; lane < 4; ++lane) result[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
  return result;
}

[[gnu::always_inline]] inline void stream_vector(char* to, const Word& v) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)v);
}

#else

[[gnu::always_inline]] inline Vec<float> square_root(const Vec<float>& v) {
  return (Vec<float>)vsqrtq_f32((float32x4_t)v);
}

[[gnu::always_inline]] inline Vec<float> multiply_add(const Vec<float>& a, const Vec<float>& b,
                                                      const Vec<float>& c) {
  return (Vec<float>)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}

#endif
#endif

}  // namespace
}  // namespace ringcomm::host
