#pragma once

// Helpers of the float kernels in addition to vectors.h, for AVX2, F16C and FMA. Include it after
// RINGCOMM_VECTOR_BYTES and before the kernels, under the rules of target_avx2.h.

#include "reduce/target_avx2.h"

namespace ringcomm::host {
namespace {

[[gnu::always_inline]] inline Vec<float> load_float16(const char* from) {
  return (Vec<float>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

[[gnu::always_inline]] inline void store_float16(char* to, const Vec<float>& v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
}

[[gnu::always_inline]] inline Vec<float> square_root(const Vec<float>& v) {
  return (Vec<float>)_mm256_sqrt_ps((__m256)v);
}

[[gnu::always_inline]] inline Vec<float> multiply_add(const Vec<float>& a, const Vec<float>& b,
                                                      const Vec<float>& c) {
  return (Vec<float>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

}  // namespace
}  // namespace ringcomm::host
