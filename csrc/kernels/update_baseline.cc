// The updates for every processor.

#include "core/types.h"
#include "kernels/update_tables.h"

#define RINGCOMM_VECTOR_BYTES 16
#include "kernels/lanes_baseline.h"
#include "kernels/update_kernels.h"

namespace ringcomm::host {

constinit const UpdateKernels kBaselineUpdates = make_update_kernels();

}  // namespace ringcomm::host
