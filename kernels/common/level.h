#pragma once

#include <string_view>

// Kernels are compiled for several instruction sets (simd.h), and one of them is chosen at run
// time:
//
//   "avx512"    AVX-512 F, BW, DQ and VL (Skylake-SP, Zen 4 and later)
//   "avx2"      AVX2, F16C and FMA
//   "baseline"  what every processor has: SSE2 on x86-64, NEON on aarch64
//
// The kernels of a level are in a table that is constant-initialised: a constructor at load time
// would be compiled for that level, and run on processors without it.

namespace ringcomm::cpu {

/// The level in use. The best that the processor has, unless the environment variable RINGCOMM_SIMD
/// names one; read once. Throws like choose_simd_level().
std::string_view simd_level();

/// What `requested` (the value of RINGCOMM_SIMD, null or empty if unset) selects. Throws
/// std::invalid_argument if it names an unknown level, or one that the processor lacks.
std::string_view choose_simd_level(const char* requested);

/// False also where the name is unknown.
bool has_simd_level(std::string_view name);

}  // namespace ringcomm::cpu
