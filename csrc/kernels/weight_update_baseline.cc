// The passes over weights and their gradients for every processor.

#include "core/types.h"
#include "kernels/weight_update_tables.h"

#define RINGCOMM_VECTOR_BYTES 16
#include "kernels/lanes_baseline.h"
#include "kernels/weight_update_kernels.h"

namespace ringcomm::host {

constinit const WeightKernels kBaselineWeights = make_weight_kernels();

}  // namespace ringcomm::host
