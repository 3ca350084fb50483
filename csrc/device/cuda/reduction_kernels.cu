#include "device/cuda/gpu_kernel.cuh"
#include "device/cuda/kernel_list.h"

namespace ringcomm::cuda {
RINGCOMM_REDUCTION_KERNELS(RINGCOMM_GPU_KERNEL)
}  // namespace ringcomm::cuda
