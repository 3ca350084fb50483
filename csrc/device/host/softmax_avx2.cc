// The passes over logits in 32-byte vectors.

#if defined(__x86_64__)

#include "core/types.h"
#include "device/host/softmax_tables.h"

#define RINGCOMM_VECTOR_BYTES 32
#include "device/host/lanes_avx2.h"
#include "device/host/softmax_kernels.h"

namespace ringcomm::host {

constinit const SoftmaxKernels kAvx2Softmax = make_softmax_kernels();

}  // namespace ringcomm::host

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // __x86_64__
