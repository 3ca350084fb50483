#pragma once

// Helpers of the float kernels in addition to vectors.h, for every processor. Include it after
// RINGCOMM_VECTOR_BYTES and before the kernels. No target pragma.

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "reduce/software_float16.h"

namespace ringcomm::host {
namespace {

[[gnu::always_inline]] inline Vec<float> load_float16(const char* from) {
  const auto halves = load_bytes<HalfVec<std::uint16_t>>(from);
  return float16_to_fp32(__builtin_convertvector(halves, Bits));
}

[[gnu::always_inline]] inline void store_float16(char* to, const Vec<float>& v) {
  store_bytes(to, __builtin_convertvector(fp32_to_float16(v), HalfVec<std::uint16_t>));
}

[[gnu::always_inline]] inline Vec<float> square_root(const Vec<float>& v) {
#if defined(__x86_64__)
  return (Vec<float>)_mm_sqrt_ps((__m128)v);
#else
  return (Vec<float>)vsqrtq_f32((float32x4_t)v);
#endif
}

// Without the instruction this calls the C library, which is slow but gives the same bits. x86-64
// processors since 2013 have AVX2 and do not use it.
[[gnu::always_inline]] inline Vec<float> multiply_add(const Vec<float>& a, const Vec<float>& b,
                                                      const Vec<float>& c) {
#if defined(__x86_64__)
  Vec<float> result = c;
  for (int lane = 0; lane < 4; ++lane) result[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
  return result;
#else
  return (Vec<float>)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#endif
}

}  // namespace
}  // namespace ringcomm::host
