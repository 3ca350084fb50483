#include "reduce/reduce_op.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#include "reduce/softmax_merge.h"

namespace ringcomm::cpu {
namespace {

#if defined(__x86_64__)
// Asked of cpuid because not every compiler's __builtin_cpu_supports knows the name. That the
// operating system saves the registers follows from "avx2", which the builtin does check.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}

// Every extension that simd.h names.
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

// From the best to what every processor has.
std::vector<const SimdKernels*> levels() {
  std::vector<const SimdKernels*> all;
#if defined(__x86_64__)
  if (has_avx512()) all.push_back(&kAvx512Kernels);
  if (has_avx2()) all.push_back(&kAvx2Kernels);
#endif
  all.push_back(&kBaselineKernels);
  return all;
}

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

const SimdKernels* find_simd_kernels(std::string_view name) {
  for (const SimdKernels* kernels : levels())
    if (kernels->level == name) return kernels;
  return nullptr;
}

const SimdKernels& choose_simd_kernels(const char* requested) {
  const std::string name = requested != nullptr ? requested : "";
  const SimdKernels& best = *levels().front();
  if (name.empty()) return best;
  if (const SimdKernels* kernels = find_simd_kernels(name)) return *kernels;
  // A silent fall-back would let a benchmark or a test report figures of a level that it did not
  // run.
  throw std::invalid_argument(
      name == "avx512" || name == "avx2"
          ? "RINGCOMM_SIMD=" + name +
                ": this processor lacks these instructions; the best it has is \"" + best.level +
                "\"; unset the variable to use it"
          : "RINGCOMM_SIMD=\"" + name +
                "\" is not an instruction set: expected avx512, avx2 or baseline");
}

const SimdKernels& simd_kernels() {
  static const SimdKernels& chosen = choose_simd_kernels(std::getenv("RINGCOMM_SIMD"));
  return chosen;
}

const char* simd_level() { return simd_kernels().level; }

const ReduceOp* find_reduce_op(Reduction reduction, DType dtype) {
  const int r = static_cast<int>(reduction);
  const int d = static_cast<int>(dtype);
  if (r >= kNumReductions || d >= kNumDTypes) return nullptr;
  const ReduceOp& op = simd_kernels().ops[r][d];
  return op.combine == nullptr ? nullptr : &op;
}

void copy_bytes(void* to, const void* from, std::size_t num_bytes, StoreKind kind) {
  if (num_bytes == 0) return;  // the pointers may be null, which memcpy does not allow
  if (kind == StoreKind::kStreaming && &simd_kernels() != &kBaselineKernels)
    stream_copy(to, from, num_bytes);
  else
    std::memcpy(to, from, num_bytes);
}

}  // namespace ringcomm::cpu
