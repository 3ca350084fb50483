// The reductions for every processor.

#define RINGCOMM_VECTOR_BYTES 16
#include "reduce/reduce_kernels.h"

namespace ringcomm::host {

constinit const SimdKernels kBaselineKernels = make_kernels("baseline");

}  // namespace ringcomm::host
