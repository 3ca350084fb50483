// Softmax and updates for every processor.

#define RINGCOMM_VECTOR_BYTES 16
#include "kernels/common/make_tables.h"

namespace ringcomm::cpu {

constinit const Kernels kBaselineFloatKernels = make_kernels();

}  // namespace ringcomm::cpu
