#include "reduce/reduce_op.h"

#include <array>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "reduce/softmax_merge.h"

namespace ringcomm::host {
namespace {

// ---- levels

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

// Every extension that simd.h names; Skylake-SP and Zen 4 are the first processors with all of
// them.
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

struct Level {
  std::string_view name;
  const SimdKernels* kernels;  // null where this processor lacks the instructions
};

std::array<Level, 3> levels_best_first() {
#if defined(__x86_64__)
  return {{{"avx512", has_avx512() ? &kAvx512Kernels : nullptr},
           {"avx2", has_avx2() ? &kAvx2Kernels : nullptr},
           {"baseline", &kBaselineKernels}}};
#else
  return {{{"avx512", nullptr}, {"avx2", nullptr}, {"baseline", &kBaselineKernels}}};
#endif
}

// ---- operators

void merge_stats(void* to, void* also_to, const void* const* srcs, int num_srcs,
                 std::size_t num_elems, int) {
  for (std::size_t i = 0; i < num_elems; ++i) {
    const auto element = [&](int src) {
      SoftmaxStats stats;
      std::memcpy(&stats, static_cast<const char*>(srcs[src]) + i * sizeof stats, sizeof stats);
      return stats;
    };
    SoftmaxStats sum = element(0);
    for (int src = 1; src < num_srcs; ++src) sum = merge(sum, element(src));
    std::memcpy(static_cast<char*>(to) + i * sizeof sum, &sum, sizeof sum);
    if (also_to != nullptr)
      std::memcpy(static_cast<char*>(also_to) + i * sizeof sum, &sum, sizeof sum);
  }
}

struct OpTable {
  explicit OpTable(const SimdKernels& kernels) {
    for (int r = 0; r < kNumReductions; ++r) {
      for (int d = 0; d < kNumDTypes; ++d) {
        const auto reduction = static_cast<Reduction>(r);
        const auto dtype = static_cast<DType>(d);
        const bool is_merge = reduction == Reduction::kMerge && dtype == DType::kSoftmaxStats;
        names[r][d] = std::string(name_of(reduction)) + " " + name_of(dtype);
        of[r][d] = {.name = names[r][d].c_str(),
                    .element_bytes = element_bytes(dtype),
                    .combine = is_merge ? merge_stats : kernels.combine[r][d]};
      }
    }
  }

  ReduceOp of[kNumReductions][kNumDTypes];
  std::string names[kNumReductions][kNumDTypes];
};

}  // namespace

const SimdKernels* find_simd_kernels(std::string_view name) {
  for (const Level& level : levels_best_first())
    if (level.name == name) return level.kernels;
  return nullptr;
}

const SimdKernels& choose_simd_kernels(const char* requested) {
  const std::string name = requested != nullptr ? requested : "";
  const SimdKernels* best = nullptr;
  bool is_known = false;
  for (const Level& level : levels_best_first()) {
    if (best == nullptr) best = level.kernels;
    if (level.name != name) continue;
    if (level.kernels != nullptr) return *level.kernels;
    is_known = true;
  }
  if (name.empty()) return *best;
  // A silent fall-back would let a benchmark or a test report figures of a level that it did not
  // run.
  throw std::invalid_argument(
      is_known ? "RINGCOMM_SIMD=" + name +
                     ": this processor lacks these instructions; the best it has is \"" +
                     best->level + "\"; unset the variable to use it"
               : "RINGCOMM_SIMD=\"" + name +
                     "\" is not an instruction set: expected avx512, avx2 or baseline");
}

const SimdKernels& simd_kernels() {
  static const SimdKernels& chosen = choose_simd_kernels(std::getenv("RINGCOMM_SIMD"));
  return chosen;
}

const char* simd_level() { return simd_kernels().level; }

const ReduceOp* find_reduce_op(Reduction reduction, DType dtype) {
  // Never destroyed: a progress thread may use it at exit.
  static const OpTable& table = *new OpTable(simd_kernels());
  const int r = static_cast<int>(reduction);
  const int d = static_cast<int>(dtype);
  if (r >= kNumReductions || d >= kNumDTypes) return nullptr;
  const ReduceOp& op = table.of[r][d];
  return op.combine == nullptr ? nullptr : &op;
}

void copy_bytes(void* to, const void* from, std::size_t num_bytes, StoreKind kind) {
  if (num_bytes == 0) return;  // the pointers may be null, which memcpy does not allow
  if (kind == StoreKind::kStreaming) {
    if (const auto stream_copy = simd_kernels().stream_copy)
      return stream_copy(to, from, num_bytes);
  }
  std::memcpy(to, from, num_bytes);
}

}  // namespace ringcomm::host
