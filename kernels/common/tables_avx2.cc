// All kernels in 32-byte vectors.

#if defined(__x86_64__)

#define RINGCOMM_VECTOR_BYTES 32
#include "kernels/common/make_tables.h"

namespace ringcomm::cpu {

constinit const Kernels kAvx2Kernels = make_kernels("avx2");

}  // namespace ringcomm::cpu

#endif  // __x86_64__
