#include "kernels/reductions/reduce_op.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels/common/denormals.h"
#include "kernels/common/tables.h"
#include "kernels/losses/softmax_merge.h"

namespace ringcomm::cpu {
namespace {

#if defined(__x86_64__)
// Only whole lines are streamed: the processor gathers streamed bytes into a line, and sends a
// partial one to memory as several small writes. Vectors of 16 bytes are 5 to 15 % slower, those of
// 64 no faster.
[[gnu::target("avx2")]] void stream_copy(void* to, const void* from, std::size_t num_bytes) {
  constexpr std::size_t kLineBytes = 64;
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
  const std::size_t to_line = -reinterpret_cast<std::uintptr_t>(out) % kLineBytes;
  std::size_t offset = std::min(to_line, num_bytes);
  std::memcpy(out, in, offset);
  for (; num_bytes - offset >= kLineBytes; offset += kLineBytes)
    for (std::size_t i = offset; i < offset + kLineBytes; i += sizeof(__m256i))
      _mm256_stream_si256(reinterpret_cast<__m256i*>(out + i),
                          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i)));
  std::memcpy(out + offset, in + offset, num_bytes - offset);
  _mm_sfence();  // orders the streamed lines before any later store
}
#else
constexpr auto stream_copy = std::memcpy;
#endif

}  // namespace

void merge_softmax_stats(void* to, void* also_to, const void* const* srcs, int num_srcs,
                         std::size_t num_elems, int) {
  const KeepDenormals mode;
  for (std::size_t i = 0; i < num_elems; ++i) {
    const auto element = [&](int src) {
      SoftmaxStats stats;
      std::memcpy(&stats, static_cast<const char*>(srcs[src]) + i * sizeof stats, sizeof stats);
      return stats;
    };
    SoftmaxStats sum = element(0);
    for (int src = 1; src < num_srcs; ++src) sum = merge(sum, element(src));
    for (void* result : {to, also_to})
      if (result != nullptr)
        std::memcpy(static_cast<char*>(result) + i * sizeof sum, &sum, sizeof sum);
  }
}

const ReduceOp* find_reduce_op(Reduction reduction, DType dtype) {
  const int r = static_cast<int>(reduction);
  const int d = static_cast<int>(dtype);
  if (r >= kNumReductions || d >= kNumDTypes) return nullptr;
  const ReduceOp& op = kernels().reductions[r][d];
  return op.combine == nullptr ? nullptr : &op;
}

void copy_bytes(void* to, const void* from, std::size_t num_bytes, StoreKind kind) {
  if (num_bytes == 0) return;  // the pointers may be null, which memcpy does not allow
  if (kind == StoreKind::kStreaming && &kernels() != &kBaselineKernels)
    stream_copy(to, from, num_bytes);
  else
    std::memcpy(to, from, num_bytes);
}

}  // namespace ringcomm::cpu
