#include "cuda/kernels/gpu_block.cuh"
#include "cuda/kernels/kernel_list.h"

namespace ringcomm::cuda {
RINGCOMM_REDUCTION_KERNELS(RINGCOMM_GPU_KERNEL)
RINGCOMM_OTHER_KERNELS(RINGCOMM_GPU_KERNEL)
}  // namespace ringcomm::cuda
