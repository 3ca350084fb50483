// 32-byte vectors, and float16 by F16C.

#if defined(__x86_64__)

#include "core/types.h"
#include "reduce/simd_tables.h"

#define RINGCOMM_VECTOR_BYTES 32
#include "reduce/target_avx2.h"

namespace ringcomm::host {
namespace {

[[gnu::always_inline]] inline Accumulator<float, 2> widen_float16(const char* from) {
  const auto* halves = reinterpret_cast<const __m128i*>(from);
  return {{_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))}};
}

[[gnu::always_inline]] inline Vec<std::uint32_t> narrow_float16(const Accumulator<float, 2>& acc) {
  const __m128i low = _mm256_cvtps_ph(acc.part[0], _MM_FROUND_TO_NEAREST_INT);
  const __m128i high = _mm256_cvtps_ph(acc.part[1], _MM_FROUND_TO_NEAREST_INT);
  return bits_as<Vec<std::uint32_t>>(_mm256_set_m128i(high, low));
}

[[gnu::always_inline]] inline void stream_line(char* to, const char* from) {
  for (int i = 0; i < 2; ++i) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + i);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + i, v);
  }
}

[[gnu::always_inline]] inline void stream_fence() { _mm_sfence(); }

}  // namespace
}  // namespace ringcomm::host

#include "reduce/reduce_kernels.h"
#include "reduce/stream_copy.h"

namespace ringcomm::host {

constinit const SimdKernels kAvx2Kernels = make_kernels("avx2", stream_copy);

}  // namespace ringcomm::host

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // __x86_64__
