#pragma once

// Helpers of the float kernels in addition to vectors.h, for AVX-512. Include it after
// RINGCOMM_VECTOR_BYTES and before the kernels, under the rules of target_avx512.h.

#include "reduce/target_avx512.h"

namespace ringcomm::host {
namespace {

// Zeroing forms with a full mask, as in reduce_avx512.cc.
[[gnu::always_inline]] inline Vec<float> load_float16(const char* from) {
  return (Vec<float>)_mm512_maskz_cvtph_ps(
      0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

[[gnu::always_inline]] inline void store_float16(char* to, const Vec<float>& v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm512_maskz_cvtps_ph(0xffff, (__m512)v, _MM_FROUND_TO_NEAREST_INT));
}

[[gnu::always_inline]] inline Vec<float> square_root(const Vec<float>& v) {
  return (Vec<float>)_mm512_maskz_sqrt_ps(0xffff, (__m512)v);
}

[[gnu::always_inline]] inline Vec<float> multiply_add(const Vec<float>& a, const Vec<float>& b,
                                                      const Vec<float>& c) {
  return (Vec<float>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

}  // namespace
}  // namespace ringcomm::host
