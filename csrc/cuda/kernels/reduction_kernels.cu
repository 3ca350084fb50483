#include "cuda/kernels/gpu_kernel.cuh"
#include "cuda/kernels/kernel_list.h"

namespace ringcomm::cuda {
RINGCOMM_REDUCTION_KERNELS(RINGCOMM_GPU_KERNEL)
}  // namespace ringcomm::cuda
