// The level that every processor has: 16-byte vectors, SSE2 on x86-64 and NEON on aarch64. No
// target pragma.

#include <cstddef>
#include <cstdint>
#include <type_traits>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "reduce/simd_tables.h"

#define RINGCOMM_VECTOR_BYTES 16
#include "reduce/software_float16.h"

#if defined(__x86_64__)
namespace ringcomm::host {
namespace {

[[gnu::always_inline]] inline void stream_line(char* to, const char* from) {
  for (int i = 0; i < 4; ++i) {
    const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i);
    _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, v);
  }
}

[[gnu::always_inline]] inline void stream_fence() { _mm_sfence(); }

}  // namespace
}  // namespace ringcomm::host

#include "reduce/stream_copy.h"
#endif

#include "reduce/reduce_kernels.h"

namespace ringcomm::host {

#if defined(__x86_64__)
constinit const SimdKernels kBaselineKernels = make_kernels("baseline", stream_copy);
#else
constinit const SimdKernels kBaselineKernels = make_kernels("baseline", nullptr);
#endif

}  // namespace ringcomm::host
