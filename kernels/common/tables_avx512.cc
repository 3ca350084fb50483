// All kernels in 64-byte vectors.

#if defined(__x86_64__)

#define RINGCOMM_VECTOR_BYTES 64
#include "kernels/common/make_tables.h"

namespace ringcomm::cpu {

constinit const Kernels kAvx512Kernels = make_kernels("avx512");

}  // namespace ringcomm::cpu

#endif  // __x86_64__
