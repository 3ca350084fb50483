// All kernels for every processor.

#define RINGCOMM_VECTOR_BYTES 16
#include "kernels/common/make_tables.h"

namespace ringcomm::cpu {

constinit const Kernels kBaselineKernels = make_kernels("baseline");

}  // namespace ringcomm::cpu
