// The passes over weights and their gradients in 32-byte vectors.

#if defined(__x86_64__)

#include "core/types.h"
#include "kernels/weight_update_tables.h"

#define RINGCOMM_VECTOR_BYTES 32
#include "kernels/lanes_avx2.h"
#include "kernels/weight_update_kernels.h"

namespace ringcomm::host {

constinit const WeightKernels kAvx2Weights = make_weight_kernels();

}  // namespace ringcomm::host

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // __x86_64__
