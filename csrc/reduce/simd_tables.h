#pragma once

#include <cstddef>

#include "core/types.h"

namespace ringcomm::host {

/// As ReduceOp::combine.
using CombineFn = void (*)(void* to, void* also_to, const void* const* srcs, int num_srcs,
                           std::size_t num_elems, int divisor);

/// The kernels of one instruction set. Internal to this folder and its tests.
///
/// Instances are constant-initialised: a constructor at load time would be compiled for that
/// instruction set and run on processors without it.
struct SimdKernels {
  const char* level = nullptr;
  CombineFn combine[kNumReductions][kNumDTypes] = {};  ///< null where the pair has no meaning
  /// Copies past the caches and fences; null where there are no such stores.
  void (*stream_copy)(void* to, const void* from, std::size_t num_bytes) = nullptr;
};

extern const SimdKernels kBaselineKernels;
#if defined(__x86_64__)
extern const SimdKernels kAvx2Kernels;
extern const SimdKernels kAvx512Kernels;
#endif

/// The kernels named `level`, or null where the name is unknown or this processor lacks the
/// instructions.
const SimdKernels* find_simd_kernels(const char* level);

/// The kernels that `requested` (the value of RINGCOMM_SIMD, null or empty if unset) selects;
/// throws like simd_level().
const SimdKernels& choose_simd_kernels(const char* requested);

/// The choice for this process, made at the first call.
const SimdKernels& simd_kernels();

}  // namespace ringcomm::host
