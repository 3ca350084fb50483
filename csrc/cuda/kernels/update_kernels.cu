#include "cuda/kernels/gpu_block.cuh"
#include "cuda/kernels/kernel_list.h"

namespace ringcomm::cuda {
RINGCOMM_UPDATE_KERNELS(RINGCOMM_WIDE_GPU_KERNEL)
}  // namespace ringcomm::cuda
