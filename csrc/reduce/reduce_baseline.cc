// The reductions for every processor.

#define RINGCOMM_VECTOR_BYTES 16
#include "reduce/reduce_kernels.h"

constinit const ringcomm::cpu::SimdKernels ringcomm::cpu::kBaselineKernels =
    make_kernels("baseline");
