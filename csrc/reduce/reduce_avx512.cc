// 64-byte vectors; AVX-512 F, BW, DQ and VL (Skylake-SP, Zen 4 and later).

#if defined(__x86_64__)

#include "core/types.h"
#include "reduce/simd_tables.h"

#define RINGCOMM_VECTOR_BYTES 64
#include "reduce/target_avx512.h"

namespace ringcomm::host {
namespace {

// The zeroing forms with a full mask make the plain instructions. The plain forms leave g++ 12 to
// warn of an uninitialised variable in its own header.
[[gnu::always_inline]] inline Accumulator<float, 2> widen_float16(const char* from) {
  const auto* halves = reinterpret_cast<const __m256i*>(from);
  return {{_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(halves)),
           _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(halves + 1))}};
}

[[gnu::always_inline]] inline Vec<std::uint32_t> narrow_float16(const Accumulator<float, 2>& acc) {
  const __m256i low = _mm512_maskz_cvtps_ph(0xffff, acc.part[0], _MM_FROUND_TO_NEAREST_INT);
  const __m256i high = _mm512_maskz_cvtps_ph(0xffff, acc.part[1], _MM_FROUND_TO_NEAREST_INT);
  return bits_as<Vec<std::uint32_t>>(
      _mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(low), high, 1));
}

[[gnu::always_inline]] inline void stream_line(char* to, const char* from) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
}

[[gnu::always_inline]] inline void stream_fence() { _mm_sfence(); }

}  // namespace
}  // namespace ringcomm::host

#include "reduce/reduce_kernels.h"
#include "reduce/stream_copy.h"

namespace ringcomm::host {

constinit const SimdKernels kAvx512Kernels = make_kernels("avx512", stream_copy);

}  // namespace ringcomm::host

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // __x86_64__
