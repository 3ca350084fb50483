#include "reduce/simd_tables.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "reduce/reduce_op.h"

namespace ringcomm::host {
namespace {

constexpr const char* kLevelsBestFirst[] = {"avx512", "avx2", "baseline"};

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

// Every extension that target_avx512.h names; Skylake-SP and Zen 4 are the first processors with
// all of them.
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

bool is_known_level(const char* name) {
  for (const char* level : kLevelsBestFirst) {
    if (std::strcmp(name, level) == 0) return true;
  }
  return false;
}

}  // namespace

const SimdKernels* find_simd_kernels(const char* level) {
#if defined(__x86_64__)
  if (std::strcmp(level, "avx512") == 0) return has_avx512() ? &kAvx512Kernels : nullptr;
  if (std::strcmp(level, "avx2") == 0) return has_avx2() ? &kAvx2Kernels : nullptr;
#endif
  return std::strcmp(level, "baseline") == 0 ? &kBaselineKernels : nullptr;
}

const SimdKernels& choose_simd_kernels(const char* requested) {
  if (requested == nullptr || *requested == '\0') {
    for (const char* level : kLevelsBestFirst) {
      if (const SimdKernels* kernels = find_simd_kernels(level)) return *kernels;
    }
    return kBaselineKernels;
  }
  if (const SimdKernels* kernels = find_simd_kernels(requested)) return *kernels;
  // A silent fall-back would let a benchmark or a test report figures of a level that it did not
  // run.
  if (is_known_level(requested)) {
    throw std::invalid_argument(std::string("RINGCOMM_SIMD=") + requested +
                                ": this processor lacks these instructions; the best it has is \"" +
                                choose_simd_kernels(nullptr).level +
                                "\"; unset the variable to use it");
  }
  throw std::invalid_argument(std::string("RINGCOMM_SIMD=\"") + requested +
                              "\" is not an instruction set: expected avx512, avx2 or baseline");
}

const SimdKernels& simd_kernels() {
  static const SimdKernels& chosen = choose_simd_kernels(std::getenv("RINGCOMM_SIMD"));
  return chosen;
}

const char* simd_level() { return simd_kernels().level; }

}  // namespace ringcomm::host
