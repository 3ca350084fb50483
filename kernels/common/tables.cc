#include "kernels/common/tables.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

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
std::vector<std::string_view> levels() {
  std::vector<std::string_view> all;
#if defined(__x86_64__)
  if (has_avx512()) all.emplace_back("avx512");
  if (has_avx2()) all.emplace_back("avx2");
#endif
  all.emplace_back("baseline");
  return all;
}

}  // namespace

std::string_view choose_simd_level(const char* requested) {
  const std::string name = requested != nullptr ? requested : "";
  const std::vector<std::string_view> all = levels();
  if (name.empty()) return all.front();
  const auto found = std::ranges::find(all, name);
  if (found != all.end()) return *found;
  // A silent fall-back would let a benchmark or a test report figures of a level that it did not
  // run.
  throw std::invalid_argument(
      name == "avx512" || name == "avx2"
          ? "RINGCOMM_SIMD=" + name +
                ": this processor lacks these instructions; the best it has is \"" +
                std::string(all.front()) + "\"; unset the variable to use it"
          : "RINGCOMM_SIMD=\"" + name +
                "\" is not an instruction set: expected avx512, avx2 or baseline");
}

std::string_view simd_level() {
  static const std::string_view chosen = choose_simd_level(std::getenv("RINGCOMM_SIMD"));
  return chosen;
}

const Kernels* find_kernels(std::string_view level) {
  const std::vector<std::string_view> all = levels();
  if (std::ranges::find(all, level) == all.end()) return nullptr;
#if defined(__x86_64__)
  if (level == "avx512") return &kAvx512Kernels;
  if (level == "avx2") return &kAvx2Kernels;
#endif
  return &kBaselineKernels;
}

const Kernels& kernels() {
  static const Kernels& chosen = *find_kernels(simd_level());
  return chosen;
}

}  // namespace ringcomm::cpu
