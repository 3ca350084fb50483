// The reductions in 32-byte vectors.

#if defined(__x86_64__)
#define RINGCOMM_VECTOR_BYTES 32
#include "reduce/reduce_kernels.h"

constinit const ringcomm::cpu::SimdKernels ringcomm::cpu::kAvx2Kernels = make_kernels("avx2");
#endif
