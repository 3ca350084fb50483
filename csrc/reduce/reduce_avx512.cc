// The reductions in 64-byte vectors.

#if defined(__x86_64__)
#define RINGCOMM_VECTOR_BYTES 64
#include "reduce/reduce_kernels.h"

constinit const ringcomm::cpu::SimdKernels ringcomm::cpu::kAvx512Kernels = make_kernels("avx512");
#endif
