// The updates in 64-byte vectors.

#if defined(__x86_64__)

#include "core/types.h"
#include "kernels/update_tables.h"

#define RINGCOMM_VECTOR_BYTES 64
#include "kernels/lanes_avx512.h"
#include "kernels/update_kernels.h"

namespace ringcomm::host {

constinit const UpdateKernels kAvx512Updates = make_update_kernels();

}  // namespace ringcomm::host

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // __x86_64__
