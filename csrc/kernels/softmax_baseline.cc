// The passes over logits for every processor.

#include "core/types.h"
#include "kernels/softmax_tables.h"

#define RINGCOMM_VECTOR_BYTES 16
#include "kernels/lanes_baseline.h"
#include "kernels/softmax_kernels.h"

namespace ringcomm::host {

constinit const SoftmaxKernels kBaselineSoftmax = make_softmax_kernels();

}  // namespace ringcomm::host
